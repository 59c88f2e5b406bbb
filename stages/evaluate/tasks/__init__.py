"""Tasks, one a file: what a model is asked to do with an item, and how its answer is marked."""
