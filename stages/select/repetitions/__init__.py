"""Laws of repetition: what a row that is seen again is worth."""
