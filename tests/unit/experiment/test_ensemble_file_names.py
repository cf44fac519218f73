"""Names in modes.safetensors: files of earlier versions have none, and forged ones are rejected."""

from pathlib import Path

import pytest

from fedensemble.errors import StoreError
from fedensemble.experiment.storage.ensemble_file_checks import check_facts

FACTS = {"model": {"shape": [2], "outputs": 2}, "modes": 1, "standardise": None}


def test_names_of_classes_and_columns() -> None:
    checked = check_facts(Path("a"), {**FACTS, "class_names": ["a", "b"], "feature_names": None})
    assert checked["class_names"] == ["a", "b"] and checked["feature_names"] is None
    assert check_facts(Path("a"), FACTS)["class_names"] is None
    for entry in ("class_names", "feature_names"):
        for forged in ("ab", [1, 2], ["a", "a"], {"a": 1}):
            with pytest.raises(StoreError, match=f"entry '{entry}'"):
                check_facts(Path("a"), {**FACTS, entry: forged})


def test_categories_of_columns() -> None:
    assert check_facts(Path("a"), FACTS)["categories"] == {}
    given = {"ward": ["x", "y"], "bed": ["2"]}
    assert check_facts(Path("a"), {**FACTS, "categories": given})["categories"] == given
    for forged in (
        "ab",
        ["ward"],
        {"ward": "xy"},
        {"ward": [1]},
        {"ward": ["x", "x"]},
        {"b": None},
    ):
        with pytest.raises(StoreError, match="entry 'categories'"):
            check_facts(Path("a"), {**FACTS, "categories": forged})
