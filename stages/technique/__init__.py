"""The noun *technique*: which parameters train, and the one optimizer step that `plan` traces and `train` runs."""
