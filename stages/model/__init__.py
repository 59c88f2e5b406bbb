"""The noun *model*: loading by digest, batches, packing, losses, checkpoints and generation.

Everything here keeps per-document sums and counts, so that no result depends on how rows share a batch.
"""
