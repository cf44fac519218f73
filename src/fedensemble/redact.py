"""Removes credentials from text before it is printed or written to files."""

from __future__ import annotations

import re

# User name and password: "user:password@" after "://". Greedy, because a password may contain an
# unescaped @.
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
# A query parameter whose name ends in a word for a secret, such as "?access_token=...".
_SECRET = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|password|passwd|secret|signature|key|sig))=)[^&;#\s'\"]+"
)


def redact(text: str) -> str:
    """The text with the user names, passwords and tokens in its URLs replaced by ***.

    >>> redact("https://user:pass@host/path"), redact("sqlite:////tmp/mlflow.db")
    ('https://***@host/path', 'sqlite:////tmp/mlflow.db')
    >>> redact("GET https://host/api?token=abc&page=2 failed")
    'GET https://host/api?token=***&page=2 failed'
    """
    return _SECRET.sub(r"\1***", _USER.sub("***@", text))
