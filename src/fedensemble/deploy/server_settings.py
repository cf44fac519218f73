"""Settings of one start of a fleet: `flwr run APP -c 'timeout=60'`.

Settings control waiting and limits on replies. The algorithm, model and schedule are in the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InputError, unknown


@dataclass(frozen=True)
class Settings:
    """Settings of a server. Zero and "" mean that a setting is off.

    Args:
        run_dir: the run's folder on the server; the same folder again continues the run.
        test_file: .npz or .csv file on the server with examples to test on, every
            `evaluation.every` rounds of the config.
        clients: number of clients that must be online before the first round.
        identity: what identifies a client: its public "key", its registered "name", the
            "partition" number that it claims, or "auto": keys if any node was registered with a
            name, else partitions. Apps are generated with "key".
        timeout: seconds that a round waits for replies. A round takes this long whenever a selected
            client is silent.
        enrol_timeout: seconds that the start waits for clients.
        keep: number of replies that count per round, the first of each mode. By default all, or the
            config's `ensemble.clients_per_round` where it selects more clients than that.
        poll: seconds between two polls for replies.
        clip: largest L2 length of an update; longer ones are scaled down. Each tensor is measured
            separately.
        clip_factor: the same as a multiple of the median length of the clients' updates.
        refuse_factor: multiple of the median length above which a reply is rejected.
        max_value: largest plausible change of a single value in a reply.
        max_loss: largest plausible loss.
        max_examples: largest number of examples that a client may claim.
        max_weight: largest weight of a client, as a multiple of the median number of examples. Has
            no effect with `algorithm.weighting = "uniform"`.
        min_cohort: a mode that fewer clients trained is not updated in that round.
        suspend_after: failures in a row after which a client is suspended for a growing number of
            visits.
    """

    run_dir: str = ""
    test_file: str = ""
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
    def read(cls, run_config: Mapping[str, Any]) -> Settings:
        """Returns the settings in Flower's run config, whose names have hyphens.

        >>> Settings.read({"enrol-timeout": 30}).enrol_timeout
        30.0
        """
        known = {field.name.replace("_", "-"): field for field in fields(cls)}
        values = {}
        for name, value in run_config.items():
            if name not in known:
                raise InputError(unknown("setting of the run", name, known))
            default: Any = known[name].default
            type_matches = (
                isinstance(value, str)
                if isinstance(default, str)
                else type(value) in (int, type(default))
            )
            if not type_matches:
                raise InputError(
                    f"The run's setting `{name}` is a value such as {default!r}; got {value!r}."
                )
            values[known[name].name] = type(default)(value)
        return cls(**values)
