"""Arrays in .npz files: damaged, forged or odd ones are refused, and what is taken can be trained
on.
"""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fedensemble as fe
from fedensemble.cli.inputs import read_inputs
from fedensemble.data import load, partition

from .budget import attempt, examples, generators, mutated

HEADER_WORDS = (
    b"(999999999999,)",
    b"(-1,)",
    b"'|O'",
    b"'<f8'",
    b"'<U9'",
    b"True",
    b"((",
    b"{",
    b"PK\x01\x02",
    b"\xff" * 4,
)


@pytest.fixture(scope="module")
def ensemble() -> fe.Ensemble:
    data = fe.FederatedData.from_clients([(np.ones((4, 3), np.float32), [0, 1, 0, 1])] * 2)
    return fe.Federation(lambda: nn.Linear(3, 2), data, modes=2).ensemble


def archive(method: int, **arrays: np.ndarray) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as made:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.save(content, array)
            made.writestr(f"{name}.npy", content.getvalue())
    return packed.getvalue()


def use(file: Path, ensemble: fe.Ensemble) -> None:
    """The file as training data and as inputs to predict."""
    attempt(lambda: partition(load("npz", path=file), "iid", 2), case=file)
    prediction = attempt(lambda: ensemble.predict(read_inputs(file)), case=file)
    assert prediction is None or bool(prediction.mean.isfinite().all())


@pytest.mark.parametrize(
    "method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]
)
@pytest.mark.filterwarnings("ignore")
def test_damaged_archives(tmp_path: Path, ensemble: fe.Ensemble, method: int) -> None:
    x, y = np.ones((6, 3), np.float32), np.arange(6) % 2
    content = archive(method, x=x, y=y, x_test=x, y_test=y, client=np.array(["a", "b"] * 3))
    for random in generators(method, 150):
        file = tmp_path / "f.npz"
        file.write_bytes(mutated(content, random, HEADER_WORDS))
        use(file, ensemble)


DTYPES = st.sampled_from(
    ["f2", "f4", ">f8", "f8", "i1", "u1", "i8", ">i4", "u8", "?", "c8", "U3", "S2", "M8[s]", "V3"]
)
VALUES = st.sampled_from([0, 1, -1, 0.5, 2.0**62, 2.0**64, 1e38, 1e39, 1e300, np.inf, np.nan])


@given(
    st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=4), VALUES),
    st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=2), VALUES),
    st.tuples(DTYPES, st.lists(st.integers(0, 4), max_size=2), VALUES),
)
@examples(200)
@pytest.mark.filterwarnings("ignore")
def test_odd_arrays(
    ensemble: fe.Ensemble, tmp_path_factory: pytest.TempPathFactory, x, y, y_test
) -> None:
    made = []
    for dtype, shape, value in (x, y, y_test):
        with np.errstate(all="ignore"):
            array = np.zeros(shape, dtype)
            if array.size and array.dtype.kind in "fciu":
                array.flat[-1] = np.asarray(value).astype(dtype)
        made.append(array)
    file = tmp_path_factory.getbasetemp() / "odd.npz"
    np.savez(file, x=made[0], y=made[1], x_test=made[0], y_test=made[2])
    use(file, ensemble)
    data = attempt(lambda: partition(load("npz", path=file), "iid", 1), case=(x, y, y_test))
    if data is not None and data.y.dim() == 1 and (data.classes or 0) < 10:
        attempt(lambda: judged(data), case=(x, y, y_test))


def judged(data: fe.FederatedData) -> None:
    """A round and a test: numbers that come of it are finite."""
    size = data.x[0].numel()
    federation = fe.Federation(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(size, 10)), data, modes=1
    )
    assert np.isfinite(next(federation.rounds(1)).loss)
    metrics = fe.evaluate(federation.ensemble.predict(data.x_test), data.y_test)
    assert all(np.isfinite(value) for value in metrics.values())


@given(st.binary(max_size=300), st.integers(1, 3), st.integers(0, 255))
@examples(150)
@pytest.mark.filterwarnings("ignore")
def test_headers_of_any_bytes(
    ensemble: fe.Ensemble, tmp_path_factory, header: bytes, version: int, minor: int
) -> None:
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    file = tmp_path_factory.getbasetemp() / "header.npz"
    with zipfile.ZipFile(file, "w") as made:
        made.writestr(
            "x.npy", b"\x93NUMPY" + bytes([version, minor % 2]) + length + header + bytes(72)
        )
    use(file, ensemble)


def test_the_cases_are_not_all_refused(tmp_path: Path, ensemble: fe.Ensemble) -> None:
    file = tmp_path / "f.npz"
    file.write_bytes(archive(zipfile.ZIP_LZMA, x=np.ones((6, 3), np.float32), y=np.arange(6) % 2))
    assert len(partition(load("npz", path=file), "iid", 2)) == 2
    assert ensemble.predict(read_inputs(file)).mean.dtype == torch.float32
