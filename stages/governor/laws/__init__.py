"""Laws of how a loss falls with parameters and data, with their published constants; fitting them is left to others."""
