"""The settings of a run in words, for readers of its results."""

from __future__ import annotations

from collections.abc import Mapping

from ..config.schema import Config


def facts(config: Config) -> Mapping[str, str]:
    """Data, clients, model, local work and optimizer of a run, each as one phrase."""
    data, algorithm, work = config.data, config.algorithm, config.training
    optimizer = algorithm["optimizer"]
    options = {name: value for name, value in optimizer.items() if value and name != "name"}
    count, unit = (work.epochs, "epoch") if work.steps is None else (work.steps, "step")
    local = f"{count} local {unit}{'s' * (count > 1)}"
    decay = (
        f", ×{algorithm['lr_decay']:g} every {algorithm['lr_decay_every']} rounds"
        if algorithm["lr_decay"] < 1
        else ""
    )
    cycle = algorithm.get("lr_cycle")
    decay += f", cycles of {cycle} rounds" if cycle else ""
    per_round = config.ensemble.clients_per_round
    return {
        "data": str(data["source"]),
        "clients": f"{data['clients'] or 'natural'} clients, {per_round} per round",
        "model": " ".join(
            [
                config.model["name"],
                *(f"{n}={v}" for n, v in config.model.items() if n != "name" and v is not None),
            ]
        ),
        "work": f"{config.rounds} rounds, {local}, batches of {work.batch_size}",
        "optimizer": f"{algorithm['optimizer']['name']} {algorithm['lr']:g}{decay}"
        + "".join(
            f", {name} {value:g}" for name, value in options.items() if isinstance(value, float)
        ),
    }
