"""Inputs of the server: held out, from a file, from the dataset, and from Python."""

import numpy as np
import pytest
import torch

from fedensemble import FederatedData
from fedensemble.data import load, partition
from fedensemble.data.splits.server_data import hold_out_server_inputs, load_server_inputs
from fedensemble.errors import DataError, InputError


def test_a_share_is_held_out_and_no_client_has_it():
    source = load("gaussians", n=60, classes=3)
    held = hold_out_server_inputs(source, 0.25, seed=4)
    assert len(held.x_server) == 15
    together = torch.cat([torch.as_tensor(held.x), held.x_server])
    rows = {tuple(row) for row in together.tolist()}
    assert rows == {tuple(row) for row in torch.as_tensor(source.x).tolist()}
    assert torch.equal(hold_out_server_inputs(source, 0.25, seed=4).x_server, held.x_server)
    assert not torch.equal(hold_out_server_inputs(source, 0.25, seed=5).x_server, held.x_server)
    data = partition(held, "iid", clients=5)
    assert len(data.x) == 45
    assert torch.equal(data.x_server, held.x_server)
    assert data.info["server_share"] == 0.25


@pytest.mark.parametrize("share", [0.0, 0.001, 0.999, 1.0, -0.5])
def test_a_share_must_leave_something_to_both(share):
    with pytest.raises(InputError, match="server_share"):
        hold_out_server_inputs(load("gaussians", n=60), share, seed=0)


def test_natural_clients_keep_their_rows(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        x=np.arange(20.0).reshape(10, 2),
        y=np.arange(10) % 2,
        client=np.arange(10) // 5,
    )
    data = partition(
        hold_out_server_inputs(load("npz", path=tmp_path / "a.npz"), 0.2, seed=0), "natural"
    )
    assert len(data) == 2
    assert data.names == ("0", "1")
    assert int(data.size.sum()) == 8
    assert bool((data.client(0)[0] < 10).all())


def test_from_a_file(tmp_path):
    source = load("gaussians", n=60)
    shape = source.x.shape[1:]
    np.savez(tmp_path / "own.npz", x=np.ones((7, *shape), np.float32))
    assert (
        len(partition(load_server_inputs(source, tmp_path / "own.npz"), "iid", clients=2).x_server)
        == 7
    )
    np.savez(tmp_path / "other.npz", x=np.ones((7, 99), np.float32))
    with pytest.raises(DataError, match=r"other.npz are \(99,\) float32"):
        load_server_inputs(source, tmp_path / "other.npz")
    np.savez(tmp_path / "nameless.npz", inputs=np.ones((7, *shape), np.float32))
    with pytest.raises(DataError, match="has no array 'x'"):
        load_server_inputs(source, tmp_path / "nameless.npz")
    with pytest.raises(DataError, match="missing"):
        load_server_inputs(source, tmp_path / "none.npz")


def test_an_archive_may_bring_them(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2)), y=np.zeros(4, int), x_server=np.zeros((3, 2)))
    assert len(partition(load("npz", path=tmp_path / "a.npz"), "iid", clients=2).x_server) == 3


@pytest.mark.parametrize("x_server", [np.zeros((0, 2)), np.zeros((3, 5)), np.full((3, 2), np.nan)])
def test_inputs_unlike_those_of_the_clients_are_rejected(x_server):
    with pytest.raises(DataError, match="server's inputs"):
        FederatedData.from_arrays(np.ones((4, 2)), [0, 1, 0, 1], [2, 2], x_server=x_server)
