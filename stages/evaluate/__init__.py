"""The verb `evaluate`: what base, champion and candidate do on the holdout, item by item."""
