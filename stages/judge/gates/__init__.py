"""Gates, one a file: each asks one question of the evidence."""
