"""Implements `fedensemble export`: writes the ensemble of a run as .onnx or .pt2."""

from __future__ import annotations

from pathlib import Path

from ..experiment.storage.ensemble_file import load_ensemble
from ..export.write import ExportedFile, check_path


def export_file(run: Path, output: Path) -> ExportedFile:
    """Writes the ensemble of a finished run; returns facts about the file."""
    check_path(output)
    return load_ensemble(run).export(output)
