"""Rows of clients that are not trained on: the calibration split, and the owners of test rows."""

import numpy as np
import pytest
import torch

from fedensemble import FederatedData
from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data import ClientRows, Dataset, load, partition
from fedensemble.data.splits.holdout import hold_out_validation, limit_test_set
from fedensemble.deploy.app_spec import read_app_spec, write_app_spec
from fedensemble.errors import DataError, InputError
from fedensemble.experiment.setup import fingerprint

SIZES = [1, 4, 5, 20, 41]


def numbered(sizes=SIZES):
    """Clients whose input is the number of the row."""
    n = sum(sizes)
    x = np.arange(n, dtype=np.float32)[:, None]
    return FederatedData.from_arrays(x, np.arange(n) % 2, sizes)


def test_the_split_takes_the_share_of_each_client_and_loses_no_row():
    whole = numbered()
    data = whole.with_calibration(0.1, seed=3)
    assert data.calibration.sizes(5).tolist() == [0, 0, 0, 2, 4]
    assert data.size.tolist() == [1, 4, 5, 18, 37]
    for client in range(5):
        kept, held = data.client(client)[0], data.calibration.client(client)[0]
        assert torch.equal(kept, kept.sort(0).values)  # rows stay in order
        together = torch.cat([kept, held]).sort(0).values
        assert torch.equal(together, whole.client(client)[0])
    assert data.notes == (
        "3 of 5 clients have too few rows for calibration = 0.1 and keep all of them for training; "
        "no row of theirs is used for calibration.",
    )


def test_at_least_one_row_stays():
    data = numbered([1, 2, 3]).with_calibration(0.9)
    assert data.size.tolist() == [1, 1, 1]
    assert data.calibration.sizes(3).tolist() == [0, 1, 2]


def test_the_split_depends_on_the_seed_and_not_on_other_clients():
    whole = numbered()
    held = whole.with_calibration(0.3, seed=1).calibration
    assert torch.equal(held.x, whole.with_calibration(0.3, seed=1).calibration.x)
    assert not torch.equal(held.x, whole.with_calibration(0.3, seed=2).calibration.x)
    for client in range(5):  # as on a real client, which knows its own rows only
        alone = FederatedData.from_clients([whole.client(client)], classes=2)
        assert torch.equal(
            alone.with_calibration(0.3, seed=1).calibration.x, held.client(client)[0]
        )


def test_every_row_is_as_likely():
    whole, taken = numbered([10]), torch.zeros(10)
    for seed in range(800):
        taken[whole.with_calibration(0.3, seed=seed).calibration.x.flatten().long()] += 1
    assert (taken / 800 - 0.3).abs().max() < 0.065  # 4 standard deviations


def test_shares_that_cannot_be():
    with pytest.raises(InputError, match="calibration must be above 0"):
        numbered().with_calibration(0)
    with pytest.raises(InputError, match="below 1"):
        numbered().with_calibration(1.0)
    with pytest.raises(InputError, match="already"):
        numbered().with_calibration(0.2).with_calibration(0.2)


def test_a_config_splits_and_old_settings_keep_their_hash():
    table = {"source": "digits", "partition": "dirichlet", "clients": 10}
    plain, split = resolve({"data": table}), resolve({"data": {**table, "calibration": 0.2}})
    assert plain.hash() == "c00693c32d6d"  # of version 1.0
    assert fingerprint(build_data(plain)).startswith("1850ec0ff90fd430")
    assert split.hash() != plain.hash()
    data = build_data(split)
    whole = build_data(plain)
    assert len(data.x) + len(data.calibration) == len(whole.x)
    assert torch.equal(data.x_test, whole.x_test)
    assert torch.equal(data.test_owner, whole.test_owner)
    assert fingerprint(data) != fingerprint(whole)
    again = whole.with_calibration(0.2, seed=0)
    assert fingerprint(again) == fingerprint(data)
    assert again.recipe["calibration"] == 0.2
    assert fingerprint(build_data(resolve({"data": dict(again.recipe)}))) == fingerprint(data)
    assert whole.with_calibration(0.2, seed=9).recipe is None  # a config has one seed for both
    with pytest.raises(InputError, match=r"data\.calibration|calibration"):
        build_data(resolve({"data": {**table, "calibration": 1.5}}))


def test_clients_of_a_fleet_split_off_the_same_rows(tmp_path):
    table = {"source": "digits", "partition": "dirichlet", "clients": 6, "calibration": 0.2}
    config = resolve({"data": {**table, "seed": 4}})
    write_app_spec(tmp_path, config)
    spec = read_app_spec(tmp_path)
    simulated = build_data(config)
    whole = build_data(resolve({"data": {**table, "seed": 4, "calibration": None}}))
    for client in range(6):
        mine = spec.build_client_data(whole.client(client))
        assert torch.equal(mine.x, simulated.client(client)[0])
        assert torch.equal(mine.calibration.x, simulated.calibration.client(client)[0])


def test_rows_for_calibration_of_own_clients():
    pairs = [([[0.0], [1.0]], ["no", "yes"]), ([[2.0]], ["yes"]), ([[3.0]], ["no"])]
    held = [([[4.0]], ["maybe"]), None, ([[5.0], [6.0]], ["no", "no"])]
    data = FederatedData.from_clients(pairs, calibration=held)
    assert data.class_names == ("maybe", "no", "yes")
    assert data.calibration.owner.tolist() == [0, 2, 2]
    assert data.calibration.y.tolist() == [0, 1, 1]
    assert data.calibration.client(2)[0].tolist() == [[5.0], [6.0]]
    assert len(data.calibration.client(1)[0]) == 0
    assert "3 to calibrate" in repr(data)
    assert FederatedData.from_clients(pairs, calibration=[None] * 3).calibration is None
    assert data.to("cpu").calibration is data.calibration


@pytest.mark.parametrize(
    ("calibration", "problem"),
    [
        ([([[1.0]], [0])], "one .* pair for each of the 2 clients.*got 1"),
        ([([[1.0]], [0]), 3], "got 2 entries"),
        ([([[1.0, 2.0]], [0]), None], "Inputs for calibration are .2,. float64"),
        ([([[1.0]], [0.5]), None], "Targets for calibration"),
        ([([[1.0], [2.0]], [0]), None], "client 0's rows for calibration must each"),
        ([([[np.nan]], [0]), None], "nan or infinity"),
        ([([[1.0]], [-1]), None], "must be 0, 1, 2"),
        ([([[1.0]], [0]), ([[1.0, 2.0]], [0])], "Clients disagree"),
    ],
)
def test_unusable_rows_for_calibration(calibration, problem):
    with pytest.raises(DataError, match=problem):
        FederatedData.from_clients([([[0.0]], [0]), ([[1.0]], [1])], calibration=calibration)


def test_owners_must_be_clients():
    x, y = torch.zeros(2, 1), torch.tensor([0, 1])
    for owner, problem in (
        (torch.tensor([0, 2]), "client 2, but there are 2 clients"),
        (torch.tensor([0, -1]), "from 0; got -1"),
        (torch.tensor([0]), "int64 .2.; got"),
        (torch.tensor([0.0, 1.0]), "int64"),
    ):
        with pytest.raises(DataError, match=problem):
            FederatedData.from_arrays(x, y, [1, 1], calibration=ClientRows(x, y, owner))
    with pytest.raises(DataError, match="must be ClientRows"):
        FederatedData.from_arrays(x, y, [1, 1], calibration=(x, y))
    with pytest.raises(DataError, match="must be a tensor"):
        ClientRows(x, y, [0, 1])
    rows = ClientRows(x, y + 5, torch.tensor([0, 1]))
    with pytest.raises(DataError, match="below the number of classes"):
        FederatedData.from_arrays(x, y, [1, 1], classes=2, calibration=rows)


def test_owners_of_own_test_rows():
    clients = [([[0.0]], [0]), ([[1.0]], [1])]
    test = {"x_test": [[0.0], [1.0], [2.0]], "y_test": [0, 1, 1]}
    data = FederatedData.from_clients(clients, **test, test_owner=[1, -1, 0])
    assert data.test_owner.tolist() == [1, -1, 0]
    assert FederatedData.from_clients(clients, **test).test_owner is None
    for owner, problem in (
        ([1, -2, 0], "-1 for a row of no client.*got -2"),
        ([1, 2, 0], "client 2, but there are 2"),
        ([1, 0], "of 3 test rows"),
        ([0.0, 1.0, 1.0], "must be integers"),
    ):
        with pytest.raises(DataError, match=problem):
            FederatedData.from_clients(clients, **test, test_owner=owner)
    with pytest.raises(DataError, match="needs a test set"):
        FederatedData.from_clients(clients, test_owner=[0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("iid", {}),
        ("dirichlet", {"alpha": 0.1}),
        ("classes", {"classes_per_client": 2}),
        ("quantity", {"beta": 0.3}),
        ("contiguous", {}),
    ],
)
def test_partitions_divide_the_test_set_as_the_training_set(name, options):
    source = load("gaussians", n=4000, n_test=1000, classes=5)
    data = partition(source, name, clients=12, seed=1, **options)
    assert torch.equal(data.x_test, torch.as_tensor(source.x_test))  # same rows, same order
    tests = torch.zeros(12, 5)
    tests.index_put_((data.test_owner, data.y_test), torch.ones(1000), accumulate=True)
    counts = data.label_counts().double()
    expected = counts / counts.sum(0) * torch.bincount(data.y_test)
    assert (tests - expected).abs().max() <= 1
    assert torch.equal(
        data.test_owner, partition(source, name, clients=12, seed=1, **options).test_owner
    )


def test_rounding_favours_no_client():
    source = load("gaussians", n=3000, n_test=90, classes=30)  # 3 test rows per class, 10 clients
    total = sum(
        torch.bincount(partition(source, "iid", clients=10, seed=seed).test_owner, minlength=10)
        for seed in range(40)
    )
    assert (total / 40 - 9).abs().max() < 1.5


def test_a_class_that_no_client_has_belongs_to_nobody():
    source = Dataset(
        np.zeros((6, 1)), np.array([0, 0, 0, 1, 1, 1]), np.zeros((4, 1)), np.array([0, 1, 2, 2])
    )
    assert partition(source, "iid", clients=2).test_owner.tolist()[2:] == [-1, -1]


def test_targets_without_classes_are_divided_by_size():
    source = Dataset(np.zeros((30, 1)), np.zeros((30, 1)), np.zeros((20, 1)), np.zeros((20, 1)))
    data = partition(source, "quantity", clients=4, seed=2)
    expected = data.size / 30 * 20
    assert (torch.bincount(data.test_owner, minlength=4) - expected).abs().max() <= 1


def test_natural_clients_own_their_test_rows():
    source = Dataset(
        np.zeros((8, 1)),
        np.arange(8) % 2,
        np.zeros((5, 1)),
        np.zeros(5, np.int64),
        group=np.array([7, 7, 3, 3, 3, 5, 5, 5]),
        test_group=np.array([5, 3, 7, -1, 4]),
    )
    assert partition(source, "natural").test_owner.tolist() == [1, 0, 2, -1, -1]
    some = partition(source, "natural", min_examples=3)
    assert some.test_owner.tolist() == [1, 0, -1, -1, -1]
    assert limit_test_set(source, 3).test_group.tolist() == [5, 7, 4]
    # A validation split takes rows of the clients.
    held = hold_out_validation(source, 0.5)
    assert sorted([*held.group.tolist(), *held.test_group.tolist()]) == [3, 3, 3, 5, 5, 5, 7, 7]
    without = Dataset(
        np.zeros((2, 1)), np.arange(2), np.zeros((1, 1)), np.zeros(1, np.int64), group=np.arange(2)
    )
    assert partition(without, "natural").test_owner is None
    with pytest.raises(DataError, match="5 test rows, but their client numbers have shape"):
        Dataset(source.x, source.y, source.x_test, source.y_test, test_group=np.zeros(4, np.int64))


def test_natural_datasets_know_the_owners(tmp_path):
    data = partition(load("stand-in-text", roles=5, sequence=8), "natural", clients=3, seed=1)
    owners = torch.bincount(data.test_owner + 1, minlength=4)
    assert owners[1:].unique().numel() == 1 and owners[0] == 2 * owners[1]
    np.savez(
        tmp_path / "a.npz",
        x=np.zeros((4, 1)),
        y=np.array([0, 1, 0, 1]),
        client=np.array(["b", "a", "b", "c"]),
        x_test=np.zeros((3, 1)),
        y_test=np.array([0, 1, 0]),
        client_test=np.array(["c", "new", "b"]),
    )
    data = partition(load("npz", path=tmp_path / "a.npz"), "natural")
    assert data.names == ("a", "b", "c")
    assert data.test_owner.tolist() == [2, -1, 1]
    np.savez(
        tmp_path / "b.npz",
        x=np.zeros((1, 1)),
        y=np.array([0]),
        x_test=np.zeros((1, 1)),
        y_test=np.array([0]),
        client_test=np.array([0]),
    )
    with pytest.raises(DataError, match="none for its training rows"):
        load("npz", path=tmp_path / "b.npz")
