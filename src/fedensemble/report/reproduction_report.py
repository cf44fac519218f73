"""Writes the report of a reproduced table or figure."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint_file import write_bytes, write_json
from ..config.schema import Config
from ..errors import InputError, unknown
from ..experiment.storage.read_json import read_table
from ..experiment.storage.run_folder import RunFolder
from ..experiment.studies.paper_table import Reproduction
from ..experiment.studies.reproduce import CellResult
from ..runtime.hardware import processor
from ..version import VERSION
from .bibliography import bibliography
from .config_text import facts
from .figures.client_methods import client_methods
from .figures.learning_curves import curves
from .figures.loss_surface import loss_surface
from .figures.method_table import methods
from .figures.paper_grid import PaperReport, grid, headline
from .figures.plots import save_for_print
from .figures.theory import theory
from .figures.toy_regression import bias_variance, toy_fit
from .figures.uncertainty_table import uncertainty
from .tables.latex import latex
from .tables.result_table import TextTable
from .tables.runs_table import runs_table

Report = Callable[[Reproduction, Sequence[CellResult]], PaperReport]
REPORTS: dict[str, Report] = {
    "grid": grid,
    "bias-variance": bias_variance,
    "toy-fit": toy_fit,
    "loss-surface": loss_surface,
    "curves": curves,
    "methods": methods,
    "clients": client_methods,
    "uncertainty": uncertainty,
    "theory": theory,
}


def write_reproduction(
    folder: Path,
    reproduction: Reproduction,
    results: Sequence[CellResult],
    root: Path,
    seconds: float,
    trained: Sequence[str],
) -> TextTable:
    """Writes the files of a reproduced table or figure; returns the table.

    The files are table.md, table.csv, table.tex, one row per run in runs.csv, references.bib, the
    figures as PNG, PDF and SVG, runs.json, results.json, and for some reports values.json with the
    result of each seed. All but results.json have the same bytes for the same input file, seeds and
    machine, apart from the seconds in runs.csv.

    Args:
        root: the folder of the runs; runs.json lists their folders relative to it.
        seconds: training time of this call.
        trained: folders of the runs that this call trained.
    """
    kind = reproduction.table.report
    if kind not in REPORTS:
        raise InputError(f"{reproduction.name}: {unknown('report', kind, REPORTS)}")
    shown = REPORTS[kind](reproduction, results)
    for name, figure in shown.figures.items():
        save_for_print(figure, folder / name)
    cells = [((c.row, c.column), config) for c in reproduction.cells for config in c.configs]
    files = {
        "table.md": _page(reproduction, results, shown),
        "table.csv": shown.numbers.csv(),
        "table.tex": latex(shown.table, reproduction.name, shown.best, reproduction.command),
        "runs.csv": runs_table(("row", "column"), cells, root).csv(),
        "references.bib": bibliography(config.algorithm["name"] for _, config in cells),
    }
    for name, content in files.items():
        write_bytes(folder / name, content.encode())
    if shown.values:
        write_json(folder / "values.json", shown.values)
    runs = {
        r.cell.label: [_relative(path, root) for path in r.runs.folders]
        for r in results
        if r.runs is not None
    }
    write_bytes(
        folder / "runs.json", (json.dumps(runs, indent=2, ensure_ascii=False) + "\n").encode()
    )
    write_json(folder / "results.json", _results(folder, reproduction, results, seconds, trained))
    return shown.table


def _relative(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)


def _page(reproduction: Reproduction, results: Sequence[CellResult], shown: PaperReport) -> str:
    """The Markdown page of a table: its figures, notes and settings.

    It holds neither times nor paths, so that the same runs give the same bytes.
    """
    table = reproduction.table
    changed = f", with {reproduction.changes}" if reproduction.changes else ""
    text = [f"## {headline(reproduction)}{changed}", shown.table.markdown()]
    text += [f"![{Path(name).stem}]({name})" for name in shown.figures]
    text += [" ".join(part.split()) for part in (reproduction.note, table.note) if part.strip()]
    text += list(shown.notes)
    text.append(_settings(results))
    missing = _missing(results)
    text += [missing] if missing else []
    text.append(f"`{reproduction.command}`")
    return "\n\n".join(part.rstrip("\n") for part in text) + "\n"


def _settings(results: Sequence[CellResult]) -> str:
    """The settings of the runs, one line per group of rows with equal settings."""
    rows_by_settings: dict[str, list[str]] = {}
    for result in results:
        if result.cell.configs:
            words = "; ".join(facts(result.cell.configs[0]).values())
            rows = rows_by_settings.setdefault(words, [])
            rows += [result.cell.row] if result.cell.row not in rows else []
    lines = [f"{' and '.join(rows)}: {words}." for words, rows in rows_by_settings.items()]
    counts = sorted({len(result.cell.configs) for result in results if result.cell.configs})
    seeds = " or ".join(map(str, counts))
    over = "One seed." if counts == [1] else f"Mean ± standard deviation over {seeds} seeds."
    return "\n".join([over, "", *(f"- {line}" for line in lines)])


def _missing(results: Sequence[CellResult]) -> str:
    """The cells without results and the reasons, in words that do not depend on this machine."""
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result.runs is None:
            why = "not run yet"
            if result.failed:
                seed, message = next(iter(result.failed.items()))
                why = f"diverged: seed {seed}: {message.partition('. ')[0]}"
            elif result.cell.skipped:
                why = (
                    "no such algorithm yet"
                    if result.cell.skipped.startswith("algorithm")
                    else "the data are not here"
                )
            reasons.setdefault(why, []).append(result.cell.label)
    return " ".join(
        f"Without numbers ({why}): {', '.join(labels)}." for why, labels in reasons.items()
    )


def _results(
    folder: Path,
    reproduction: Reproduction,
    results: Sequence[CellResult],
    seconds: float,
    trained: Sequence[str],
) -> dict[str, Any]:
    """The facts that may differ between sessions: times, speed, versions and folders of runs."""
    before = read_table(folder / "results.json") if (folder / "results.json").is_file() else {}
    # The file calls training sessions "sittings"; the key stays, so that old files can be read.
    sessions = before.get("sittings", [])
    cells = []
    new_samples = 0
    for result in results:
        cell: dict[str, Any] = {
            "row": result.cell.row,
            "column": result.cell.column,
            "skipped": result.cell.skipped,
        }
        if result.failed:
            cell["diverged"] = {str(seed): message for seed, message in result.failed.items()}
        if result.runs is not None:
            config = result.cell.configs[0]
            samples = [_samples(config, path) for path in result.runs.folders]
            new_samples += sum(
                n
                for n, path in zip(samples, result.runs.folders, strict=True)
                if str(path) in trained
            )
            cell |= {
                **facts(config),
                "seeds": [c.seed for c in result.cell.configs],
                "folders": [str(path) for path in result.runs.folders],
                "samples": samples,
            }
        cells.append(cell)
    if trained:
        speed = round(new_samples / seconds) if seconds > 0 else 0
        sessions = [
            *sessions,
            {
                "runs": len(trained),
                "seconds": round(seconds, 1),
                "samples": new_samples,
                "samples_per_second": speed,
                **_versions(reproduction),
            },
        ]
    minutes = round(sum(session["seconds"] for session in sessions) / 60, 2)
    return {
        "name": reproduction.name,
        "scale": reproduction.scale,
        "minutes": minutes,
        "sittings": sessions,
        "cells": cells,
    }


def _samples(config: Config, folder: Path) -> int:
    """The number of examples that a run trained on in all passes, by the mean client size."""
    visits = sum(record["visits"] for record in RunFolder(folder).metrics())
    work = config.training
    if work.steps is not None:
        return int(visits * work.steps * work.batch_size)
    clients = read_table(folder / "clients.json") if (folder / "clients.json").is_file() else {}
    return int(
        visits * work.epochs * clients.get("examples", 0) / max(1, clients.get("clients", 1))
    )


def _versions(reproduction: Reproduction) -> dict[str, str]:
    devices = {config.engine.device for cell in reproduction.cells for config in cell.configs}
    cuda = any(device.startswith("cuda") for device in devices) and torch.cuda.is_available()
    return {
        "fedensemble": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if cuda else processor(),
    }
