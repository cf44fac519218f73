"""Fake data with real shapes, and held-out parts of the training data."""

import numpy as np
import pytest

from fedensemble.data import load, partition
from fedensemble.data.sources.fake import OPENIMAGE_SIZES
from fedensemble.data.sources.shakespeare import VOCABULARY
from fedensemble.data.splits.holdout import hold_out_validation, limit_test_set
from fedensemble.errors import DataError, InputError


def test_images_have_the_given_shape_and_separable_classes():
    source = load("stand-in-images", channels=1, side=28, n=300, n_test=100)
    assert source.x.shape == (300, 1, 28, 28)
    assert source.x.dtype == np.uint8
    means = np.stack(
        [source.x[source.y == label].astype(float).mean(0).ravel() for label in range(10)]
    )
    nearest = np.linalg.norm(source.x_test.reshape(100, 1, -1) - means, axis=2).argmin(1)
    assert (nearest == source.y_test).mean() > 0.95
    assert load("stand-in-images", n_test=0).x_test is None


def test_clients_have_the_sizes_of_openimage(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDENSEMBLE_DATA", str(tmp_path))
    drawn = np.bincount(load("stand-in-images", side=8, groups=50, most=5000).group)
    assert len(drawn) == 50
    assert drawn.min() >= 32
    (tmp_path / OPENIMAGE_SIZES).parent.mkdir()
    np.save(tmp_path / OPENIMAGE_SIZES, np.array([33, 44], np.int32))
    assert set(np.bincount(load("stand-in-images", side=8, groups=50).group)) == {33, 44}
    assert set(np.bincount(load("stand-in-images", side=8, groups=50, most=40).group)) == {33, 40}
    (tmp_path / OPENIMAGE_SIZES).write_bytes(b"no numbers")
    with pytest.raises(DataError, match="damaged"):
        load("stand-in-images", side=8, groups=50)


def test_text_is_predictable_and_has_roles():
    source = load("stand-in-text", roles=5, characters=500, sequence=20)
    assert source.x.shape[1] == source.y.shape[1] == 20
    assert source.classes == len(VOCABULARY)
    assert np.array_equal(source.x[0, 1:], source.y[0, :-1])
    assert len(partition(source, "natural")) == 5
    successors = {(a, b) for a, b in zip(source.x.ravel(), source.y.ravel(), strict=True)}
    assert len(successors) <= 4 * len(VOCABULARY)


def test_validation_takes_the_place_of_the_test_set():
    source = load("gaussians", n=200, classes=4, n_test=30)
    held = hold_out_validation(source, 0.2)
    assert len(held.x) == 160
    assert np.bincount(held.y_test).tolist() == [round(0.2 * n) for n in np.bincount(source.y)]
    rows = {
        tuple(row) for row in np.concatenate([np.asarray(held.x), np.asarray(held.x_test)]).tolist()
    }
    # all training rows, and no row of the test set
    assert rows == {tuple(row) for row in source.x.tolist()}
    assert hold_out_validation(source, 0.0).x_test is None
    with pytest.raises(InputError, match="validation"):
        hold_out_validation(source, 1.0)


def test_validation_of_sequences_keeps_their_roles():
    source = load("stand-in-text", roles=5, characters=500, sequence=20)
    held = hold_out_validation(source, 0.2)
    assert len(held.x) + len(held.x_test) == len(source.x)
    assert len(held.group) == len(held.x)


def test_limited_test_set_is_spread_evenly():
    source = load("sine")
    fewer = limit_test_set(source, 3)
    assert np.allclose(np.asarray(fewer.x_test).ravel(), [-1, 0, 1])
    assert limit_test_set(source, 1000) is source
    with pytest.raises(InputError, match="test_examples"):
        limit_test_set(source, 0)
