"""Sets up a run on each rank: data, federation, checkpoint. One process is a job of one rank."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..config.build import build_data, build_federation
from ..config.schema import Config
from ..data import FederatedData
from ..engines.distributed.engine import DistributedEngine
from ..engines.distributed.process_group import ProcessGroup
from ..errors import InputError
from ..federation.federation import Federation
from ..modeling.frozen import same_fingerprint
from ..version import VERSION

DataLoader = Callable[[Config], FederatedData]
# Hashing takes seconds for large data, and runs of one command share data.
_FINGERPRINTS: WeakKeyDictionary[FederatedData, str] = WeakKeyDictionary()


def check_ranks_agree(config: Config, ranks: ProcessGroup, done: bool = False) -> bool:
    """Returns whether rank 0 says that the run is done; raises if configs or versions differ.

    Args:
        config: of this rank.
        ranks: of the job.
        done: whether the run is finished; only the value on rank 0 counts.
    """
    reports = ranks.gather_messages({"config": config.hash(), "version": VERSION, "done": done})
    _require_equal(
        reports,
        "config",
        ranks,
        'Use the same file and options on all ranks; "auto" must mean the same device everywhere.',
    )
    _require_equal(reports, "version", ranks, "Install the same version of fedensemble everywhere.")
    return bool(reports[0]["done"])


def assemble(
    config: Config, ranks: ProcessGroup, load_data: DataLoader = build_data
) -> tuple[FederatedData, Federation, dict[str, Any]]:
    """Returns data, federation, and the facts that a checkpoint must match (hash of the data)."""
    ranks.use(config.engine.device)

    def build() -> tuple[FederatedData, Federation, dict[str, Any]]:
        data = load_data(config)
        return data, build_federation(config, data), {"data": fingerprint(data)}

    (data, federation, facts), reports = ranks.together(
        build, lambda built: {**built[2], "frozen": built[1].model.frozen_fingerprint.tolist()}
    )
    _require_equal(reports, "data", ranks, "Use the same data files on all ranks.")
    _require_same_frozen(reports, ranks)
    if ranks.size > 1:
        federation.engine = DistributedEngine(federation.engine, ranks)
    return data, federation, facts


def resume(
    federation: Federation, checkpoint: tuple[dict[str, Tensor], int] | None, ranks: ProcessGroup
) -> bool:
    """Restores the federation from the checkpoint of rank 0; returns whether there was one.

    Args:
        federation: to restore.
        checkpoint: tensors and round, or None; only the value on rank 0 counts.
        ranks: of the job.
    """
    round = ranks.gather_messages({"round": None if checkpoint is None else checkpoint[1]})[0][
        "round"
    ]
    if round is None:
        return False
    tensors = {} if checkpoint is None else checkpoint[0]
    # The server's state is sent to all ranks. Client state ("memory/...") can be large and is not:
    # the distributed engine gives each rank the state of its own clients.
    client_state = {name: value for name, value in tensors.items() if name.startswith("memory/")}
    server_state = ranks.share(
        {name: value for name, value in tensors.items() if name not in client_state}
    )
    federation.restore({**server_state, **client_state}, int(round))
    return True


def end_round(ranks: ProcessGroup, interrupted: bool, save: bool = False) -> tuple[bool, bool]:
    """Returns whether to save a checkpoint and whether to stop, the same on all ranks.

    Args:
        ranks: of the job.
        interrupted: whether Ctrl-C was pressed; all ranks stop if it was on any of them.
        save: whether a checkpoint is due; only the value on rank 0 counts.
    """
    reports = ranks.gather_messages({"asked": interrupted, "save": save})
    stop = any(report["asked"] for report in reports)
    return reports[0]["save"] or stop, stop


def fingerprint(data: FederatedData) -> str:
    """Returns a hash of the data, so that a run is never resumed on other data."""
    if data in _FINGERPRINTS:
        return _FINGERPRINTS[data]
    digest = sha256()
    # `test_owner` is left out: it changes no training, and earlier versions did not have it.
    for tensor in [*_tensors(data), *_tensors(data.new_clients)]:
        if tensor is None:
            continue
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # `.data` is a view of the array's memory: the data are hashed without a copy.
        digest.update(tensor.cpu().contiguous().numpy().reshape(-1).data)
    return _FINGERPRINTS.setdefault(data, digest.hexdigest())


def _tensors(data: FederatedData | None) -> list[Tensor | None]:
    """Returns all examples and their division among clients."""
    if data is None:
        return []
    tensors = [data.x, data.y, data.size, data.x_test, data.y_test, data.x_server]
    if (held := data.calibration) is not None:
        tensors += [held.x, held.y, held.owner]
    return tensors


def _require_same_frozen(reports: list[dict[str, Any]], ranks: ProcessGroup) -> None:
    """Raises if a rank has built other frozen parameters than rank 0: they are never sent."""
    first, *others = (
        torch.tensor(report["frozen"], dtype=torch.float64).reshape(-1, 3) for report in reports
    )
    for rank, other in enumerate(others, 1):
        if not same_fingerprint(first, other):
            raise InputError(
                "Ranks differ in the parameters of the model that are not trained: rank 0 on "
                f"{ranks.hosts[0]} and rank {rank} on {ranks.hosts[rank]} have built other values. "
                "Use the same file of weights on all ranks."
            )


def _require_equal(
    reports: list[dict[str, Any]], key: str, ranks: ProcessGroup, advice: str
) -> None:
    """Raises if the value of a rank differs from that of rank 0."""
    expected = reports[0][key]
    for rank, report in enumerate(reports):
        if report[key] != expected:
            raise InputError(
                f"Ranks differ in {key}: rank 0 on {ranks.hosts[0]} has {str(expected)[:12]}, "
                f"rank {rank} on {ranks.hosts[rank]} has {str(report[key])[:12]}. {advice}"
            )
