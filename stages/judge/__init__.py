"""The verb `judge`: may the candidate be promoted? Pure."""
