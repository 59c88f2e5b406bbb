"""The verb *train* (and its first segment, `begin`): a segment of optimizer steps on a selection, exactly resumable."""
