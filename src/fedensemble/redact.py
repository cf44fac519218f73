"""Takes credentials out of text that is printed or written to files."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)[^/\s?#]+@")  # greedy: a password may hold an unescaped @
_SECRET = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|password|passwd|secret|signature|key|sig))=)[^&;#\s'\"]+"
)


def redact(text: str) -> str:
    """The text with user names, passwords and tokens of its URLs replaced by ***.

    >>> redact("https://user:pass@host/path"), redact("sqlite:////tmp/mlflow.db")
    ('https://***@host/path', 'sqlite:////tmp/mlflow.db')
    >>> redact("GET https://host/api?token=abc&page=2 failed")
    'GET https://host/api?token=***&page=2 failed'
    """
    return _SECRET.sub(r"\1***", _USER.sub("***@", text))
