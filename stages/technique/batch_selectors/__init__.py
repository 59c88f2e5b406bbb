"""Batch selectors, one file each."""
