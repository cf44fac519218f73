"""Initial parameters of built-in models are drawn once for runs that start alike."""

import pytest
import torch
from torch import nn

from fedensemble.modeling import functional_model
from fedensemble.modeling.factory import ModelSpec
from fedensemble.modeling.functional_model import FunctionalModel
from fedensemble.models import MLP


@pytest.fixture
def drawn(monkeypatch):
    calls, original = [], FunctionalModel._draw_params

    def counted(self, seed, modes):
        calls.append((seed, modes))
        return original(self, seed, modes)

    monkeypatch.setattr(FunctionalModel, "_draw_params", counted)
    monkeypatch.setattr(functional_model, "_INITIAL", {})
    return calls


def made(hidden=4, factory=MLP, dtype=torch.float32):
    spec = ModelSpec(factory, {"shape": (3,), "outputs": 2, "hidden": [hidden]})
    return FunctionalModel(spec, "cross_entropy", torch.zeros(1, dtype=torch.int64), dtype=dtype)


def test_the_same_model_is_drawn_once_and_each_caller_has_a_copy(drawn):
    first, _ = made().init_params(0, 2)
    expected = first.clone()
    first.zero_()
    assert torch.equal(made().init_params(0, 2)[0], expected)
    assert drawn == [(0, 2)]


def test_other_models_seeds_modes_and_dtypes_are_drawn(drawn):
    base = made().init_params(0, 2)[0]
    assert not torch.equal(made().init_params(1, 2)[0], base)
    assert torch.equal(made().init_params(0, 3)[0][:2], base)
    assert made(hidden=5).init_params(0, 2)[0].shape != base.shape
    assert made(dtype=torch.float64).init_params(0, 2)[0].dtype == torch.float64
    assert torch.equal(made().init_params(0, 2)[0], base)
    assert len(drawn) == 6 and len(functional_model._INITIAL) == 1


class Own(MLP):
    """A model of another package."""


def test_models_of_others_and_large_ones_are_not_kept(drawn, monkeypatch):
    Own.__module__ = "elsewhere"
    made(factory=Own).init_params(0, 2)
    labels = torch.zeros(1, dtype=torch.int64)
    FunctionalModel(lambda: nn.Linear(3, 2), "cross_entropy", labels).init_params(0, 2)
    monkeypatch.setattr(functional_model, "_MAX_INITIAL_BYTES", 10)
    made().init_params(0, 2)
    assert functional_model._INITIAL == {} and len(drawn) == 3
