"""Scorers, one a file; the class in each subclasses `stages.score.scorer.Scorer`."""
