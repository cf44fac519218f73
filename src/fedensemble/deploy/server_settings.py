"""The settings of one start of a fleet, `flwr run APP -c 'timeout=60'`; what changes results is in
the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InputError, unknown


@dataclass(frozen=True)
class Settings:
    """How a server goes about it; zero and "" stand for none.

    Args:
        run_dir: the run's folder on the server; the same folder again continues the run.
        clients: how many must be there before the first round.
        identity: what makes a client the same client: its public "key", its registered "name", the
            "partition" it says it is, or "auto" for keys where any node was registered with a name,
            else partitions. Apps are written with "key".
        timeout: seconds a round waits for answers; every round in which a silent client is asked
            takes that long.
        enrol_timeout: seconds the start waits for clients.
        keep: answers that count in a round, the first of each mode; the config's
            `ensemble.clients_per_round` where it asks for more.
        poll: seconds between two looks at what came in.
        clip: longest update of a client that counts in full, as a length; each tensor by itself.
        clip_factor: the same as a multiple of the median length of the clients' updates.
        refuse_factor: multiple of the median length above which an answer is refused.
        max_value: largest change of a single number that is plausible in an answer.
        max_loss: largest loss that is plausible.
        max_examples: most examples that a client may claim.
        max_weight: most that a client counts, as a multiple of the median number of examples; has
            no effect with `algorithm.weighting = "uniform"`.
        min_cohort: a mode that fewer clients trained is not updated in that round.
        suspend_after: failures in a row after which a client is left out for a growing number of
            visits.
    """

    run_dir: str = ""
    clients: int = 2
    identity: str = "key"
    timeout: float = 300.0
    enrol_timeout: float = 600.0
    keep: int = 0
    poll: float = 1.0
    clip: float = 0.0
    clip_factor: float = 3.0
    refuse_factor: float = 15.0
    max_value: float = 1e6
    max_loss: float = 1e30
    max_examples: int = 10_000_000
    max_weight: float = 2.0
    min_cohort: int = 2
    suspend_after: int = 3

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Settings:
        """From Flower's run config, whose names have hyphens.

        >>> Settings.read({"enrol-timeout": 30}).enrol_timeout
        30.0
        """
        known = {field.name.replace("_", "-"): field for field in fields(cls)}
        values = {}
        for name, value in given.items():
            if name not in known:
                raise InputError(unknown("setting of the run", name, known))
            default: Any = known[name].default
            fits = (
                isinstance(value, str)
                if isinstance(default, str)
                else type(value) in (int, type(default))
            )
            if not fits:
                raise InputError(
                    f"The run's setting `{name}` is such as {default!r}; got {value!r}."
                )
            values[known[name].name] = type(default)(value)
        return cls(**values)
