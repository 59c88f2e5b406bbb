"""Statistics that several stages share: straight-line fits, paired comparisons."""
