"""Texts of users, against loops over characters and words."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data import load, partition
from fedensemble.data.folders.encode_text import (
    OTHER,
    encode_bytes,
    encode_characters,
    find_vocabulary,
    hash_words,
)
from fedensemble.errors import DataError, InputError

texts = st.text(st.characters(codec="utf-8"), max_size=30)


@settings(deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(2, 12))
def test_characters_come_back_from_their_numbers(parts, most):
    vocabulary = find_vocabulary(parts, most)
    counts = Counter(c for c in "".join(parts) if c != OTHER)
    assert len(vocabulary) == min(most, len(counts) + 1) == len(set(vocabulary))
    kept, lost = set(vocabulary[1:]), set(counts) - set(vocabulary)
    assert min((counts[c] for c in kept), default=9) >= max((counts[c] for c in lost), default=0)
    for text in [*parts, "\n\U0010ffffa"]:
        decoded = [vocabulary[number] for number in encode_characters(text, vocabulary)]
        assert decoded == [c if c in kept else OTHER for c in text]


@settings(deadline=None)
@given(st.lists(texts, max_size=4), st.integers(1, 20))
def test_bytes_come_back_from_their_numbers(parts, length):
    for row, text in zip(encode_bytes(parts, length), parts, strict=True):
        expected = text.encode()[:length]
        assert bytes((row[row > 0] - 1).tolist()) == expected
        assert (row[len(expected) :] == 0).all()


def test_words_count_by_their_hash():
    x = hash_words(["Good good, bad", "bad", "1 a"], 64)
    good, bad = x[0].argmax(), x[1].argmax()
    assert good != bad and np.count_nonzero(x[0]) == 2
    assert x[0, good] == pytest.approx(2 * x[0, bad])
    np.testing.assert_allclose(np.linalg.norm(x[:2], axis=1), 8, rtol=1e-6)  # sqrt(64)
    assert not x[2].any()  # words of one letter tell nothing


def windows_of(text, sequence):
    """All windows of `sequence` characters that have a next character, without overlap."""
    starts = range(0, len(text) - sequence, sequence)
    return [(text[s : s + sequence], text[s + 1 : s + sequence + 1]) for s in starts]


@pytest.fixture
def plays(tmp_path):
    content = {
        "ann_1": "the cat sat on the mat. " * 4,
        "ann_2": "größe " * 12,
        "bob_1": "0123456789" * 6,
        "eve_1": "short",
    }
    (tmp_path / "plays").mkdir()
    for name, text in content.items():
        (tmp_path / "plays" / f"{name}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "plays", content


def decoded(source, x, y):
    tokens = source.class_names
    return [
        ("".join(tokens[t] for t in a), "".join(tokens[t] for t in b))
        for a, b in zip(x, y, strict=True)
    ]


def test_next_characters_of_each_file(plays):
    folder, content = plays
    source = load("text", path=folder, sequence=10, test_share=0.25)
    train, test, owners = [], [], []
    for name, text in content.items():
        cut = len(text) - round(0.25 * len(text))
        train += windows_of(text[:cut], 10)
        owners += [name] * len(windows_of(text[:cut], 10))
        test += windows_of(text[cut:], 10)
    assert decoded(source, source.x, source.y) == train
    assert decoded(source, source.x_test, source.y_test) == test
    assert [source.group_names[g] for g in source.group] == owners
    assert source.group_names == ("ann_1", "ann_2", "bob_1")
    assert source.notes == ("Texts of less than 11 characters are left out: eve_1.txt.",)
    assert (
        source.classes
        == len(source.class_names)
        == 1
        + len(
            set("".join(text[: len(text) - round(0.25 * len(text))] for text in content.values()))
        )
    )


def test_clients_of_several_files(plays):
    folder, _ = plays
    source = load("text", path=folder, sequence=10, client="{client}_*")
    assert source.group_names == ("ann", "bob")
    data = partition(source, "natural")
    assert data.names == ("ann", "bob") and int(data.size.sum()) == len(source.x)
    (folder / "clients.csv").write_text(
        "file,client\n" + "".join(f"{p.name},{p.stem[-1]}\n" for p in folder.glob("*.txt"))
    )
    source = load("text", path=folder, sequence=10, client_file="clients.csv")
    assert source.group_names == ("1", "2") and len(source.notes) == 1


def test_one_file_has_no_clients(plays):
    folder, content = plays
    source = load("text", path=folder / "bob_1.txt", sequence=5, test_share=0)
    assert source.group is None and source.x_test is None
    assert decoded(source, source.x, source.y) == windows_of(content["bob_1"], 5)
    assert len(partition(source, "contiguous", 3)) == 3
    with pytest.raises(InputError, match=r"is one file. Leave them out; partition = 'contiguous'"):
        load("text", path=folder / "bob_1.txt", client="{client}_*")


def test_the_vocabulary_of_shakespeare(plays):
    source = load("text", path=plays[0], sequence=10, vocabulary="ascii", test_share=0)
    assert source.classes == 97
    assert "gr\ufffd\ufffde" in "".join(x for x, _ in decoded(source, source.x, source.y))


def reviews(tmp_path, rows=40):
    words = {"good": "fine lovely", "bad": "awful sad"}
    table = [
        (f"it was {words[label]} {row}", label, f"u{row % 3}")
        for row, label in enumerate(["good", "bad"] * (rows // 2))
    ]
    file = tmp_path / "reviews.csv"
    lines = [f'"{text}",{label},{user}' for text, label, user in table]
    file.write_text("\n".join(["review,stars,user", *lines]))
    for text, label, user in table:
        path = tmp_path / "mails" / label / f"{user}_{text.split()[-1]}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return file, table


def test_tables_and_folders_of_documents(tmp_path):
    file, table = reviews(tmp_path)
    options = {"task": "classify", "test_share": 0, "features": 128}
    source = load("text", path=file, column="review", target="stars", client="user", **options)
    assert np.array_equal(source.x, hash_words([text for text, _, _ in table], 128))
    assert source.class_names == ("bad", "good")
    assert [source.class_names[label] for label in source.y] == [label for _, label, _ in table]
    assert [source.group_names[g] for g in source.group] == [user for _, _, user in table]
    other = load("text", path=tmp_path / "mails", client="{client}_*", **options)
    key = lambda source: sorted(  # noqa: E731
        (x.tobytes(), int(y), source.group_names[g])
        for x, y, g in zip(source.x, source.y, source.group, strict=True)
    )
    assert key(other) == key(source)
    tokens = load("text", path=file, column="review", target="stars", task="classify",
                  encoding="bytes", sequence=12, test_share=0)  # fmt: skip
    assert np.array_equal(tokens.x, encode_bytes([text for text, _, _ in table], 12))
    assert tokens.x.dtype == np.int64 and tokens.group is None


def test_test_documents(tmp_path):
    file, _ = reviews(tmp_path)
    drawn = load("text", path=file, column="review", target="stars", client="user", task="classify")
    assert np.bincount(drawn.y_test).tolist() == [4, 4] and drawn.test_group.min() >= 0
    test = tmp_path / "test.csv"
    test.write_text("stars,review\ngood,lovely\n")
    given_ = load("text", path=file, column="review", target="stars", client="user",
                  task="classify", test_path=test)  # fmt: skip
    assert len(given_.x) == 40 and given_.y_test.tolist() == [1]
    assert given_.test_group.tolist() == [-1]
    folder = load("text", path=tmp_path / "mails", task="classify", client="{client}_*",
                  test_path=tmp_path / "mails")  # fmt: skip
    assert np.array_equal(folder.x, folder.x_test)
    assert np.array_equal(folder.group, folder.test_group)


def test_a_config_finds_the_clients(plays, tmp_path):
    def natural(**table):
        config = resolve({"data": {"source": "text", **table}, "ensemble": {"modes": 1},
                          "model": {"name": "mlp"}})  # fmt: skip
        assert config.data["partition"] == "natural"
        return build_data(config)

    assert natural(path=str(plays[0]), sequence=10).names == ("ann_1", "ann_2", "bob_1")
    file, _ = reviews(tmp_path)
    data = natural(path=str(file), task="classify", column="review", target="stars", client="user")
    assert data.names == ("u0", "u1", "u2") and data.class_names == ("bad", "good")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sequence": 500}, "has 501 characters for one window. Lower sequence"),
        ({"path": "reviews.csv"}, "is a table. To classify its texts set task = 'classify'"),
        ({"path": "empty"}, "has no files of text"),
        ({"path": "latin.txt"}, r"is not text in UTF-8: byte 1 is 0xe9. Convert it, as by `iconv"),
        ({"target": "stars"}, "target is for classification: set task = 'classify'"),
        ({"task": "classify"}, r"has no subfolders, .* Arrange the texts as"),
        ({"task": "classify", "path": "mails", "column": "x"}, "column is for a table"),
        ({"task": "classify", "path": "reviews.csv"}, "is a table: give column"),
        ({"task": "classify", "path": "reviews.csv", "column": "x", "target": "stars"},
         "unknown column 'x'"),
        ({"task": "classify", "path": "gap.csv", "column": "review", "target": "stars"},
         r"missing values, by column: 'review' 1 \(the first in line 3\)"),
        ({"most_characters": 1}, "most_characters to be an integer >= 2"),
        ({"task": "sort"}, "task to be one of next, classify"),
    ],
)  # fmt: skip
def test_mistakes_say_what_to_do(plays, tmp_path, options, message):
    reviews(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"h\xe9 " * 100)
    (tmp_path / "gap.csv").write_text("review,stars\nfine,good\n,bad\n")
    given_ = {"path": plays[0], **options}
    given_["path"] = tmp_path / given_["path"]
    with pytest.raises((DataError, InputError), match=message):
        load("text", **given_)
