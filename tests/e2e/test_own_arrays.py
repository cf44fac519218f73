"""Runs on arrays of one's own: what is wrong with them is said in their own terms, and what is odd
is remarked.
"""

from pathlib import Path

import numpy as np
import pytest

from .command_line import run

OWN = """
rounds = 1
[data]
source = "npz"
path = "mine.npz"
partition = "natural"
[model]
name = "{model}"
[ensemble]
modes = {modes}
clients_per_round = 2
strata = 2
"""


def own(
    folder: Path, *settings: str, model: str = "mlp", modes: int = 2, **changes: object
) -> tuple[int, str, str]:
    """A run on arrays of one's own: three clients of four rows, two classes."""
    x = np.linspace(0, 1, 24, dtype=np.float32).reshape(12, 2)
    arrays = {
        "x": x,
        "y": np.arange(12) % 2,
        "client": np.arange(12) % 3,
        "x_test": x,
        "y_test": np.arange(12) % 2,
    }
    arrays = {name: values for name, values in {**arrays, **changes}.items() if values is not None}
    np.savez(folder / "mine.npz", **arrays)
    (folder / "own.toml").write_text(OWN.format(model=model, modes=modes))
    sets = [part for setting in settings for part in ("--set", setting)]
    code, out, errors = run(
        "run", "own.toml", *sets, "--out", f"run{len(list(folder.iterdir()))}", cwd=folder
    )
    return code, " ".join(out.split()), " ".join(errors.split())


def test_nan_is_found_in_its_row_of_the_file(tmp_path: Path) -> None:
    x = np.zeros((12, 2), np.float32)
    x[7, 1] = np.nan  # client 1's third row: another one where rows lie client by client
    for settings in ((), ("data.validation=0.5",)):
        code, _, errors = own(tmp_path, *settings, x=x)
        assert (
            code == 2 and "Inputs of mine.npz contain nan or infinity (first in row 7)" in errors
        ), errors
    code, _, errors = own(tmp_path, x_test=x)
    assert (
        code == 2
        and "Inputs of the test data of mine.npz contain nan or infinity (first in row 7)" in errors
    )


def test_labels_that_leave_numbers_out(tmp_path: Path) -> None:
    code, out, errors = own(tmp_path)
    assert (
        code == 0
        and "Labels" not in out
        and "Partition" not in out
        and "modes are trained" not in out
    ), errors
    code, out, errors = own(tmp_path, y=np.array([7] + [0, 1] * 5 + [0]))
    assert (
        code == 0
        and "Labels go up to 7, but only 3 different ones occur (the first that is missing is 2)"
        in out
    )
    code, out, errors = own(tmp_path, y_test=np.array([0, 1, 2] * 4))
    assert (
        code == 0 and "4 of 12 test examples have a label that never occurs in training (2)" in out
    ), errors
    code, out, errors = own(tmp_path, y_test=np.arange(12) % 2 + 5)
    assert code == 2 and "No label of the test data (5, 6) occurs in training (0, 1)" in errors


def test_clients_that_are_left_out_are_told(tmp_path: Path) -> None:
    code, out, errors = own(tmp_path, "data.clients=2")
    assert code == 0, errors
    assert "Partition 'natural' takes 2 of 3 clients, with 8 of 12 examples" in out
    code, _, errors = own(tmp_path, client=None)
    assert code == 2 and "an array named client" in errors


def test_more_modes_than_clients_a_round(tmp_path: Path) -> None:
    code, out, errors = own(tmp_path, modes=4)
    assert code == 0, errors
    assert (
        "With 4 modes and 2 clients per round, at most 2 of the modes are trained in a round" in out
    )


def test_server_inputs_that_nobody_uses(tmp_path: Path) -> None:
    code, out, errors = own(tmp_path, "data.server_share=0.25")
    assert code == 0 and "fedavg does not use the 3 inputs of the server." in out, errors
    code, out, errors = own(tmp_path, "data.server_share=0.25", "algorithm.name=fedbe")
    assert code == 0 and "inputs of the server" not in out, errors


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"y": np.arange(12).reshape(12, 1) % 2}, "y.reshape(-1)"),
        ({"y": np.arange(12) % 2.0}, "y.astype(int)"),
        ({"y": np.eye(2)[np.arange(12) % 2]}, "y.argmax(-1)"),
        ({"y": np.eye(2, dtype=int)[np.arange(12) % 2]}, "y.argmax(-1)"),
        ({"y": np.linspace(0, 1, 12)}, 'training.loss = "mse"'),
    ],
)
def test_targets_that_are_no_labels(
    tmp_path: Path, changes: dict[str, object], advice: str
) -> None:
    code, _, errors = own(tmp_path, **changes, x_test=None, y_test=None)
    assert code == 2 and advice in errors, errors


def test_a_model_of_tokens_on_numbers(tmp_path: Path) -> None:
    code, _, errors = own(tmp_path, model="lstm")
    assert code == 2 and "it embeds tokens" in errors and "indices" not in errors
