"""The verb `govern`: whether the next segment is worth its FLOPs."""
