"""Shakespeare from small files: roles, plain text, windows and splits."""

import json

import numpy as np
import pytest

from fedensemble.data import load, partition
from fedensemble.data.sources.shakespeare import VOCABULARY, decode
from fedensemble.errors import DataError, InputError

LONG = [f"line {number:02d} of a long speech" for number in range(10)]


def speech(play, speaker, lines, **more):
    return {"kind": "speech", "play": play, "speaker": speaker, "lines": lines, **more}


RECORDS = [
    {"kind": "stage", "play": "Hamlet", "text": "Enter all"},
    speech("Hamlet", "HAMLET", LONG[:5]),
    speech("Hamlet", "OPHELIA", ["two", "lines"]),
    speech("Hamlet", "HAMLET", LONG[5:]),
    speech("Hamlet", "GHOST", ["a", "b", "c"]),
    speech("Macbeth", "HAMLET", ["x" * 60, "y" * 60, "z" * 60]),
    {"kind": "poem", "title": "Sonnets", "lines": LONG},
]


@pytest.fixture
def root(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "works.jsonl").write_text(
        "\n".join(map(json.dumps, RECORDS)) + "\n"
    )
    return tmp_path


def test_roles_are_natural_clients(root):
    source = load("shakespeare", root=root, sequence=10)
    assert source.group_names == ("Hamlet: HAMLET", "Macbeth: HAMLET")
    assert source.info["form"] == "roles"
    assert source.info["roles"] == 4
    assert source.info["dropped_few_lines"] == 1  # OPHELIA
    assert source.info["dropped_short"] == 1  # GHOST
    assert source.classes == len(VOCABULARY) == 97
    data = partition(source, "natural")
    assert data.names == source.group_names
    assert data.label_counts().shape == (2, 97)


def test_windows_tile_each_role_and_stop_at_the_cut(root):
    source = load("shakespeare", root=root, sequence=10, test_fraction=0.2)
    text = "\n".join(LONG) + "\n"
    cut = len(text) - round(0.2 * len(text))
    mine = source.group == 0
    count = (cut - 1) // 10
    assert decode(source.x[mine].ravel()) == text[: 10 * count]
    assert decode(source.y[mine].ravel()) == text[1 : 10 * count + 1]
    held_out = (len(text) - cut - 1) // 10
    assert decode(source.x_test[:held_out].ravel()) == text[cut : cut + 10 * held_out]
    assert decode(source.y_test[:held_out].ravel()) == text[cut + 1 : cut + 10 * held_out + 1]


def test_no_test_set_when_nothing_is_held_out(root):
    source = load("shakespeare", root=root, sequence=10, test_fraction=0.0)
    assert source.x_test is None
    assert source.y_test is None


@pytest.mark.parametrize("name", ["shakespeare.txt", "input.txt"])
def test_plain_text_has_no_natural_clients(tmp_path, name):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / name).write_bytes(
        b"To be, or not to be,\r\nthat is the question." * 20
    )
    source = load("shakespeare", root=tmp_path, sequence=8)
    assert source.group is None
    assert source.info["form"] == "text"
    assert decode(source.x[:3].ravel()) == "To be, or not to be,\ntha"
    data = partition(source, "contiguous", clients=4)
    assert int(data.size.max() - data.size.min()) <= 1
    assert np.array_equal(data.x.numpy(), source.x)
    with pytest.raises(InputError, match="no natural clients"):
        partition(source, "natural")


def test_text_can_be_asked_for(root):
    (root / "shakespeare" / "input.txt").write_text("abc" * 100)
    assert load("shakespeare", root=root, form="text").group is None
    assert load("shakespeare", root=root, form="auto", sequence=10).group is not None


def test_characters_outside_the_vocabulary(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_text("né\t" * 30, encoding="utf-8")
    source = load("shakespeare", root=tmp_path, sequence=3)
    assert source.x[0].tolist() == [VOCABULARY.index("n"), 0, 0]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"kind": "speech", "pl', "line 8 is not a record"),
        ('{"kind": "speech", "play": "Hamlet"}', "line 8 is not a record .*speaker"),
        ("[1, 2]", "line 8 is not a record"),
        (
            '{"play": "Hamlet", "speaker": "HAMLET", "lines": "one"}',
            "record in line 8 must be a list of texts",
        ),
    ],
)
def test_damaged_records(root, line, problem):
    with (root / "shakespeare" / "works.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(DataError, match=rf"works\.jsonl is damaged.*{problem}"):
        load("shakespeare", root=root)


def test_not_text(tmp_path):
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "input.txt").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match=r"input\.txt is damaged.*UTF-8"):
        load("shakespeare", root=tmp_path)


def test_missing_and_too_short(root, tmp_path):
    with pytest.raises(
        DataError, match=r"shakespeare\.txt, which is missing.*input\.txt.*data get shakespeare"
    ):
        load("shakespeare", root=tmp_path / "elsewhere")
    with pytest.raises(DataError, match=r"works\.jsonl, which is missing.*form='text'"):
        load("shakespeare", root=tmp_path / "elsewhere", form="roles")
    with pytest.raises(DataError, match="Lower sequence"):
        load("shakespeare", root=root, sequence=5000)
    with pytest.raises(InputError, match="form to be one of"):
        load("shakespeare", root=root, form="verse")
