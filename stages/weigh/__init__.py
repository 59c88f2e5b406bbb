"""The verb `weigh`: which way of choosing pays here."""
