"""Coverages, one a file; the class in each subclasses `stages.score.cover.Coverage`."""
