"""Search spaces are read from --set, and what is no space stays an override."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedensemble.config.search_space import Choices, Range, parse_space, split_spaces
from fedensemble.config.toml import parse_setting
from fedensemble.errors import InputError


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("a.b=log:0.01..1", Range("a.b", 0.01, 1, log=True)),
        ("a.b=0.1..0.5", Range("a.b", 0.1, 0.5)),
        ("a.b=-1e-3..+2.", Range("a.b", -1e-3, 2.0)),
        ("a.b= 0 .. 9 ", Range("a.b", 0, 9, integer=True)),
        ("a.b=int:2..8", Range("a.b", 2, 8, integer=True)),
        ("a.b=log:8..512", Range("a.b", 8, 512, log=True, integer=True)),
        ("a=x|y", Choices("a", ("x", "y"))),
        ("a=[16]|[32, 16]", Choices("a", ("[16]", "[32, 16]"))),
        ("a=0.1|0.3|1", Choices("a", ("0.1", "0.3", "1"))),
        ("a='x|y'|z", Choices("a", ("'x|y'", "z"))),
    ],
)
def test_spaces(text, space):
    assert parse_space(text) == space


@pytest.mark.parametrize(
    "text", ["a=1", "a='x|y'", "a=../data.npz", "a=1...", "a=x..y", "a=[1, 2]", "a=http://x/y"]
)
def test_other_values_are_overrides(text):
    assert parse_space(text) is None and split_spaces([text]) == ([text], [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=1..1", "smaller than the upper"),
        ("a=2.0..1", "smaller than the upper"),
        ("a=log:0..1", "must be positive"),
        ("a=log:-1..1", "must be positive"),
        ("a=log:x", "comes LOW..HIGH"),
        ("a=int:0.5..3", "must be integers"),
        ("a=ln:1..3", "got 'ln:'"),
        ("a=1..1e999", "smaller than the upper"),
        ("a=1..100000000000000000000", "2.53"),
        ("a=x||y", "empty choice"),
        ("a=x|", "empty choice"),
        ("a=x|y|x", "choice twice"),
        ("a=1|1", "choice twice"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(InputError, match=message):
        parse_space(text)


def test_a_key_is_given_once():
    with pytest.raises(InputError, match="given twice"):
        split_spaces(["a=1..2", "a=3"])


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6), st.floats(0, 1), st.booleans())
def test_a_value_that_is_typed_is_in_the_range(low, width, share, integer):
    if integer:
        low, width = float(math.floor(low)), float(math.ceil(width))
    high = low + width
    if not low < high:
        return
    value = min(high, low + share * (high - low))
    space = Range("a", low, high, integer=integer)
    text = space.show(round(value) if integer else value)
    typed = parse_setting(f"a={text}")["a"]
    assert low <= typed <= high and isinstance(typed, int if integer else float)
    assert integer or math.isclose(typed, value, rel_tol=6e-4, abs_tol=1e-300)
