"""Implements `fedensemble.report`: the HTML report of a folder or of a federation."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import tomli_w

from ..errors import InputError
from ..experiment.federation_config import describe_federation
from ..experiment.saved_federation import write_results
from ..experiment.storage.run_folder import RunFolder
from ..federation.federation import Federation
from ..text import as_path
from .html import write_all, write_page
from .html.page import FILE


def write(run: str | Path | Federation, out: str | Path | None) -> Path:
    """Writes the page of a folder or a federation; returns its path. See `fedensemble.report`."""
    target = None if out is None else as_path(out, "out")
    if not isinstance(run, Federation):
        return write_all(as_path(run), target)[1]
    if run.round == 0:
        raise InputError("There is nothing to report: no round was trained. Call train() first.")
    # The report is made from the files of a run. Unlike `save`, this needs no checkpoint.
    with TemporaryDirectory() as folder:
        store = RunFolder(Path(folder))
        values, config = describe_federation(run, "federation")
        store.set_metrics(run.history.records)
        store.write(store.config_file, tomli_w.dumps(values).encode())
        write_results(store, run, config, values, {})
        return write_page(store.path, target or Path(FILE))
