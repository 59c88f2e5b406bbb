"""The techniques, one file each."""
