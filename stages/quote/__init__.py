"""Quote: what a run is expected to come to, from the plan, words, and probes."""
