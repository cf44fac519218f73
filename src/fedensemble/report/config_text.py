"""The settings of a run in words, for those who read its numbers."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.schema import Config


def facts(config: Config) -> Mapping[str, str]:
    """What a reader must know of a run, in words."""
    data, method, work = config.data, config.algorithm, config.training
    inner = {name: value for name, value in method["optimizer"].items() if value and name != "name"}
    count, what = (work.epochs, "epoch") if work.steps is None else (work.steps, "step")
    local = f"{count} local {what}{'s' * (count > 1)}"
    decay = (
        f", ×{method['lr_decay']:g} every {method['lr_decay_every']} rounds"
        if method["lr_decay"] < 1
        else ""
    )
    return {
        "data": str(data["source"]),
        "clients": f"{data['clients'] or 'natural'} clients, {config.ensemble.clients_per_round} a round",
        "model": " ".join(
            [config.model["name"], *(f"{n}={v}" for n, v in config.model.items() if n != "name")]
        ),
        "work": f"{config.rounds} rounds, {local}, batches of {work.batch_size}",
        "optimiser": f"{method['optimizer']['name']} {method['lr']:g}{decay}"
        + "".join(
            f", {name} {value:g}" for name, value in inner.items() if isinstance(value, float)
        ),
    }
