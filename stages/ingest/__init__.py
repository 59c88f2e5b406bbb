"""Ingest: from the user's files to examples and tokens; every row that is not used is named with its reason."""
