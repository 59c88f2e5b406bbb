"""Policies, one a file: when to go on, choose data anew, anneal or stop."""
