"""Writes a Flower app for a config: `fedensemble deploy FILE --out DIR`."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from string import Template

from ..checkpoint_file import write_bytes
from ..config.plugins import build_algorithm
from ..config.schema import Config
from ..errors import StoreError
from ..version import VERSION
from .app_spec import EXAMPLE, reject_attack, reject_own_models, write_app_spec
from .requirements import FILE, format_requirements, list_requirements

PACKAGE = "fleet"
_CODE = ("__init__.py", "server_app.py", "client_app.py", "data.py")


def write_app(config: Config, out: Path) -> list[str]:
    """Writes the app into a new folder; returns instructions for starting it."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(
            f"{out} exists already, and its data.py may be yours. "
            "Choose another --out, or delete it."
        )
    build_algorithm(config.algorithm)  # raises before anything is written
    reject_attack(config)
    reject_own_models(config)
    template = files("fedensemble.deploy") / "template"
    spec = write_app_spec(out / PACKAGE, config)
    requirements = list_requirements(config.values())
    write_bytes(out / PACKAGE / FILE, format_requirements(requirements).encode())
    for name in _CODE:
        write_bytes(out / PACKAGE / name, (template / name).read_bytes())
    has_example = (out / PACKAGE / EXAMPLE).exists()
    clients = max(config.ensemble.clients_per_round, config.data.get("clients") or 0)
    values = {
        "name": re.sub(r"[^a-z0-9]+", "-", config.name.lower()).strip("-") or "fleet",
        "version": VERSION,
        "dependencies": ", ".join(f'"{text}"' for text, _ in requirements),
        "installed": "\n".join(
            f"- `{text}`{f' ({why})' * bool(why)}" for text, why in requirements
        ),
        "modes": config.ensemble.modes,
        "rounds": config.rounds,
        "per_round": config.ensemble.clients_per_round,
        "algorithm": spec.config.algorithm["name"],
        "clients": clients,
        "last": clients - 1,
        "data": "" if has_example else r" data=\"$PWD/client-$i.csv\"",
    }
    for name in ("pyproject.toml", "README.md"):
        text = Template((template / f"{name}.in").read_text(encoding="utf-8")).substitute(values)
        write_bytes(out / name, text.encode())
    return [
        f"{out / PACKAGE / 'data.py'}: load() returns a client's own examples, by default those of "
        "an .npz or .csv file. Change it if your clients have other files.",
        f"{out / PACKAGE / FILE}: what to install on every machine, the server and all clients.",
        f"{out / 'README.md'}: the commands for a SuperLink and {clients} SuperNodes.",
    ]
