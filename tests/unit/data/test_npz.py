"""The user's own arrays from .npz files."""

import numpy as np
import pytest
import torch

from fedensemble.data import load, partition
from fedensemble.errors import DataError, InputError


@pytest.fixture
def arrays():
    random = np.random.default_rng(0)
    return {
        "x": random.normal(size=(6, 2)).astype(np.float32),
        "y": np.array([0, 1, 2, 0, 1, 2]),
        "x_test": random.normal(size=(3, 2)).astype(np.float32),
        "y_test": np.array([0, 1, 3]),
        "client": np.array(["ann", "bob", "ann", "cid", "bob", "ann"]),
    }


def test_reads_arrays_and_clients(tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    source = load("npz", path=tmp_path / "mine.npz")
    data = partition(source, "natural")
    assert data.names == ("ann", "bob", "cid")
    assert data.size.tolist() == [3, 2, 1]
    assert data.y.tolist() == [0, 2, 2, 1, 1, 0]
    assert data.classes == 4
    assert data.y_test.tolist() == [0, 1, 3]


def test_other_names_and_data_folder(tmp_path, arrays):
    np.savez(
        tmp_path / "mine.npz",
        images=arrays["x"],
        labels=arrays["y"],
        who=np.array([7, 7, 3, 3, 3, 7]),
    )
    source = load(
        "npz", path="mine.npz", root=tmp_path, x="images", y="labels", client="who", classes=5
    )
    assert source.group.tolist() == [1, 1, 0, 0, 0, 1]
    assert source.group_names == ("3", "7")
    assert source.classes == 5
    assert source.x_test is None


def test_images_and_tokens(tmp_path):
    images, tokens = np.full((4, 1, 3, 3), 255, np.uint8), np.ones((4, 5), np.uint8)
    np.savez(
        tmp_path / "images.npz",
        x=images,
        y=np.arange(4, dtype=np.uint8),
        x_test=images,
        y_test=np.arange(4),
    )
    np.savez(tmp_path / "tokens.npz", x=tokens, y=tokens, x_test=tokens, y_test=tokens)
    data = partition(load("npz", path=tmp_path / "images.npz"), "iid", clients=2)
    assert float(data.inputs(data.x, torch.float32).max()) == 1.0
    assert data.y.dtype == data.y_test.dtype
    data = partition(load("npz", path=tmp_path / "tokens.npz"), "iid", clients=2)
    assert data.x.dtype == data.y.dtype == data.x_test.dtype == data.y_test.dtype
    assert not data.x.is_floating_point()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": None}, r"no array 'x' for x\. It has client, x_test, y, y_test"),
        ({"x": np.array([{"a": 1}] * 6, object)}, "Array 'x' .* object array"),
        ({"x": np.float32(3)}, "single value"),
        ({"x_test": None}, "only one of the two test arrays"),
        ({"client": np.arange(6) / 2}, "Client ids .* got float64"),
        ({"client": np.arange(5)}, "client numbers have shape"),
        ({"y": np.arange(5)}, "6 inputs but 5 targets"),
    ],
)
def test_unusable_arrays(tmp_path, arrays, change, problem):
    arrays = {name: array for name, array in {**arrays, **change}.items() if array is not None}
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match=problem):
        load("npz", path=tmp_path / "mine.npz")


def test_named_array_must_be_there(tmp_path, arrays):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(DataError, match="no array 'owner' for client"):
        load("npz", path=tmp_path / "mine.npz", client="owner")


def test_not_an_npz(tmp_path, arrays):
    path = tmp_path / "mine.npz"
    for content in (b"hello", b""):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"mine\.npz is damaged.*not an \.npz file"):
            load("npz", path=path)
    np.savez(path, **arrays)
    path.write_bytes(path.read_bytes()[:400])
    with pytest.raises(DataError, match=r"mine\.npz is damaged"):
        load("npz", path=path)
    with path.open("wb") as file:
        np.save(file, arrays["x"])
    with pytest.raises(DataError, match=r"one array \(\.npy\)"):
        load("npz", path=path)


def test_bytes_changed_inside(tmp_path, arrays):
    path = tmp_path / "mine.npz"
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    content[180:200] = bytes(20)
    path.write_bytes(bytes(content))
    with pytest.raises(DataError, match=r"mine\.npz is damaged.*array 'x'"):
        load("npz", path=path)


def test_missing_file_and_option(tmp_path):
    with pytest.raises(DataError, match=r"Looked for no\.npz, .*no\.npz"):
        load("npz", path="no.npz", root=tmp_path)
    with pytest.raises(InputError, match="needs the option 'path'"):
        load("npz")
