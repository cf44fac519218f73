"""Docstrings as reStructuredText: they are plain text with names in single backquotes."""

from __future__ import annotations

import re

# A name or code in backquotes, or a character that has a meaning in reStructuredText. An underscore
# has one at the end of a word only.
_SPECIAL = re.compile(r"``.+?``|`[^`]+`|[|*\\]|(?<=\w)_(?!\w)")


def as_rst(lines: list[str]) -> list[str]:
    """Returns the lines with special characters escaped, except in code and in examples."""
    result: list[str] = []
    in_example = False
    for line in lines:
        in_example = bool(line.strip()) and (in_example or line.lstrip().startswith(">>>"))
        result.append(line if in_example else _SPECIAL.sub(_escaped, line))
    return result


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[0].startswith("`") else f"\\{match[0]}"
