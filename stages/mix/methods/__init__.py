"""Mixtures, one a file."""
