"""The governor: what a run has bought so far, what more would buy, and the policies that decide on it."""
