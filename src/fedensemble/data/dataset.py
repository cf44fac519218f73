"""What a dataset is before it is divided among clients, the table of datasets, and where their
files are found.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..arguments import check_names, whole
from ..errors import DataError, InputError
from ..registry import Registry
from .checks import check_examples
from .convert import as_targets, as_tensor
from .label_checks import advise_labels
from .normalize import Standardise

Array = Tensor | NDArray[Any]
Rows = NDArray[np.int64]

# Each takes keyword options, all of which have defaults where there is a sensible one, and gives
# back a Source.
sources: Registry[Callable[..., "Source"]] = Registry("dataset")


@dataclass(frozen=True, eq=False)
class Source:
    """A dataset before it is divided among clients.

    Args:
        x: training inputs, [n, ...].
        y: training targets, [n, ...].
        x_test, y_test: held-out examples, or None.
        x_server: inputs for the server, without targets, or None.
        classes: number of classes (or tokens); None for regression, or to count the labels.
        standardise: applied to inputs when a batch is drawn, or None.
        group: number of the natural client of each training row, [n], or None where there are none.
        group_names: names of the natural clients, where they have any.
        info: facts for the run's record: `source` (the name), `files`, counts of what was left out.
    """

    x: Array
    y: Array
    x_test: Array | None = None
    y_test: Array | None = None
    classes: int | None = None
    standardise: Standardise | None = None
    group: Rows | None = None
    group_names: tuple[str, ...] | None = None
    info: dict[str, Any] = field(default_factory=dict)
    x_server: Array | None = None

    def __post_init__(self) -> None:
        for what in ("x", "y"):
            if not len(getattr(getattr(self, what), "shape", ())):
                raise DataError(
                    f"{self.name} needs an array or a tensor with one row per example for {what}; "
                    f"got {type(getattr(self, what)).__name__}."
                )
        if len(self.x) != len(self.y):
            raise DataError(
                f"{self.name} has {len(self.x)} inputs but {len(self.y)} targets; they must agree."
            )
        if len(self.x) == 0:
            raise DataError(f"{self.name} has no training examples.")
        if self.group is not None and self.group.shape != (len(self.x),):
            raise DataError(
                f"{self.name} has {len(self.x)} examples, but its client numbers have shape {self.group.shape}; "
                "give one a training row."
            )
        # Here, where rows still have the numbers they have in the file.
        check_examples(as_tensor(self.x), as_targets(self.y), self.place)
        if self.x_test is not None and self.y_test is not None:
            check_examples(
                as_tensor(self.x_test), as_targets(self.y_test), f"the test data of {self.place}"
            )

    def __len__(self) -> int:
        """Number of training examples, n."""
        return len(self.x)

    @property
    def name(self) -> str:
        """The name for messages, such as "Dataset 'mnist'"."""
        return f"Dataset '{self.info['source']}'" if "source" in self.info else "The dataset"

    @property
    def place(self) -> str:
        """Where the rows are, for messages: the only file, or the name."""
        files = self.info.get("files", ())
        return str(files[0]) if len(files) == 1 else self.name[0].lower() + self.name[1:]

    def labels(self) -> Rows:
        """The class of each training row, [n]; raises where an example has no single class."""
        y = as_tensor(self.y)
        if y.is_floating_point() or y.dim() != 1:
            got = f"{str(y.dtype).removeprefix('torch.')} targets of shape {tuple(y.shape)}"
            advice = advise_labels(y) or (
                "Use the partition iid, quantity, contiguous or, where it has natural clients, natural."
            )
            raise InputError(
                f"{self.name} has no class label for each example (it has {got}), so it cannot be divided by label. "
                f"{advice}"
            )
        return y.long().cpu().numpy()


def load(name: str, **options: Any) -> Source:
    """The dataset of this name; raises for unknown options.

    >>> load("gaussians", n=60, classes=3).classes
    3
    """
    function = sources[name]
    check_names(f"dataset '{name}'", function, options)
    return function(**options)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A random generator for one purpose: the same for the same seed and purpose, on every
    machine.
    """
    # crc32, not hash(): Python salts the hash of strings in every process.
    return np.random.default_rng([whole(purpose, "seed", seed), zlib.crc32(purpose.encode())])


def data_folder(root: Path | str | None = None) -> Path:
    """The folder datasets are kept in: `root`, else $FEDENSEMBLE_DATA, else the user's cache
    folder.
    """
    chosen = root or os.environ.get("FEDENSEMBLE_DATA")
    if not chosen:
        import pooch

        chosen = pooch.os_cache("fedensemble")
    return Path(chosen).expanduser()


def find_file(dataset: str, root: Path | str | None, places: Sequence[str], how: str = "") -> Path:
    """The first of `places` (relative to the data folder) that exists; raises an error that lists
    them all.

    Args:
        how: the sentence that says how to get the file; by default, by `fedensemble data get`.
    """
    folder = data_folder(root)
    for place in places:
        if (folder / place).is_file():
            return folder / place
    looked = ", ".join(str(folder / place) for place in places)
    how = (
        how
        or f"Get it by `fedensemble data get {dataset}`, or set FEDENSEMBLE_DATA to the folder that has it."
    )
    raise DataError(
        f"Dataset '{dataset}' needs the file {Path(places[0]).name}, which is missing. Looked for {looked}. {how}"
    )


def read_bytes(path: Path) -> bytes:
    """What the file holds, unpacked if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise bad_file(path, f"it cannot be read ({error})") from None


def bad_file(path: Path, problem: str) -> DataError:
    """The error for a file that is there but cannot be used."""
    return DataError(
        f"The file {path} is damaged or of another kind: {problem}. Delete it and get it again."
    )
