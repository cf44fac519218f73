"""Options of engines are validated before anything else is done; notes are warned about once."""

import warnings
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedensemble import EngineWarning, FedAvg, FederatedData, Federation, InputError
from fedensemble.engines.local import vector
from fedensemble.engines.stacked.equivalence import StackingReport
from fedensemble.testing.toy_problems import (
    CLASSES,
    FEATURES,
    classification,
    small_federation,
    small_model,
    train,
)

NAN = float("nan")
BAD = [
    *[("block", value, "an integer >= 1") for value in (0, -3, 1.5, "2", "x", True, NAN)],
    *[
        ("memory", value, "a finite number above 0")
        for value in (0, -1, "1", True, NAN, float("inf"))
    ],
    *[("deterministic", value, "true or false") for value in ("maybe", 1, None)],
    *[("graphs", value, "true or false") for value in ("maybe", 0)],
]


def made(engine="vector", **options):
    return small_federation(FedAvg(), engine, 2, 2, engine_options=options)


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_bad_values_raise_before_data_are_moved(monkeypatch, name, value, allowed):
    def moved(self, device):
        raise AssertionError("data were moved")

    monkeypatch.setattr(FederatedData, "to", moved)
    with pytest.raises(InputError) as raised:
        made(**{name: value})
    assert (
        str(raised.value) == f"Engine 'vector' needs {name} to be {allowed}; got {name}={value!r}."
    )


@pytest.mark.parametrize(
    "options",
    [
        {"block": 2},
        {"block": None},
        {"memory": 1},
        {"memory": 0.5},
        {"graphs": False},
        {"deterministic": True},
    ],
)
def test_good_values(options):
    assert train(made(**options), 1).round == 1


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_unknown_placement_of_client_state(engine):
    with pytest.raises(
        InputError, match="client_memory is 'auto', 'device', 'host' or 'disk'; got 3"
    ):
        made(engine, client_memory=3)


@pytest.mark.parametrize("name", ["block", "memory", "precision", "graphs", "deterministic"])
def test_engine_loop_has_none_of_these_options(name):
    with pytest.raises(InputError, match=f"unknown option of engine 'loop' '{name}'"):
        made("loop", **{name: 1})


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gpu_precisions_raise_on_a_cpu(precision):
    with pytest.raises(InputError) as raised:
        made(precision=precision)
    assert str(raised.value) == (
        f"precision '{precision}' needs a CUDA device and dtype float32; leave it at 'auto'."
    )


@pytest.mark.parametrize("precision", ["fp16", None, 32])
def test_unknown_precisions(precision):
    with pytest.raises(InputError) as raised:
        made(precision=precision)
    assert (
        str(raised.value) == f"precision is 'auto', 'float32', 'tf32' or 'bf16'; got {precision!r}."
    )


def of_type(dtype, engine, **options):
    return Federation(
        small_model, classification(), engine=engine, engine_options=options, dtype=dtype
    )


@pytest.mark.parametrize("precision", ["auto", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precisions_of_a_cpu(precision, dtype):
    assert f"torch.{of_type(dtype, 'vector', precision=precision).engine.precision}" == str(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_engine_loop_reports_its_precision(dtype):
    assert f"torch.{of_type(dtype, 'loop').engine.precision}" == str(dtype)


@pytest.mark.parametrize(
    ("products", "convolutions", "expected"),
    [
        ("highest", False, "float32"),
        ("high", True, "tf32"),
        ("highest", True, "float32, convolutions tf32"),
        ("medium", False, "float32, products tf32"),
    ],
)
def test_engine_loop_on_a_gpu_follows_torchs_flags(monkeypatch, products, convolutions, expected):
    engine = of_type(torch.float32, "loop").engine
    monkeypatch.setattr(engine.model, "device", torch.device("cuda"))
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: products)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", convolutions)
    assert engine.precision == expected
    monkeypatch.setattr(engine.model, "dtype", torch.float64)
    assert engine.precision == "float64"


def test_graphs_without_a_gpu_warn():
    with pytest.warns(
        EngineWarning, match=r"^CUDA graphs need a GPU; on cpu graphs=true does nothing\.$"
    ):
        assert train(made(graphs=True), 1).round == 1


def test_vmap_warns_once(monkeypatch):
    monkeypatch.setattr(vector, "check_stackable", lambda *arguments: StackingReport("it is round"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        federation = train(made(), 3)
    note = "The model cannot be batched layer by layer (it is round); using vmap, which is slower."
    assert federation.engine.notes == [note]
    assert [str(warning.message) for warning in caught if warning.category is EngineWarning] == [
        note
    ]
    assert torch.isfinite(federation.state.modes["theta"]).all()


def test_a_block_is_no_larger_than_the_grid_of_a_kernel_launch():
    assert made(block=10**9).engine.block == 65535


class Counting(nn.Linear):
    threads: ClassVar[list[int]] = []

    def forward(self, x):
        self.threads.append(torch.get_num_threads())
        return super().forward(x)


@pytest.mark.parametrize("engine", ["loop", "vector"])
def test_a_small_model_is_checked_on_one_thread(engine):
    """The check uses one thread, and restores the number of threads afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        Counting.threads.clear()
        Federation(lambda: Counting(FEATURES, CLASSES), classification(), engine=engine)
        assert set(Counting.threads) == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
