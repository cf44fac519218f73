"""Which federations have a config, and what config.toml says of the others."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

import fedensemble as fe
from fedensemble.config.build import build_federation
from fedensemble.config.schema import check, resolve
from fedensemble.data import load, partition
from fedensemble.experiment.federation_config import describe_federation, settings_without
from fedensemble.models import MLP

DATA = partition(load("gaussians", n=120, features=3, classes=2), "iid", clients=12, seed=0)
# All arguments that `describe_federation` turns into settings; extend both for a new one.
DESCRIBED = {
    *("algorithm", "schedule", "participation", "aggregator", "attack", "epochs", "steps"),
    *("batch_size", "last_batch", "loss", "engine", "engine_options", "combine", "device"),
    *("dtype", "seed", "average", "shared", "personal", "alternate"),
    "dropout_samples",
}

EXPRESSIBLE = {
    "defaults": {},
    "algorithm": {"algorithm": fe.FedProx(lr=0.2, mu=0.1, optimizer=fe.Adam(clip=2.0))},
    "schedule": {"schedule": fe.Balanced(modes=2, strata=3, clients_per_round=4)},
    "participation": {"participation": fe.Devices(ask=8), "clients_per_round": 6},
    "robust": {
        "aggregator": fe.Median(),
        "attack": {"name": "sign-flip", "share": 0.2},
        "modes": 2,
    },
    "engine": {"engine": "loop", "dtype": torch.float64, "combine": "logits", "seed": 7},
    "average": {"average": fe.SWAG(start=1, rank=3), "modes": 2},
    "shared": {"shared": ["layers.1.*"], "modes": 2},
    "personal": {"personal": ["layers.1.*"], "alternate": True, "modes": 2},
    "work": {"steps": 3, "batch_size": 4, "last_batch": "drop"},
    "dropout": {"dropout_samples": 4},
}


@pytest.mark.parametrize("case", EXPRESSIBLE)
def test_a_federation_is_built_again_from_its_config(case):
    model = {"name": "mlp", "hidden": [5], "dropout": 0.2 if case == "dropout" else 0.0}
    made = fe.Federation(model, DATA, **EXPRESSIBLE[case])
    made.train(1)
    values, config = describe_federation(made, "mine")
    assert "python" not in values and values["name"] == "mine" and values["rounds"] == 1
    again = build_federation(resolve(values), DATA)
    again.train(1)
    for name, tensor in made.tensors().items():
        assert torch.equal(again.tensors()[name], tensor), name
    # `last_batch` and `batch_size` are resolved, everything else is equal.
    assert again.settings() == made.settings()
    assert config.hash() == resolve(values).hash()


@dataclass(frozen=True, kw_only=True)
class Mine(fe.FedAvg):
    """An algorithm that is not registered."""


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


OWN = {
    "model": ({"model": lambda: nn.Linear(3, 2)}, "lambda"),
    "algorithm": ({"algorithm": Mine()}, "Mine"),
    "loss": ({"loss": own_loss}, "own_loss"),
    "seed": ({"seed": -1}, "-1"),
}


@pytest.mark.parametrize("part", OWN)
def test_what_a_config_cannot_build_is_listed(part):
    options, shown = OWN[part]
    model = partial(MLP, shape=(3,), outputs=2, hidden=[5])
    values, config = describe_federation(
        fe.Federation(**{"model": model, "data": DATA} | options), "a"
    )
    assert values["python"] == [part] and check(config.values())[1] == []
    table = values["training"]["loss"] if part == "loss" else values[part]
    assert shown in str(table)
    # All other parts are those of the federation.
    others = {"model": "mlp", "algorithm": "fedavg"}
    others.pop(part, None)
    assert all(values[name]["name"] == expected for name, expected in others.items())
    with pytest.raises(fe.InputError, match=f"its {part} cannot be built from a config"):
        resolve(values, "run/config.toml")


def test_data_without_a_recipe_are_listed():
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    data = fe.FederatedData.from_arrays(x, (x.sum(1) > 0).long(), [10, 10])
    values, _ = describe_federation(fe.Federation("mlp", data), "not a name of a run!")
    assert values["python"] == ["data"] and values["data"]["clients"] == 2
    assert values["name"] == "federation"


def test_every_setting_is_described():
    assert set(fe.Federation("mlp", DATA).settings()) == DESCRIBED


def test_settings_that_load_changed_are_not_kept():
    values = resolve({"data": {"source": "digits", "clients": 3}}).values()
    kept = settings_without({**values, "python": ["loss"]}, {"algorithm", "combine", "device"})
    assert set(values) - set(kept) == {"rounds", "algorithm", "ensemble", "engine", "training"}
