"""MNIST and Fashion-MNIST from tiny files in the official layout, valid and damaged."""

import gzip
import struct

import numpy as np
import pytest

from fedensemble.data import load
from fedensemble.data.sources.mnist import FOLDERS
from fedensemble.errors import DataError


def idx(array):
    """Returns the bytes of an IDX file."""
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


@pytest.fixture
def files():
    """Returns the contents of the four files, for 6 training and 4 test images."""
    random = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": idx(random.integers(256, size=(6, 28, 28))),
        "train-labels-idx1-ubyte": idx(np.array([0, 1, 2, 3, 9, 9])),
        "t10k-images-idx3-ubyte": idx(random.integers(256, size=(4, 28, 28))),
        "t10k-labels-idx1-ubyte": idx(np.array([5, 6, 7, 8])),
    }


def write(folder, files, packed):
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / (name + (".gz" if packed else ""))
        path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize(
    ("folder", "packed"), [("mnist", True), ("mnist", False), ("MNIST/raw", True)]
)
def test_reads_official_layouts(tmp_path, files, folder, packed):
    write(tmp_path / folder, files, packed)
    source = load("mnist", root=tmp_path)
    assert source.x.shape == (6, 1, 28, 28)
    assert source.x.dtype == np.uint8
    assert source.x.tobytes() == files["train-images-idx3-ubyte"][16:]
    assert source.y.tolist() == [0, 1, 2, 3, 9, 9]
    assert source.y_test.tolist() == [5, 6, 7, 8]
    assert source.classes == 10
    assert len(source.info["files"]) == 4


@pytest.mark.parametrize("folder", ["fashion-mnist", "FashionMNIST/raw"])
def test_reads_fashion_mnist(tmp_path, files, folder):
    write(tmp_path / folder, files, packed=True)
    source = load("fashion-mnist", root=tmp_path)
    assert source.x.tobytes() == files["train-images-idx3-ubyte"][16:]
    assert source.class_names[9] == "Ankle boot" and source.classes == 10
    assert source.info["source"] == "fashion-mnist"
    assert source.standardise != load_mnist(tmp_path / "other", files).standardise


def load_mnist(folder, files):
    write(folder / "mnist", files, packed=True)
    return load("mnist", root=folder)


def test_finds_the_files_of_debian_outside_of_the_data_folder(tmp_path, files, monkeypatch):
    write(tmp_path / "system", files, packed=True)
    monkeypatch.setitem(FOLDERS, "fashion-mnist", ("fashion-mnist", str(tmp_path / "system")))
    source = load("fashion-mnist", root=tmp_path / "data")
    assert source.info["files"][0].startswith(str(tmp_path / "system"))
    # The data folder comes first.
    files["t10k-labels-idx1-ubyte"] = idx(np.array([1, 1, 1, 1]))
    write(tmp_path / "data" / "fashion-mnist", files, packed=True)
    assert load("fashion-mnist", root=tmp_path / "data").y_test.tolist() == [1, 1, 1, 1]


def test_environment_names_the_folder(tmp_path, files, monkeypatch):
    write(tmp_path / "mnist", files, packed=True)
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(tmp_path))
    assert len(load("mnist")) == 6


def test_missing_file_says_where_and_how(tmp_path, files):
    del files["t10k-labels-idx1-ubyte"]
    write(tmp_path / "mnist", files, packed=True)
    with pytest.raises(DataError) as caught:
        load("mnist", root=tmp_path)
    message = str(caught.value)
    for part in (
        "mnist/t10k-labels-idx1-ubyte.gz",
        "MNIST/raw/t10k-labels-idx1-ubyte",
        "fedensemble data get mnist",
    ):
        assert part in message
    assert "FEDENSEMBLE_DATA" in message


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        (
            "train-images-idx3-ubyte",
            lambda b: b[:-5],
            "expected 4704 bytes after the header .*, got 4699",
        ),
        ("train-images-idx3-ubyte", lambda b: b + b"x", "got 4705"),
        ("train-images-idx3-ubyte", lambda b: b[:10], "header of 16 bytes, got 10"),
        ("train-images-idx3-ubyte", lambda b: b"", "an empty file"),
        ("train-images-idx3-ubyte", lambda b: b"<html>", "expected it to begin with 00000803"),
        (
            "train-images-idx3-ubyte",
            lambda b: idx(np.zeros((6, 8, 8))),
            "expected images of 28x28, got 8x8",
        ),
        ("train-labels-idx1-ubyte", lambda b: idx(np.zeros(5)), "expected 6 labels"),
        ("t10k-labels-idx1-ubyte", lambda b: idx(np.full(4, 10)), "expected labels 0 to 9, got 10"),
    ],
)
def test_damaged_file_is_named(tmp_path, files, name, damage, problem):
    files[name] = damage(files[name])
    write(tmp_path / "mnist", files, packed=False)
    with pytest.raises(DataError, match=f"{name} is damaged.*{problem}"):
        load("mnist", root=tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b"not gzip at all", lambda b: b[:30] + b"?" * 40]
)
def test_damaged_packing_is_named(tmp_path, files, damage):
    write(tmp_path / "mnist", files, packed=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz is damaged"):
        load("mnist", root=tmp_path)
