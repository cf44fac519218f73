"""The ranks of a torchrun job: messages, collective operations, and failures that all ranks notice.

The protocol has two channels:

- Small messages are JSON and go through rank 0, which receives from one rank after another and
  sends all messages to each. This is slower than an all-gather, but a send or receive names its
  peer: if a process has died, the error says which rank on which host.
- Large tensors are summed by all ranks at once, with NCCL if each rank has a GPU of its own, and
  otherwise with gloo on the CPU.

Every rank makes the same calls in the same order. If a step fails on one rank, it sends the error
as its message, and all ranks raise instead of waiting for a result that never comes. If rank 0
ends, it sends the reason in place of the messages that the others expect.
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

# Seconds after which a rank that does not reply counts as gone. The end of a process is noticed at
# once, because its connections close; the timeout is for a host that hangs or loses its network.
TIMEOUT = 1800.0
_NOTIFY_SECONDS = 2.0  # that rank 0 waits at its end for the others to receive the reason
# Seconds that the others wait for rank 0 to end first; torchrun kills ranks after 30.
_WAIT_SECONDS = 20.0
_POLL_SECONDS = 0.0005
# Bytes of the first part of a message. The receiver must know the size of a tensor in advance, so
# it always receives a frame of this size first; the frame begins with the length of the message.
_FRAME = 4096
_HEADER = 8  # bytes of the length

T = TypeVar("T")
Message = dict[str, Any]


class ProcessGroup:
    """The ranks of this job; without arguments, a single process on its own."""

    def __init__(self, rank: int = 0, size: int = 1, timeout: float = TIMEOUT) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        self.hosts = ["an unknown host"] * size
        self.notes: list[str] = []
        self._nccl_group: dist.ProcessGroup | None = None
        if size > 1:
            messages = self.gather_messages({"host": socket.gethostname()})
            self.hosts = [message["host"] for message in messages]

    def gather_messages(self, message: Message) -> list[Message]:
        """The messages of all ranks, by rank; raises on all ranks if one of them has an "error"."""
        messages: Any
        if self.rank == 0:
            messages = [message, *(self._receive_json(other) for other in range(1, self.size))]
            for other in range(1, self.size):
                self._send_json(other, messages)
        else:
            # Do not wait for this send: if rank 0 ends instead of receiving the message, the send
            # never completes, but the reason is already on its way.
            pending = self._start_send_json(0, message)
            messages = self._receive_json(0)
            del pending
        if isinstance(messages, Mapping):  # not a list: rank 0 ends, and this is the reason
            raise RankError(str(messages["error"]))
        for rank, each in enumerate(messages):
            if "error" in each:
                raise RankError(f"Rank {rank} on {self.hosts[rank]} failed: {each['error']}")
        return list(messages)

    def together(
        self, step: Callable[[], T], tell: Callable[[T], Message] = lambda result: {}
    ) -> tuple[T, list[Message]]:
        """Runs a step on every rank; raises on all ranks if it fails on one of them.

        Args:
            step: what to run.
            tell: the message that this rank sends to the others, made from the step's result.

        Returns:
            The step's result on this rank, and the messages of all ranks.
        """
        try:
            result = step()
        except Exception as error:
            with suppress(RankError):
                self.gather_messages({"error": format_error(error)})
            raise
        return result, self.gather_messages(tell(result))

    def use(self, device: str) -> None:
        """Assigns a GPU to every rank and chooses the backend for large sums.

        Every rank of a host has its own GPU if there are enough; otherwise ranks share them, and
        sums use gloo, because NCCL does not allow two ranks on one GPU.
        """
        if self.size == 1 or not device.startswith("cuda"):
            return
        if ":" in device:
            raise InputError(
                f"device '{device}' is one GPU, and there are {self.size} ranks: "
                "use 'cuda' or 'auto'."
            )
        gpus, local_rank = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(local_rank % gpus)
        enough = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= gpus
        if all(message["enough"] for message in self.gather_messages({"enough": enough})):
            timeout = timedelta(seconds=self.timeout)
            self._nccl_group = dist.new_group(backend="nccl", timeout=timeout)
        else:
            self.notes.append(
                "Some ranks share a GPU, which is seldom faster; sums go through the CPU (gloo)."
            )

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, with the same bits on each; may overwrite `tensor`."""
        if self.size == 1 or not tensor.numel():
            return tensor
        try:
            if self._nccl_group is not None and tensor.is_cuda:
                work = dist.all_reduce(tensor, group=self._nccl_group, async_op=True)
                # Poll instead of calling `wait` right away: Python handles signals such as SIGTERM
                # only between bytecodes, that is, not inside `wait`.
                while not work.is_completed():
                    time.sleep(_POLL_SECONDS)
                work.wait()
                return tensor
            host = tensor.cpu().contiguous()
            dist.all_reduce(host)
        except RankError:
            raise
        except RuntimeError:
            # An all-reduce does not tell which rank is gone. Exchanging messages does: this raises
            # an error that names the rank.
            self.gather_messages({"error": "the exchange between ranks broke off."})
            raise
        return host.to(tensor.device)

    def share(self, tensors: Tree) -> Tree:
        """Broadcasts the tensors of rank 0; other ranks get them on the CPU."""
        specs = self.gather_messages({"specs": tensor_specs(tensors)} if self.rank == 0 else {})[0][
            "specs"
        ]
        if self.size == 1:
            return tensors
        for other in range(1, self.size) if self.rank == 0 else ():
            self._send(other, tensors)
        return tensors if self.rank == 0 else self._receive(0, specs)

    def gather(self, tensors: Tree) -> Tree:
        """On rank 0 the rows of all ranks, in the order of ranks; an empty tree on the others.

        With several ranks the result is on the CPU.
        """
        messages = self.gather_messages({"specs": tensor_specs(tensors)})
        if self.rank:
            self._send(0, tensors)
            return {}
        parts = [
            tensors,
            *(self._receive(other, messages[other]["specs"]) for other in range(1, self.size)),
        ]
        return concatenate_rows(parts) if self.size > 1 else tensors

    def scatter(self, parts: Sequence[Tree]) -> Tree:
        """Part r of the list on rank 0, for rank r; other ranks pass an empty list."""
        message = {"specs": [tensor_specs(part) for part in parts]} if self.rank == 0 else {}
        specs = self.gather_messages(message)[0]["specs"]
        if self.rank:
            return self._receive(0, specs[self.rank])
        for other in range(1, self.size):
            self._send(other, parts[other])
        return parts[0]

    def notify_exit(self, reason: str) -> None:
        """Tells the other ranks why rank 0 ends, as far as they still receive."""
        pending: list[Any] = []
        for other in range(1, self.size):
            with suppress(RankError):
                pending += self._start_send_json(other, {"error": reason})
        deadline = time.monotonic() + _NOTIFY_SECONDS
        for work, _ in pending:
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=max(0.05, deadline - time.monotonic())))

    def wait_for_rank0(self) -> None:
        """Waits until rank 0 has ended.

        As soon as one rank has ended, torchrun ends all others. Rank 0 must have printed the error
        by then, so the others let it end first.
        """
        deadline = time.monotonic() + _WAIT_SECONDS
        with suppress(RankError):  # raised when the connection to rank 0 closes
            while time.monotonic() < deadline:
                self._receive_json(0, _WAIT_SECONDS)

    def _send_json(self, other: int, content: Any) -> None:
        for part in _encode(content):
            self._transfer(other, dist.isend, part)

    def _start_send_json(self, other: int, content: Any) -> list[tuple[Any, Tensor]]:
        """Starts to send a message and returns without waiting.

        The result holds the tensors that are being sent. The caller must keep it until the message
        has arrived: memory that is freed before would be sent with other content.
        """
        try:
            return [(dist.isend(part, other), part) for part in _encode(content)]
        except RuntimeError:
            raise self._rank_error(other) from None

    def _receive_json(self, other: int, timeout: float | None = None) -> Any:
        frame = torch.zeros(_FRAME, dtype=torch.uint8)
        self._transfer(other, dist.irecv, frame, timeout)
        length = int(frame[:_HEADER].view(torch.int64))
        text = frame[_HEADER : _HEADER + length].numpy().tobytes()
        if len(text) < length:
            rest = torch.empty(length - len(text), dtype=torch.uint8)
            self._transfer(other, dist.irecv, rest, timeout)
            text += rest.numpy().tobytes()
        return json.loads(text)

    def _send(self, other: int, tensors: Tree) -> None:
        for tensor in tensors.values():
            if tensor.numel():
                self._transfer(other, dist.isend, tensor.cpu().contiguous())

    def _receive(self, other: int, specs: Mapping[str, Any]) -> Tree:
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, (dtype, shape) in specs.items()
        }
        for tensor in tensors.values():
            if tensor.numel():
                self._transfer(other, dist.irecv, tensor)
        return tensors

    def _transfer(
        self, other: int, call: Callable[..., Any], tensor: Tensor, timeout: float | None = None
    ) -> None:
        """Sends to or receives from a rank and waits for it; names the rank if it is gone."""
        try:
            call(tensor, other).wait(timedelta(seconds=timeout or self.timeout))
        except RankError:
            raise
        except RuntimeError as error:
            raise self._rank_error(other, "timed out" in str(error).lower()) from None

    def _rank_error(self, other: int, timed_out: bool = False) -> RankError:
        state = f"has not answered for {self.timeout:g} seconds" if timed_out else "is gone"
        return RankError(
            f"Rank {other} on {self.hosts[other]} {state}; the run stops.", reported=self.rank == 0
        )


def format_error(error: BaseException) -> str:
    """An error as one line; those of other packages with the name of their class."""
    return str(error) if isinstance(error, FedEnsembleError) else f"{type(error).__name__}: {error}"


def tensor_specs(tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, list[int]]]:
    """Dtype and shape of every tensor, as JSON can hold them."""
    return {
        name: (str(value.dtype).removeprefix("torch."), list(value.shape))
        for name, value in tensors.items()
    }


def concatenate_rows(parts: Sequence[Tree]) -> Tree:
    """The rows of several trees, one after another, on the CPU; a tree may lack a tensor.

    >>> parts = [{}, {"h": torch.ones(1, 2)}, {"h": torch.zeros(1, 2)}]
    >>> concatenate_rows(parts)["h"].tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name].cpu() for part in parts if name in part]) for name in names}


def _encode(content: Any) -> list[Tensor]:
    """A message as one tensor, or two if it is longer than a frame: length and text, rest."""
    text = json.dumps(content).encode()
    header = len(text).to_bytes(_HEADER, sys.byteorder)
    data = torch.frombuffer(bytearray(header + text), dtype=torch.uint8)
    return [part for part in (data[:_FRAME], data[_FRAME:]) if len(part)]
