"""Laws of how a loss falls with parameters, data and compute, one a file, with their published constants."""
