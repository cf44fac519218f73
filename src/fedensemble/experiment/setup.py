"""What a run is made of, the same on every rank that works on it; one process is a job of one
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ..config.build import build_data, build_federation
from ..config.schema import Config
from ..data import FederatedData
from ..engines.distributed.engine import DistributedEngine
from ..engines.distributed.process_group import ProcessGroup
from ..errors import InputError
from ..federation.federation import Federation
from ..version import VERSION

Read = Callable[[Config], FederatedData]
_PRINTS: WeakKeyDictionary[FederatedData, str] = WeakKeyDictionary()


def meet(config: Config, ranks: ProcessGroup, done: bool = False) -> bool:
    """Whether the run is done, as rank 0 knows; raises if the ranks have different settings or
    versions.
    """
    said = ranks.agree({"config": config.hash(), "version": VERSION, "done": done})
    _same(
        said,
        "config",
        ranks,
        'Give all the same file and options; "auto" must mean the same device everywhere.',
    )
    _same(said, "version", ranks, "Install the same version of fedensemble everywhere.")
    return bool(said[0]["done"])


def assemble(
    config: Config, ranks: ProcessGroup, read: Read = build_data
) -> tuple[FederatedData, Federation, dict[str, Any]]:
    """Data, federation and what a checkpoint must fit (the data's fingerprint)."""
    ranks.use(config.engine.device)

    def build() -> tuple[FederatedData, Federation, dict[str, Any]]:
        data = read(config)
        return data, build_federation(config, data), {"data": fingerprint(data)}

    (data, federation, facts), said = ranks.together(build, lambda built: built[2])
    _same(said, "data", ranks, "Give all the same data files.")
    if ranks.size > 1:
        federation.engine = DistributedEngine(federation.engine, ranks)
    return data, federation, facts


def resume(
    federation: Federation, found: tuple[dict[str, Tensor], int] | None, ranks: ProcessGroup
) -> bool:
    """Whether there was a checkpoint, which rank 0 found: each rank takes the server's state and
    its own clients'.
    """
    round = ranks.agree({"round": None if found is None else found[1]})[0]["round"]
    if round is None:
        return False
    tensors = {} if found is None else found[0]
    memory = {name: value for name, value in tensors.items() if name.startswith("memory/")}
    shared = ranks.share({name: value for name, value in tensors.items() if name not in memory})
    federation.restore({**shared, **memory}, int(round))
    return True


def end_round(ranks: ProcessGroup, asked: bool, save: bool = False) -> tuple[bool, bool]:
    """Whether to save (rank 0 says) and whether to stop (any rank's user asked), the same on all
    ranks.
    """
    said = ranks.agree({"asked": asked, "save": save})
    stop = any(each["asked"] for each in said)
    return said[0]["save"] or stop, stop


def fingerprint(data: FederatedData) -> str:
    """A hash of what is trained on, so that a run never continues on other data; found once, as
    runs share data.
    """
    if data in _PRINTS:
        return _PRINTS[data]
    digest = sha256()
    for tensor in (data.x, data.y, data.size, data.x_test, data.y_test, data.x_server):
        if tensor is None:
            continue
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        # as it lies there, without a copy
        digest.update(tensor.cpu().contiguous().numpy().reshape(-1).data)
    return _PRINTS.setdefault(data, digest.hexdigest())


def _same(said: list[dict[str, Any]], key: str, ranks: ProcessGroup, advice: str) -> None:
    """Raises if a rank says something else than rank 0."""
    for rank, each in enumerate(said):
        if each[key] != said[0][key]:
            raise InputError(
                f"Ranks differ in {key}: rank 0 on {ranks.hosts[0]} has {str(said[0][key])[:12]}, rank {rank} on "
                f"{ranks.hosts[rank]} has {str(each[key])[:12]}. {advice}"
            )
