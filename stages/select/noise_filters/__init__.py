"""Noise filters, one file each."""
