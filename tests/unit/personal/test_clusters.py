"""Groups of clients that are known, and the share that a choice finds again."""

import itertools

import numpy as np
import pytest
import torch

from fedensemble.data import load, partition
from fedensemble.errors import InputError
from fedensemble.personal.clusters import groups_in_names, recovered_share


@pytest.mark.parametrize("seed", range(8))
def test_the_share_is_that_of_the_best_assignment(seed):
    """All one-to-one assignments of groups to modes, by brute force."""
    rng = np.random.default_rng(seed)
    groups, choice = rng.integers(0, 3, 12), rng.integers(-1, 4, 12)
    best = max(
        np.mean([modes[group] == mode for group, mode in zip(groups, choice, strict=True)])
        for modes in itertools.permutations([0, 1, 2, 3, 7], 3)
    )
    names = [f"group {group}" for group in groups]
    assert recovered_share(torch.from_numpy(choice), names) == pytest.approx(best)


def test_names_without_groups():
    assert groups_in_names(None) is None
    assert groups_in_names(("a/1", "b")) is None
    assert groups_in_names(("90 degrees/1", "a/b/2")) == ["90 degrees", "a/b"]


def test_sites_see_their_images_rotated():
    """Each site has one angle, in training and in the test, and turned back the images are those."""
    options = {"images": "stand-in-images", "n": 60, "n_test": 30, "sites": 8, "seed": 3}
    plain, turned = load("rotated", rotations=1, **options), load("rotated", **options)
    assert plain.group.tolist() == turned.group.tolist()
    for x, y, group in (
        (plain.x, turned.x, turned.group),
        (plain.x_test, turned.x_test, turned.test_group),
    ):
        for one, two, site in zip(x, y, group, strict=True):
            np.testing.assert_array_equal(np.rot90(one, site % 4, axes=(1, 2)), two)
    data = partition(turned, "natural")
    assert len(data) == 8
    assert data.names[5] == "90 degrees/5"
    assert sorted(data.test_owner.tolist()) == sorted(turned.test_group.tolist())
    assert load("rotated", rotations=2, **options).group_names[3] == "180 degrees/3"


@pytest.mark.parametrize(
    "options", [{"rotations": 3}, {"sites": 0}, {"sites": 90}, {"images": "x"}]
)
def test_errors(options):
    with pytest.raises(InputError, match="rotated"):
        load("rotated", **{"images": "stand-in-images", "n": 60, **options})
