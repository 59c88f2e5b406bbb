"""Noun: small sets that stand for a large one. Greedy maximisation, its objectives, similarities, matching pursuit."""
