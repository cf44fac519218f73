"""`Dataset`, the data folder, and the validation of options."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fedensemble.data
from fedensemble.data import Dataset, data_folder, datasets, load
from fedensemble.errors import DataError, InputError


def test_folder_order(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(tmp_path / "environment"))
    assert data_folder(tmp_path / "mine") == tmp_path / "mine"
    assert data_folder() == tmp_path / "environment"
    monkeypatch.setenv("FEDENSEMBLE_DATA", "~/data")
    assert data_folder() == Path.home() / "data"
    monkeypatch.delenv("FEDENSEMBLE_DATA")
    assert "fedensemble" in str(data_folder())


def test_known_sources():
    expected = {
        "cifar10",
        "cifar100",
        "digits",
        "fashion-mnist",
        "gaussians",
        "mnist",
        "npz",
        "openimage",
        "shakespeare",
        "sine",
    }
    assert expected <= set(datasets)


def test_option_names():
    with pytest.raises(InputError, match="unknown dataset 'minst': did you mean 'mnist'"):
        load("minst")
    with pytest.raises(InputError, match="'featurs': did you mean 'features'"):
        load("gaussians", featurs=3)


def test_lengths_must_agree():
    with pytest.raises(DataError, match="3 inputs but 2 targets"):
        Dataset(np.zeros((3, 1)), np.zeros(2))
    with pytest.raises(DataError, match="no training examples"):
        Dataset(np.zeros((0, 1)), np.zeros(0))
    with pytest.raises(DataError, match=r"Dataset 'mine'.*client numbers have shape"):
        Dataset(np.zeros((3, 1)), np.zeros(3), group=np.zeros(2, np.int64), info={"source": "mine"})


def test_labels_need_class_labels():
    assert Dataset(np.zeros((2, 1)), np.array([1, 0], np.uint8)).labels().tolist() == [1, 0]
    for targets in (np.zeros(2), np.zeros((2, 3), np.int64)):
        with pytest.raises(InputError, match="cannot be divided by label"):
            Dataset(np.zeros((2, 1)), targets).labels()


def test_import_is_light():
    """What a run on the default data imports, too: each of these packages takes up to a second."""
    code = (
        "import sys, fedensemble.data, fedensemble.experiment.run\n"
        "assert len(fedensemble.data.datasets['digits']().x) == 1347\n"
        "heavy = 'sklearn PIL pooch requests pandas torchmetrics scipy.ndimage scipy.optimize'\n"
        "print([m for m in heavy.split() if m in sys.modules])"
    )
    path = str(Path(fedensemble.data.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == "[]", done.stderr
