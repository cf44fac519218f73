"""The base class of algorithms: local training, its learning rate, and the server's update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from ..errors import InputError
from ..flat_params import Tree, payload_bytes
from ..modeling.server_context import ServerContext
from ..registry import Registry
from ..renamed import adopt_earlier_names
from .hyperparameters import check_hyperparameters
from .optimizer import SGD, Optimizer, optimizers
from .problem import LocalProblem
from .types import Cohort

algorithms: Registry[type[Algorithm]] = Registry("algorithm", lambda: Algorithm, "algorithms")

_RENAMED = {"rate": "learning_rate", "init_memory": "init_client_state"}


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """A federated algorithm, written as arithmetic on parameter vectors.

    All tensors have shape [..., P]. The last dimension is the flattened model. The leading
    dimensions are what is processed at once: none for a single client, J visits in a block, K modes
    on the server. An algorithm broadcasts over `...` and reduces only over the last dimension, so
    that one definition runs on every engine.

    Args:
        lr: learning rate of local training.
        lr_decay: factor on the learning rate every `lr_decay_every` rounds; 1 keeps it constant.
            The paper uses 0.99 every 10 rounds.
        lr_decay_every: rounds between two decay steps.
        weighting: aggregation weights of a mode's clients: their number of "examples" (the paper's
            appendix) or "uniform" (the paper's remark).
        optimizer: the local optimizer: an Optimizer such as `Adam()`, a registered name, or a dict
            with the name and options, {"name": "sgd", "momentum": 0.9}.
    """

    reference: ClassVar[str] = ""  # the publication that introduced the algorithm
    # what is uploaded and downloaded, in words; if empty, the names of the tensors are shown
    sends: ClassVar[str] = ""
    full_participation: ClassVar[bool] = False  # its paper assumes that all clients take part
    plain_sgd: ClassVar[bool] = False  # its equations hold only for local SGD without momentum
    distils: ClassVar[bool] = False  # its server learns from unlabelled inputs, `data.x_server`
    gathers: ClassVar[bool] = False  # its server needs each upload, `cohort.members`, not the mean
    # its uploads are rounded or sparse, so that their coordinate-wise median is zero
    quantised: ClassVar[bool] = False

    lr: float = 0.1
    lr_decay: float = 1.0
    lr_decay_every: int = 10
    weighting: Literal["examples", "uniform"] = "examples"
    optimizer: Optimizer = SGD()  # noqa: RUF009 (frozen)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)

    def __post_init__(self) -> None:
        owner = type(self).__name__
        check_hyperparameters(self)
        if not self.lr > 0:
            raise InputError(f"{owner} needs lr > 0; got {self.lr}.")
        if not 0 < self.lr_decay <= 1 or self.lr_decay_every < 1:
            raise InputError(
                f"{owner} needs 0 < lr_decay <= 1 and lr_decay_every >= 1; "
                f"got {self.lr_decay} and {self.lr_decay_every}."
            )
        if self.weighting not in ("examples", "uniform"):
            raise InputError(
                f"{owner} needs weighting 'examples' or 'uniform'; got {self.weighting!r}."
            )
        # The field accepts a name or a dict, as a config does, and holds the optimizer itself.
        object.__setattr__(self, "optimizer", optimizers.build(self.optimizer))
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                f"{owner} needs an optimizer such as 'adam', SGD() or Adam(); "
                f"got {self.optimizer!r}."
            )
        if self.plain_sgd and (not isinstance(self.optimizer, SGD) or self.optimizer.momentum > 0):
            raise InputError(f"{owner} needs local SGD without momentum; got {self.optimizer!r}.")

    def learning_rate(self, round: int) -> float:
        """The learning rate of a round (counted from 0)."""
        return self.lr * self.lr_decay ** (round // self.lr_decay_every)

    @property
    def assumes_full_participation(self) -> bool:
        """Whether the algorithm, with these settings, needs all clients in every round."""
        return self.full_participation

    @property
    def target_spread(self) -> float:
        """Standard deviation of noise that each mode adds to its clients' regression targets."""
        return 0.0

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user about the server's work."""
        return ()

    def bind(self, context: ServerContext) -> Self:
        """The algorithm bound to the resources of its server; raises if they do not suffice.

        Called once, before `init_mode`.

        Args:
            context: the model as a function, and the server's unlabelled inputs.
        """
        return self

    def init_mode(self, theta: Tensor) -> Tree:
        """Server state of modes with parameters `theta`, [..., P]; includes the entry "theta"."""
        return {"theta": theta}

    def check_state(self, mode: Tree) -> None:  # noqa: B027 (most algorithms never changed their state)
        """Raises StoreError if stored server state, as of an earlier version, cannot be used."""

    def init_client_state(self, theta: Tensor) -> Tree:
        """Initial client state for a mode with parameters `theta`; empty for most algorithms."""
        return {}

    def predictors(self, mode: Tree) -> Tensor:
        """The models whose predictions a mode averages, [K, S, P]; for most S = 1, its own."""
        return mode["theta"].unsqueeze(-2)

    def broadcast(self, mode: Tree) -> Tree:
        """What a client downloads, from the server state of its mode."""
        return {"theta": mode["theta"]}

    def upload_bytes(
        self, uploads: Tree, shared_draw: Tensor, sent: Tree | None = None
    ) -> int | Tensor:
        """Bytes that one client uploads; with compression, the length of the encoding.

        An algorithm whose messages differ between visits returns int64 [..., 1] instead of an int.
        An override may omit the last argument.

        Args:
            uploads: the uploads, [..., P]; only shapes and dtypes matter, not values.
            shared_draw: the round's shared random draw, on the CPU, [..., 1].
            sent: what the client received, [..., P]; None for the size of an ordinary message.
        """
        return payload_bytes(uploads)

    def download_bytes(
        self, sent: Tree, shared_draw: Tensor, memory: Tree | None = None
    ) -> int | Tensor:
        """Bytes that one client downloads; the return type is that of `upload_bytes`.

        An override may omit the last argument.

        Args:
            sent: what is broadcast, [..., P].
            shared_draw: the round's shared random draw, on the CPU, [..., 1].
            memory: the client's state for the mode, [..., P]; None for the size of an ordinary
                message, to a client that has missed no round.
        """
        return payload_bytes(sent)

    def encode(self, uploads: Tree, shared_draw: Tensor) -> Tree:
        """The message of one client: its uploads [P], or their encoding in bytes (uint8)."""
        return uploads

    def decode(self, message: Tree, like: Tree, shared_draw: Tensor) -> Tree:
        """The uploads that `encode` encoded; `like` has their names, shapes and dtypes."""
        return message

    @abstractmethod
    def local_training(self, sent: Tree, memory: Tree, problem: LocalProblem) -> tuple[Tree, Tree]:
        """The uploads of a client, and its new client state."""

    @abstractmethod
    def server_update(self, mode: Tree, uploads: Tree, cohort: Cohort) -> Tree:
        """The new server state, from the weighted mean of the uploads of a mode's clients."""
