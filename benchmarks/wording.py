"""Recorded answers of `evenstep compare`, in the words that it uses today."""

from __future__ import annotations

import re

_ANOTHER = re.compile(
    r"\banother (number|order|mode|precision|loss|scale|experiment|learning rate)\b"
)
_OTHER = re.compile(
    r"\b(begin with|called with|has|have|see|gives?|and) other "
    r"(weights|arguments|examples|settings|outputs|lengths|gradients)\b"
)


def in_todays_words(line: str) -> str:
    """Return a line that an earlier version wrote, as this one would write it."""
    return _OTHER.sub(r"\1 different \2", _ANOTHER.sub(r"a different \1", line))
