"""Why one row is not used: raised where the fault is seen, caught where rows are counted."""

from __future__ import annotations


class Refused(Exception):  # noqa: N818 - a verdict on a row, not a failure of ours
    """A row that cannot be used.

    Args:
        reason: a code that rows are counted by (bad_json, empty_answer, duplicate, …).
        detail: a sentence for people: the value found, what was expected and what to do.
        field: the field at fault, such as `messages[2].content`; "" where it is the row.
    """

    def __init__(self, reason: str, detail: str, field: str = "") -> None:
        super().__init__(reason, detail, field)
        self.reason, self.detail, self.field = reason, detail, field
