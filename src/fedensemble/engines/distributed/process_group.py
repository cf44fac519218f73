"""The processes of a job that torchrun starts: what they tell each other, what they add up, and how
they end together.

Rank 0 leads. Small messages are JSON and go through it, one rank after another, so that a process
that is gone has a name. Large tensors are added up by all ranks at once, through nccl where each
has a GPU of its own, else through gloo.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...errors import FedEnsembleError, InputError, RankError
from ...flat_params import Tree

# seconds; a process that ends is noticed at once, this is for a machine that falls silent
TIMEOUT = 1800.0
_FAREWELL = 2.0  # seconds that rank 0 gives the others to hear why it ends
_LAST = 20.0  # seconds that the others let rank 0 end first; torchrun waits 30 before it kills
_POLL = 0.0005
# bytes of a message's first part: whoever listens can take the first part of any message
_FRAME = 4096
_HEAD = 8  # of them hold the length

T = TypeVar("T")
Said = dict[str, Any]


class ProcessGroup:
    """The ranks of this job; made without arguments, one process alone, which has nobody to talk
    to.
    """

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.hosts = ["an unknown host"] * size
        self.notes: list[str] = []
        self._cards: dist.ProcessGroup | None = None
        if size > 1:
            self.hosts = [said["host"] for said in self.agree({"host": socket.gethostname()})]

    def agree(self, mine: Said) -> list[Said]:
        """What every rank says, by rank; raises on all of them if one says "error"."""
        everybody: Any
        if self.rank == 0:
            everybody = [mine, *(self._hear(other) for other in range(1, self.size))]
            for other in range(1, self.size):
                self._tell(other, everybody)
        else:
            # not waited for: should rank 0 end instead of listening, it says why
            post = self._post(0, mine)
            everybody = self._hear(0)
            del post
        if isinstance(everybody, Mapping):  # rank 0 ends, and says why
            raise RankError(str(everybody["error"]))
        for rank, said in enumerate(everybody):
            if "error" in said:
                raise RankError(f"Rank {rank} on {self.hosts[rank]} failed: {said['error']}")
        return list(everybody)

    def together(
        self, step: Callable[[], T], tell: Callable[[T], Said] = lambda result: {}
    ) -> tuple[T, list[Said]]:
        """A step's result and what every rank tells of it; if the step fails on one rank, all of
        them raise.
        """
        try:
            result = step()
        except Exception as error:
            with suppress(RankError):
                self.agree({"error": describe(error)})
            raise
        return result, self.agree(tell(result))

    def use(self, device: str) -> None:
        """Gives every rank of a host a GPU, its own where there are enough, and opens the way for
        large sums.
        """
        if self.size == 1 or not device.startswith("cuda"):
            return
        if ":" in device:
            raise InputError(
                f"device '{device}' is one GPU, and there are {self.size} ranks: use 'cuda' or 'auto'."
            )
        cards, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local % cards)
        enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= cards
        if all(said["enough"] for said in self.agree({"enough": enough})):
            self._cards = dist.new_group(backend="nccl", timeout=timedelta(seconds=self.timeout))
        else:
            self.notes.append(
                "Some ranks share a GPU, which is seldom faster; sums go through the CPU (gloo)."
            )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; may be written into the tensor itself."""
        if self.size == 1 or not tensor.numel():
            return tensor
        try:
            if self._cards is not None and tensor.is_cuda:
                work = dist.all_reduce(tensor, group=self._cards, async_op=True)
                while not work.is_completed():  # not wait(): in there, no signal would be heard
                    time.sleep(_POLL)
                work.wait()
                return tensor
            host = tensor.cpu().contiguous()
            dist.all_reduce(host)
        except RankError:
            raise
        except RuntimeError:
            # whoever does not answer is named
            self.agree({"error": "the exchange between ranks broke off."})
            raise
        return host.to(tensor.device)

    def share(self, tensors: Tree) -> Tree:
        """What rank 0 gives, on every rank, on the CPU."""
        forms = self.agree({"forms": forms_of(tensors)} if self.rank == 0 else {})[0]["forms"]
        if self.size == 1:
            return tensors
        for other in range(1, self.size) if self.rank == 0 else ():
            self._send(other, tensors)
        return tensors if self.rank == 0 else self._receive(0, forms)

    def gather(self, tensors: Tree) -> Tree:
        """On rank 0 the rows of all ranks, rank after rank, on the CPU if there are several;
        elsewhere nothing.
        """
        said = self.agree({"forms": forms_of(tensors)})
        if self.rank:
            self._send(0, tensors)
            return {}
        parts = [
            tensors,
            *(self._receive(other, said[other]["forms"]) for other in range(1, self.size)),
        ]
        return join_rows(parts) if self.size > 1 else tensors

    def scatter(self, parts: Sequence[Tree]) -> Tree:
        """What rank 0 gives to this rank, of one tree for each."""
        forms = self.agree({"forms": [forms_of(part) for part in parts]} if self.rank == 0 else {})[
            0
        ]["forms"]
        if self.rank:
            return self._receive(0, forms[self.rank])
        for other in range(1, self.size):
            self._send(other, parts[other])
        return parts[0]

    def notify_exit(self, why: str) -> None:
        """Tells the other ranks, as far as they can hear, why rank 0 ends."""
        posts: list[Any] = []
        for other in range(1, self.size):
            with suppress(RankError):
                posts += self._post(other, {"error": why})
        last = time.monotonic() + _FAREWELL
        for work, _ in posts:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.05, last - time.monotonic())))

    def wait_for_rank0(self) -> None:
        """Waits until rank 0 has ended: torchrun ends all ranks after the first, and rank 0 has
        something to say.
        """
        last = time.monotonic() + _LAST
        with suppress(RankError):
            while time.monotonic() < last:
                self._hear(0, _LAST)

    def _tell(self, other: int, what: Any) -> None:
        for message in _letters(what):
            self._with(other, dist.isend, message)

    def _post(self, other: int, what: Any) -> list[tuple[Any, Tensor]]:
        """The same without waiting until it is heard; what comes back must be kept until then."""
        try:
            return [(dist.isend(message, other), message) for message in _letters(what)]
        except RuntimeError:
            raise self._gone(other) from None

    def _hear(self, other: int, timeout: float | None = None) -> Any:
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        self._with(other, dist.irecv, frame, timeout)
        length = int(frame[:_HEAD].view(torch.int64))
        text = frame[_HEAD : _HEAD + length].numpy().tobytes()
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            self._with(other, dist.irecv, rest, timeout)
            text += rest.numpy().tobytes()
        return json.loads(text)

    def _send(self, other: int, tensors: Tree) -> None:
        for tensor in tensors.values():
            if tensor.numel():
                self._with(other, dist.isend, tensor.cpu().contiguous())

    def _receive(self, other: int, forms: Mapping[str, Any]) -> Tree:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, kind))
            for name, (kind, shape) in forms.items()
        }
        for tensor in tensors.values():
            if tensor.numel():
                self._with(other, dist.irecv, tensor)
        return tensors

    def _with(
        self, other: int, call: Callable[..., Any], tensor: Tensor, timeout: float | None = None
    ) -> None:
        """Sends to or receives from a rank; names it if it is gone."""
        try:
            call(tensor, other).wait(timedelta(seconds=timeout or self.timeout))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._gone(other, "timed out" in str(error).lower()) from None

    def _gone(self, other: int, late: bool = False) -> RankError:
        state = f"has not answered for {self.timeout:g} seconds" if late else "is gone"
        return RankError(
            f"Rank {other} on {self.hosts[other]} {state}; the run stops.", heard=self.rank == 0
        )


def describe(error: BaseException) -> str:
    """An error in one line: our own say what they mean, others need their kind."""
    return str(error) if isinstance(error, FedEnsembleError) else f"{type(error).__name__}: {error}"


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of every tensor."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape))
        for name, value in tensors.items()
    }


def join_rows(parts: Sequence[Tree]) -> Tree:
    """The rows of several trees, one after another, on the CPU; a tree may lack a tensor.

    >>> join_rows([{}, {"h": torch.ones(1, 2)}, {"h": torch.zeros(1, 2)}])["h"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name].cpu() for part in parts if name in part]) for name in names}


def _letters(what: Any) -> list[Tensor]:
    """A message as one tensor, or two if it is long: its length and the beginning, then the
    rest.
    """
    text = json.dumps(what).encode()
    whole = torch.frombuffer(
        bytearray(len(text).to_bytes(_HEAD, sys.byteorder) + text), dtype=torch.uint8
    )
    return [part for part in (whole[:_FRAME], whole[_FRAME:]) if len(part)]
