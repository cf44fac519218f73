"""Datasets that need no files: digits, the sine toy and Gaussian classes."""

import numpy as np
import pytest
import torch

from fedensemble.data import load, partition
from fedensemble.errors import InputError


def test_digits_hold_out_is_stratified_and_fixed():
    source, again, other = load("digits"), load("digits"), load("digits", split_seed=1)
    assert source.x.shape == (1347, 1, 8, 8)
    assert source.x.dtype == np.uint8
    assert len(source.x) + len(source.x_test) == 1797
    everything = np.bincount(source.y) + np.bincount(source.y_test)
    assert np.abs(np.bincount(source.y_test) - 0.25 * everything).max() <= 0.5
    assert np.array_equal(source.x, again.x)
    assert not np.array_equal(source.y_test, other.y_test)
    seen = source.standardise(torch.as_tensor(source.x), torch.float64)
    assert abs(float(seen.mean())) < 0.01  # the constants are of all 1,797 images
    assert abs(float(seen.std()) - 1) < 0.01


def test_digits_without_test_set():
    source = load("digits", test_fraction=0.0)
    assert len(source) == 1797
    assert source.x_test is None
    with pytest.raises(InputError, match="test_fraction"):
        load("digits", test_fraction=1.0)


def test_sine_is_the_papers_toy():
    source = load("sine", clients=2000, points=4)
    x, y = source.x[:, 0].astype(np.float64), source.y[:, 0].astype(np.float64)
    assert source.x.dtype == source.y.dtype == np.float32
    wave = np.sin(2 * np.pi * x)
    residual = y - wave
    assert (y @ wave) / (wave @ wave) == pytest.approx(1.0, abs=0.02)
    # Var = spread^2 E[sin^2] + noise^2
    assert residual.var() == pytest.approx(0.04 * 0.5 + 0.04, rel=0.1)
    assert source.x_test.shape == source.y_test.shape == (201, 1)
    assert np.allclose(source.y_test, np.sin(2 * np.pi * source.x_test), atol=1e-6)
    data = partition(load("sine"), "natural")
    assert len(data) == 50
    assert set(data.size.tolist()) == {2}
    assert data.classes is None


def test_sine_without_noise_is_exact():
    source = load("sine", noise=0.0, spread=0.0)
    assert np.allclose(source.y, np.sin(2 * np.pi * source.x), atol=1e-5)
    with pytest.raises(InputError, match="noise"):
        load("sine", noise=-1.0)


def test_gaussians_are_balanced_and_apart():
    source = load("gaussians", n=1001, classes=4, features=20, separation=12.0)
    counts = np.bincount(source.y)
    assert counts.max() - counts.min() <= 1
    means = np.stack([source.x[source.y == label].mean(0) for label in range(4)])
    nearest = np.linalg.norm(source.x_test[:, None] - means, axis=2).argmin(1)
    assert (nearest == source.y_test).mean() > 0.99
    assert load("gaussians", n_test=0).x_test is None


@pytest.mark.parametrize("name", ["sine", "gaussians"])
def test_seed_decides(name):
    assert np.array_equal(load(name, seed=3).x, load(name, seed=3).x)
    assert not np.array_equal(load(name, seed=3).x, load(name, seed=4).x)
    with pytest.raises(InputError, match="seed"):
        load(name, seed=-1)


def test_circle_is_what_the_theorems_assume():
    source = load("circle", clients=6, points=3, noise=0.0, covered=0.5)
    assert np.allclose(np.linalg.norm(source.x, axis=1), 1, atol=1e-6)
    angle = np.arctan2(source.x[:, 1], source.x[:, 0])
    assert (np.diff(angle) > np.pi / 18 / 2 - 1e-6).all()  # half of the spacing apart
    assert np.abs(angle).max() < np.pi / 2  # the other half of the circle is open
    assert np.allclose(source.y[:, 0], np.sin(2 * angle) + np.cos(angle) / 2, atol=1e-6)
    assert source.group.tolist() == sorted([0, 1, 2, 3, 4, 5] * 3)
    assert source.x_test.shape == (120, 2)
    train = load("circle", clients=6, points=3, test="train", seed=1)
    assert np.array_equal(train.x, train.x_test) and np.array_equal(train.y, train.y_test)
    with pytest.raises(InputError, match="'grid' or 'train'"):
        load("circle", test="all")
    with pytest.raises(InputError, match="covered <= 1"):
        load("circle", covered=1.5)


def test_clients_of_a_circle_can_contradict_each_other():
    data = partition(load("circle", clients=5, conflict=0.8), "natural", 5, 0)
    clients = [data.client(index) for index in range(5)]
    for even, odd in (clients[:2], clients[2:4]):
        assert torch.equal(even[0], odd[0])
        assert torch.allclose(even[1] - odd[1], torch.tensor(0.8))
    assert not torch.equal(clients[0][0], clients[2][0])
