"""Search spaces of `fedensemble tune`: `--set algorithm.lr=log:0.01..1`, `--set rounds=50|100`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..text import shorten
from .sweep import split_values
from .toml import check_given_once, parse_setting

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(?:(\w+):)?\s*({_NUMBER})\s*\.\.\s*({_NUMBER})")
_INTEGER = re.compile(r"[-+]?\d+")
SCALES = ("log", "int")


@dataclass(frozen=True)
class Range:
    """The numbers between two bounds, which belong to it.

    Args:
        key: of the setting.
        low, high: the bounds.
        log: whether the logarithm is searched uniformly.
        integer: whether only integers belong to it.
    """

    key: str
    low: float
    high: float
    log: bool = False
    integer: bool = False

    def show(self, value: float) -> str:
        """Returns a value as it is typed: with four digits, if it then is in the range.

        >>> Range("algorithm.lr", 0.01, 1, log=True).show(0.0312345)
        '0.03123'
        """
        if self.integer:
            return str(int(value))
        rounded = float(f"{value:.4g}")
        return repr(rounded if self.low <= rounded <= self.high else float(value))

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that show whether the setting accepts this range."""
        return self.show(self.low), self.show(self.high)


@dataclass(frozen=True)
class Choices:
    """Some values of a setting, as they were typed."""

    key: str
    values: tuple[str, ...]

    @property
    def ends(self) -> tuple[str, ...]:
        """Values that show whether the setting accepts these choices: all of them."""
        return self.values


Space = Range | Choices


def split_spaces(settings: Sequence[str]) -> tuple[list[str], list[Space]]:
    """Returns the overrides "key=value", and the search spaces among the settings.

    >>> split_spaces(["rounds=9", "algorithm.lr=log:0.01..1", "model.hidden=[16]|[64]"])[1][1]
    Choices(key='model.hidden', values=('[16]', '[64]'))
    """
    check_given_once(settings)
    single: list[str] = []
    spaces: list[Space] = []
    for text in settings:
        space = parse_space(text)
        if space is None:
            single.append(text)
        else:
            spaces.append(space)
    return single, spaces


def parse_space(text: str) -> Space | None:
    """Returns the search space of one "key=space"; None if it is a single value.

    >>> parse_space("ensemble.modes=2..8")
    Range(key='ensemble.modes', low=2.0, high=8.0, log=False, integer=True)
    >>> parse_space("data.path=../a.npz")
    """
    key, equals_sign, value = (part.strip() for part in text.partition("="))
    match = _RANGE.fullmatch(value)
    if match is not None:
        return _range(text, key, match)
    if value.partition(":")[0] in SCALES:
        raise InputError(
            f"--set {shorten(text)} is no range: after log: or int: comes LOW..HIGH, such as "
            "log:0.01..1."
        )
    choices = split_values(value, "|") if equals_sign else []
    if len(choices) < 2:
        return None
    if not all(choices):
        raise InputError(
            f"--set {shorten(text)} has an empty choice. Choices are separated by |; a value that "
            "contains a | needs quotes."
        )
    parsed = [parse_setting(f"{key}={choice}") for choice in choices]
    if any(values in parsed[:at] for at, values in enumerate(parsed)):
        raise InputError(f"--set {shorten(text)} has a choice twice. Give it once.")
    return Choices(key, tuple(choices))


def _range(text: str, key: str, match: re.Match[str]) -> Range:
    scale, low, high = match[1], float(match[2]), float(match[3])
    if scale is not None and scale not in SCALES:
        raise InputError(
            f"--set {shorten(text)}: a range has no prefix, log: or int:; got '{shorten(scale)}:'."
        )
    integer = all(_INTEGER.fullmatch(bound) for bound in match.groups()[1:])
    if scale == "int" and not integer:
        raise InputError(f"--set {shorten(text)}: the bounds of int: must be integers.")
    if not math.isfinite(low) or not math.isfinite(high) or not low < high:
        raise InputError(
            f"--set {shorten(text)}: the lower bound of a range comes first and is smaller than "
            "the upper one."
        )
    if scale == "log" and low <= 0:
        raise InputError(f"--set {shorten(text)}: the bounds of log: must be positive.")
    if integer and max(abs(low), abs(high)) > 1 << 53:
        raise InputError(f"--set {shorten(text)}: the bounds of a range must be below 2^53.")
    return Range(key, low, high, scale == "log", integer)
