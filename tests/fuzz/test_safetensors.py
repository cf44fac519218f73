"""Modes, checkpoints and saved federations: damaged, or forged with right checksums, they are
refused or harmless.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fedensemble as fe
from fedensemble.checkpoint_file import read_checkpoint, write_checkpoint
from fedensemble.config.build import build_data, build_federation, resolve_device
from fedensemble.config.schema import Config, resolve
from fedensemble.experiment.storage.ensemble_file import read_ensemble, write_modes
from fedensemble.federation.serialization import FILE

from .budget import attempt, examples, generators, mutated
from .test_configs import BASE

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3)
    ),
    max_leaves=6,
)
WORDS = (
    b"[" * 3000,
    b'"F8_E4M3"',
    b'"I64"',
    b'"F64"',
    b"[0,0]",
    b"-1",
    b"9" * 30,
    b'"__metadata__"',
    b"\x00",
    b"{",
)
METHODS = ("fedavg", "scaffold", "fedpd", "fedbe-nokd")


def settings(method: str) -> Config:
    return resolve_device(
        resolve(
            {**BASE, "algorithm": {"name": method}, "engine": {"name": "loop", "device": "cpu"}}
        )
    )


@pytest.fixture(scope="module", params=METHODS)
def trained(request: pytest.FixtureRequest) -> tuple[Config, fe.Federation, fe.FederatedData]:
    config = settings(request.param)
    data = build_data(config)
    federation = build_federation(config, data)
    list(federation.rounds(3))
    return config, federation, data


def other_tensor(tensor: Tensor, random: np.random.Generator) -> Tensor:
    """A tensor with another value, shape or type."""
    changed = tensor.clone()
    kind = random.integers(8)
    if kind == 0 and changed.is_floating_point() and changed.numel():
        changed.view(-1)[int(random.integers(changed.numel()))] = float(
            random.choice([np.nan, np.inf, -np.inf])
        )
    elif kind == 1:
        changed = changed.transpose(0, -1) if changed.dim() > 1 else changed.unsqueeze(0)
    elif kind == 2:
        changed = changed[:-1] if changed.dim() else changed.reshape(1)
    elif kind == 3:
        changed = changed.to(
            [torch.int64, torch.float16, torch.float64, torch.bool, torch.int8][random.integers(5)]
        )
    elif kind == 4:
        changed = torch.cat([changed, changed]) if changed.dim() else torch.stack([changed] * 2)
    elif kind == 5:
        changed = changed.new_empty((0, *changed.shape[1:]))
    elif kind == 6 and not changed.is_floating_point():
        changed = changed + int(random.choice([-1000, 1000, 2**62]))
    else:
        changed = (
            changed * 0 + 1
            if changed.is_floating_point()
            else changed.flip(0)
            if changed.dim()
            else changed
        )
    return changed.contiguous()


def forged(tensors: dict[str, Tensor], random: np.random.Generator) -> dict[str, Tensor]:
    """The tensors with some left out, renamed, added, exchanged or changed."""
    made = dict(tensors)
    names = list(made)
    for _ in range(random.integers(1, 4)):
        name, other = (names[random.integers(len(names))] for _ in range(2))
        kind = random.integers(8)
        if kind == 0:
            made.pop(name, None)
        elif kind == 1 and name in made:
            made[name + "x"] = made.pop(name)
        elif kind == 2 and name in made and other in made:
            made[name], made[other] = made[other], made[name]
        elif name in made:
            made[name] = other_tensor(made[name], random)
    return made


def bent(facts: Any, random: np.random.Generator) -> Any:
    """JSON with one value another."""
    odd = (
        None,
        -1,
        0,
        10**9,
        2**64,
        1.5,
        "x",
        [],
        {},
        [1],
        {"name": "x"},
        True,
        [[]],
        [-1],
        [1e999],
    )
    if isinstance(facts, dict) and facts and random.integers(6):
        key = sorted(facts)[random.integers(len(facts))]
        if not random.integers(6):
            return {name: value for name, value in facts.items() if name != key}
        return {**facts, key: bent(facts[key], random)}
    if isinstance(facts, list) and facts and random.integers(3):
        at = random.integers(len(facts))
        return [bent(value, random) if place == at else value for place, value in enumerate(facts)]
    return odd[random.integers(len(odd))]


def predict(file: Path, config: Config) -> None:
    prediction = attempt(
        lambda: read_ensemble(file, config, torch.device("cpu")).predict(np.ones((2, 3))), case=file
    )
    assert prediction is None or bool(prediction.mean.isfinite().all())


def go_on(federation: fe.Federation, tensors: dict[str, Tensor], round: Any) -> None:
    """Two rounds from a checkpoint; what is refused leaves the federation as it was."""
    before = federation.state

    def both() -> bool:
        federation.restore(tensors, round)
        for report in federation.rounds(2):
            assert report.loss is None or np.isfinite(report.loss)
        return True

    try:
        if (
            not attempt(both, case={n: (t.shape, t.dtype) for n, t in tensors.items()})
            and federation.round == before.round
        ):
            assert federation.state is before or federation.round == round
    finally:
        federation.state = before


@pytest.mark.filterwarnings("ignore")
def test_modes(trained: tuple[Config, fe.Federation, fe.FederatedData], tmp_path: Path) -> None:
    config, federation, _ = trained
    file = tmp_path / "modes.safetensors"
    write_modes(file, federation.ensemble, {"model": {"shape": [3], "outputs": 2}})
    content = file.read_bytes()
    tensors, facts = read_checkpoint(file)
    predict(file, config)
    for case, random in enumerate(generators(2, 90)):
        if case % 3 == 0:
            file.write_bytes(mutated(content, random, WORDS))
        elif case % 3 == 1:
            write_checkpoint(file, forged(tensors, random), facts)
        else:
            write_checkpoint(file, tensors, bent(facts, random))
        predict(file, config)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints(trained: tuple[Config, fe.Federation, fe.FederatedData]) -> None:
    _, federation, _ = trained
    tensors = {name: tensor.clone() for name, tensor in federation.tensors().items()}
    for random in generators(3, 60):
        round = [federation.round, 0, -1, 10**9, "3", 2.0, None][
            random.integers(7) if random.integers(4) == 0 else 0
        ]
        go_on(federation, forged(tensors, random), round)
        federation.restore(tensors, federation.round)


@pytest.mark.filterwarnings("ignore")
def test_saved_federations(
    trained: tuple[Config, fe.Federation, fe.FederatedData], tmp_path: Path
) -> None:
    _, federation, data = trained
    (file,) = (federation.save(tmp_path) / "checkpoint").iterdir()
    content = file.read_bytes()
    tensors, facts = read_checkpoint(file)
    load = loader(tmp_path, data)
    assert attempt(load) is not None
    for case, random in enumerate(generators(4, 45)):
        if case % 3 == 0:
            file.write_bytes(mutated(content, random, WORDS))
        elif case % 3 == 1:
            write_checkpoint(file, forged(tensors, random), facts)
        else:
            write_checkpoint(file, tensors, bent(facts, random))
        attempt(load, case=file)


def loader(folder: Path, data: fe.FederatedData) -> Callable[[], fe.Federation]:
    def load() -> fe.Federation:
        model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))  # noqa: E731
        loaded = fe.Federation.load(folder, model=model, data=data)
        next(loaded.rounds(1))
        return loaded

    return load


@given(JSON)
@examples(80)
def test_descriptions_of_any_json(tmp_path_factory: pytest.TempPathFactory, facts: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "facts"
    write_checkpoint(folder / FILE, {"buffers": torch.zeros(2, 0)}, facts)
    attempt(
        lambda: read_ensemble(folder / FILE, settings("fedavg"), torch.device("cpu")), case=facts
    )
    attempt(
        lambda: fe.Federation.load(folder, model=nn.Flatten, data=build_data(settings("fedavg"))),
        case=facts,
    )


def test_descriptions_that_nest_deeply(tmp_path: Path) -> None:
    for entry in (
        "[" * 100_000,
        '{"facts": ' + "[" * 100_000,
        json.dumps({"facts": "[" * 100_000, "sha256": "x"}),
    ):
        header = json.dumps({"__metadata__": {"fedensemble": entry}}).encode()
        (tmp_path / FILE).write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(fe.StoreError, match="damaged"):
            read_checkpoint(tmp_path / FILE)
