"""A clean environment in a second: only what the wheel requires, linked and not copied."""

import os
import re
import subprocess
import sys
import venv
from functools import partial
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement


def create(folder: Path, wheel: Path) -> Path:
    """Returns the `bin` of a new virtual environment with the wheel and the packages it requires.

    pip installs the wheel. The packages that it requires are links to those of this environment, so
    that nothing is downloaded; a package that is not required cannot be imported.
    """
    venv.create(folder)
    # With the sources on its path, pip would find the package installed already.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = partial(subprocess.run, check=True, capture_output=True, text=True, env=environment)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python)]
    run([*pip, "install", "--no-deps", "--no-index", str(wheel)])
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'), end='')"]
    site = Path(run(where).stdout)
    (installed,) = Distribution.discover(name="fedensemble", path=[str(site)])
    for package in _required(installed):
        for file in package.files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(Path(str(package.locate_file(top))))
    run([*pip, "check"])
    return python.parent


def _required(package: Distribution) -> list[Distribution]:
    """Returns what a package requires without extras, directly and indirectly."""
    found: dict[str, Distribution] = {}
    todo = [(package, "")]
    seen = set()
    while todo:
        current, extra = todo.pop()
        for line in current.requires or []:
            requirement = Requirement(line)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = re.sub(r"[-_.]+", "-", requirement.name).lower()
            found[name] = distribution(name)
            for each in ("", *requirement.extras):
                if (name, each) not in seen:
                    seen.add((name, each))
                    todo.append((found[name], each))
    return list(found.values())
