"""Property tests run without a deadline: the machine that tests is shared, and its clock says nothing about a property."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared machine", deadline=None, max_examples=60)
settings.load_profile("shared machine")
