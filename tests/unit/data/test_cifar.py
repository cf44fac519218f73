"""CIFAR-10 and CIFAR-100 from tiny files in the official binary layouts."""

import numpy as np
import pytest

from fedensemble.data import load
from fedensemble.errors import DataError, InputError

BATCHES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]


def records(labels, seed=0):
    """Records of the given label columns [n, columns] and random pixels."""
    labels = np.asarray(labels, np.uint8)
    pixels = np.random.default_rng(seed).integers(256, size=(len(labels), 3072), dtype=np.uint8)
    return np.concatenate([labels, pixels], axis=1)


@pytest.fixture
def ten(tmp_path):
    """A data folder with CIFAR-10 of three images per batch."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for number, name in enumerate(BATCHES):
        records([[number], [9], [0]], seed=number).tofile(folder / name)
    return tmp_path


@pytest.fixture
def hundred(tmp_path):
    """A data folder with CIFAR-100 of three training images and one test image."""
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    records([[0, 10], [19, 99], [5, 50]]).tofile(folder / "train.bin")
    records([[1, 11]]).tofile(folder / "test.bin")
    return tmp_path


def test_reads_cifar10(ten):
    source = load("cifar10", root=ten)
    assert source.x.shape == (15, 3, 32, 32)
    assert source.y.tolist() == [0, 9, 0, 1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0]
    assert source.y_test.tolist() == [5, 9, 0]
    second = records([[1]] * 3, seed=1)[0, 1:]
    assert np.array_equal(source.x[3], second.reshape(3, 32, 32))
    assert source.standardise.mean[0] == pytest.approx(0.4914 * 255)


@pytest.mark.parametrize(
    ("labels", "expected", "classes"), [("fine", [10, 99, 50], 100), ("coarse", [0, 19, 5], 20)]
)
def test_reads_cifar100(hundred, labels, expected, classes):
    source = load("cifar100", root=hundred, labels=labels)
    assert source.y.tolist() == expected
    assert source.classes == classes
    assert np.array_equal(source.x[0].ravel(), records([[0, 10]] * 3)[0, 2:])


def test_unknown_labels_option(hundred):
    with pytest.raises(InputError, match="one of fine, coarse; got labels='rough'"):
        load("cifar100", root=hundred, labels="rough")


def test_missing_batch(ten):
    (ten / "cifar-10-batches-bin" / "data_batch_3.bin").unlink()
    with pytest.raises(
        DataError, match=r"data_batch_3\.bin, which is missing.*fedensemble data get cifar10"
    ):
        load("cifar10", root=ten)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (records([[1], [2], [3]]).tobytes()[:-1], "records of 3073 bytes, got 9218 bytes"),
        (records([[1], [2]]).tobytes(), r"expected 3 images, as in data_batch_1\.bin, got 2"),
        (records([[1], [2], [10]]).tobytes(), "expected labels 0 to 9, got 10"),
        (b"", "got 0 bytes"),
    ],
)
def test_damaged_batch(ten, content, problem):
    (ten / "cifar-10-batches-bin" / "data_batch_2.bin").write_bytes(content)
    with pytest.raises(DataError, match=rf"data_batch_2\.bin is damaged.*{problem}"):
        load("cifar10", root=ten)


def test_cifar100_label_out_of_range(hundred):
    records([[20, 1]]).tofile(hundred / "cifar-100-binary" / "test.bin")
    with pytest.raises(DataError, match=r"test\.bin is damaged.*expected labels 0 to 19, got 20"):
        load("cifar100", root=hundred)
