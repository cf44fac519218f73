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
from .types import Cohort, RoundResult

algorithms: Registry[type[Algorithm]] = Registry("algorithm", lambda: Algorithm, "algorithms")

DEFAULT_CYCLE_END = 0.01  # Garipov et al. 2018: from 5e-2 to 5e-4
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
        lr_cycle: rounds per cycle of the learning rate, at least 2; 0 or None for no cycles. Within
            a cycle the rate falls linearly, from `lr` to `lr_cycle_end` times `lr`.
        lr_cycle_end: factor on the learning rate in the last round of a cycle; None is 0.01.
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
    # its server lets modes interact; set for every class that overrides `couple`
    couples: ClassVar[bool] = False
    # its uploads are rounded or sparse, so that their coordinate-wise median is zero
    quantised: ClassVar[bool] = False
    # no upload depends on its client state, so that a server may combine uploads in any way
    private_state: ClassVar[bool] = False
    # each client has models of its own, see `personal_model`
    personal: ClassVar[bool] = False
    # a visit receives all K modes, as one vector [..., K * P], and may train any of them; see
    # `core/visits/joint.py`
    joint: ClassVar[bool] = False

    lr: float = 0.1
    lr_decay: float = 1.0
    lr_decay_every: int = 10
    # None and not 0: a setting that is None is not part of a run's hash, so that runs of earlier
    # versions keep their folders.
    lr_cycle: int | None = None
    lr_cycle_end: float | None = None
    weighting: Literal["examples", "uniform"] = "examples"
    optimizer: Optimizer = SGD()  # noqa: RUF009 (frozen)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        adopt_earlier_names(cls, _RENAMED)
        if "couple" in cls.__dict__:
            cls.couples = True

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
        if (self.lr_cycle or 0) < 0 or self.lr_cycle == 1:
            raise InputError(f"{owner} needs lr_cycle >= 2, or 0; got {self.lr_cycle}.")
        if self.lr_cycle_end is not None and not (self.lr_cycle and 0 < self.lr_cycle_end <= 1):
            raise InputError(
                f"{owner} needs 0 < lr_cycle_end <= 1, and lr_cycle with it; "
                f"got {self.lr_cycle_end} and lr_cycle={self.lr_cycle}."
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
        lr = self.lr * self.lr_decay ** (round // self.lr_decay_every)
        if not self.lr_cycle:
            return lr
        end = DEFAULT_CYCLE_END if self.lr_cycle_end is None else self.lr_cycle_end
        position = round % self.lr_cycle / (self.lr_cycle - 1)
        return lr * ((1 - position) + position * end)

    @property
    def base(self) -> Algorithm:
        """The algorithm itself, without personal parts (`core/parameters/personal_parts.py`)."""
        return self

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

    def personal_model(self, mode: Tree, buffers: Tensor, memory: Tree) -> tuple[Tensor, Tensor]:
        """A client's own version of a mode: parameters [..., P] and running statistics [..., R].

        For most algorithms it is the mode itself.

        Args:
            mode, buffers: server state and running statistics of the mode, [..., P] and [..., R].
            memory: the client's state for the mode; that of `init_client_state` if the client has
                never trained the mode.
        """
        return mode["theta"], buffers

    def personal_weights(self, memory: Tree) -> Tensor | None:
        """The weights of the K modes in a client's own predictions, [..., K]; None without any.

        Only algorithms with joint visits have them, because others know one mode per visit.

        Args:
            memory: the client's state; that of `init_client_state` for a new client.
        """
        return None

    def received_model(self, sent: Tree, memory: Tree, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The model that a client has received: parameters and running statistics, [..., P].

        Args:
            sent, buffers: what was broadcast.
            memory: the client's state for the mode.
        """
        return sent["theta"], buffers

    def start_modes(self, theta: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters [K, P] and running statistics [K, R] of the modes before the first round.

        Args:
            theta, buffers: of K models that were initialised independently; the default.
        """
        return theta, buffers

    def deployed_modes(self, modes: Tree, buffers: Tensor) -> tuple[Tree, Tensor]:
        """Server state and running statistics of the modes that predict; by default all K.

        An algorithm whose result is a single model returns one row, [1, P] and [1, R].
        """
        return modes, buffers

    def predictors(self, mode: Tree) -> Tensor:
        """The models whose predictions a mode averages, [K, S, P]; for most S = 1, its own."""
        return mode["theta"].unsqueeze(-2)

    def broadcast(self, mode: Tree) -> Tree:
        """What a client downloads, from the server state of its mode."""
        return {"theta": mode["theta"]}

    def gathers_uploads(self, sent: Tree) -> bool:
        """Whether the server needs each upload of a round; by default what `gathers` says.

        Override it for an algorithm that needs them in some rounds only.

        Args:
            sent: what is broadcast in the round, [K, P].
        """
        return self.gathers

    def reassign(self, buffers: Tensor, result: RoundResult) -> RoundResult:
        """The result of joint visits after the server has changed which modes clients trained.

        By default nothing changes. Called only if the uploads of the round were gathered.

        Args:
            buffers: running statistics that were sent, [1, K * R].
            result: of the engine, see `core/visits/joint.py`.
        """
        return result

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

    def buffer_bytes(self, buffers: Tensor) -> int:
        """Bytes of one model's running statistics in a message, in each direction."""
        return self.sent_buffers(buffers).shape[-1] * buffers.element_size()

    def sent_buffers(self, buffers: Tensor) -> Tensor:
        """The running statistics that travel, of those of whole models [..., R]; usually all."""
        return buffers

    def whole_buffers(self, sent: Tensor, *, change: bool = False) -> Tensor:
        """Running statistics [..., R] of whole models, from those that travel.

        Args:
            change: whether they are a change of running statistics; what does not travel is then 0.
        """
        return sent

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

    def couple(self, modes: Tree, buffers: Tensor, cohort: Cohort) -> tuple[Tree, Tensor]:
        """The modes after they have interacted: the last part of the server's step.

        `server_update` computes each mode from its own clients. This method gets the result for all
        modes of one run and may mix its rows, which nothing else may. It is not called in a round
        in which no client replied.

        Args:
            modes: server state after `server_update`, [K, P]. Modes that no client trained in this
                round are unchanged, and it is up to this method what happens to them.
            buffers: running statistics, [K, R].
            cohort: the clients behind each mode; `cohort.count` is 0 for a mode without clients.
        """
        return modes, buffers
