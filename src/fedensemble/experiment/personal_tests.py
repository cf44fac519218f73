"""Makes personal models after the last round of a run, and tests each client's own."""

from __future__ import annotations

from typing import Any

from ..config.schema import Config
from ..errors import InputError
from ..federation.federation import Federation
from ..personal.clusters import groups_in_names, recovered_share
from ..personal.personalize import personalize
from ..personal.result import Personalization
from ..personal.settings import METHODS

# Keys of the metrics in the record of the last round.
PERSONAL_KEYS = tuple(f"test_{name}{group}" for name in METHODS for group in ("", "_new"))


def evaluate_personal(config: Config, federation: Federation) -> dict[str, Any]:
    """Returns the metrics of personal models: "test_select", "test_select_new" and so on."""
    if config.personalize is None:
        return {}
    tests: dict[str, Any] = {}
    for settings in config.personalize.settings():
        values = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
        made = personalize(federation, **values)
        for key, group in ((settings.method, made), (f"{settings.method}_new", made.new)):
            if group is not None:
                tests[f"test_{key}"] = summarize(group, config.report.publish_clients)
    return tests


def summarize(made: Personalization, publish: bool = True) -> dict[str, float]:
    """Returns how the metrics of personal models are distributed over clients, and the bytes.

    Args:
        made: result of `personalize`.
        publish: whether values of single clients may be in the result.
    """
    found: dict[str, float] = {}
    try:
        found = made.evaluate_clients().summary(publish)
    except InputError:
        if made.data is not None and made.data.test_owner is not None:
            raise
    groups = groups_in_names(made.names)
    if groups is not None:
        found = {**found, "recovered": recovered_share(made.choice, groups)}
    return {**found, "bytes_down": made.bytes_down, "without_rows": int((made.rows == 0).sum())}
