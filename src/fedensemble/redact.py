"""Removes credentials from text before it is printed or written to files."""

from __future__ import annotations

import re
from collections.abc import Sequence

# User name and password: "user:password@" after "://". Greedy, because a password may contain an
# unescaped @.
_USER = re.compile(r"(?<=://)[^/\s?#]+@")
# A query parameter whose name ends in a word for a secret, such as "?access_token=...".
_SECRET = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|password|passwd|secret|signature|key|sig))=)[^&;#\s'\"]+"
)
# An option whose value is a secret. Options that end in "key" often name a file, so only API keys.
_SECRET_OPTION = re.compile(r"(?i)(token|password|passwd|secret|api[-_]?key)$")
HIDDEN = "***"


def redact(text: str) -> str:
    """The text with the user names, passwords and tokens in its URLs replaced by ***.

    >>> redact("https://user:pass@host/path"), redact("sqlite:////tmp/mlflow.db")
    ('https://***@host/path', 'sqlite:////tmp/mlflow.db')
    >>> redact("GET https://host/api?token=abc&page=2 failed")
    'GET https://host/api?token=***&page=2 failed'
    """
    return _SECRET.sub(r"\1***", _USER.sub("***@", text))


def redact_command(words: Sequence[str]) -> list[str]:
    """A command line without credentials: neither in addresses nor as values of options.

    Flower, for example, starts the app of a run with `--token TOKEN`.

    >>> redact_command(["--token", "abc", "--api-key=abc", "--set", "rounds=3"])
    ['--token', '***', '--api-key=***', '--set', 'rounds=3']
    """
    shown = []
    secret_follows = False
    for word in words:
        name, equals, _ = word.partition("=")
        secret = word.startswith("-") and _SECRET_OPTION.search(name) is not None
        if secret_follows and not word.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(f"{name}={HIDDEN}" if secret and equals else redact(word))
        secret_follows = secret and not equals
    return shown
