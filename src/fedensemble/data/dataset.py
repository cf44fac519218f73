"""A dataset before it is divided among clients, the registry of datasets, and access to files."""

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

from ..arguments import check_names, require_integer
from ..errors import DataError, InputError
from ..registry import Registry
from .checks import check_examples
from .convert import as_targets, as_tensor
from .data_frame import column_names, from_frame, is_frame
from .labels.label_checks import advise_labels
from .labels.label_names import encode_labels
from .normalize import Standardise
from .recipe import Recipe, with_recipe

Array = Tensor | NDArray[Any]
Rows = NDArray[np.int64]

# Maps the name of a dataset to a function that takes keyword options and returns a Dataset.
datasets: Registry[Callable[..., "Dataset"]] = Registry("dataset")


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset before it is divided among clients.

    Args:
        x: training inputs, [n, ...].
        y: training targets, [n, ...]; labels that are text, categories or booleans are numbered.
        x_test, y_test: held-out examples, or None.
        x_server: unlabelled inputs for the server, or None.
        classes: number of classes (or tokens); None for regression, or to count the labels.
        standardise: normalization that is applied to the inputs of each batch, or None.
        group: index of the natural client of each training row, [n], or None without natural
            clients.
        group_names: names of the natural clients, or None.
        test_group: index of the natural client of each test row, [n_test], -1 for rows of no
            client; None if it is not known.
        class_names: name of each class; by default the labels, if they are text or categories.
        feature_names: name of each column of the inputs; by default those of a DataFrame.
        info: facts for the record of a run: `source` (the name), `files`, counts of dropped rows,
            `categories` (of columns that hold the number of a category).
        recipe: the settings of a config that load the same dataset; None unless `load` made it.
        notes: sentences for the user, such as on rows that were dropped.
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
    class_names: tuple[str, ...] | None = None
    feature_names: tuple[str, ...] | None = None
    recipe: Recipe | None = None
    test_group: Rows | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._convert_names()
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
                f"{self.name} has {len(self.x)} examples, but its client numbers have shape "
                f"{self.group.shape}; give one per training row."
            )
        tests = None if self.x_test is None else len(self.x_test)
        if self.test_group is not None and self.test_group.shape != (tests,):
            raise DataError(
                f"{self.name} has {tests or 0} test rows, but their client numbers have shape "
                f"{self.test_group.shape}; give one per test row."
            )
        # Check the values here, before rows are dropped or reordered, so that row numbers in
        # messages are those of the file.
        check_examples(as_tensor(self.x), as_targets(self.y), self.place)
        if self.x_test is not None and self.y_test is not None:
            check_examples(
                as_tensor(self.x_test), as_targets(self.y_test), f"the test data of {self.place}"
            )

    def _convert_names(self) -> None:
        """Numbers labels that are names, and turns DataFrames into arrays."""
        test_place = f"the test data of {self.place}"
        (y,), y_test, class_names = encode_labels(
            [(self.place, self.y)],
            None if self.y_test is None else (test_place, self.y_test),
            self.class_names,
        )
        feature_names = self.feature_names
        if feature_names is None and is_frame(self.x):
            feature_names = column_names(self.x)
        converted = {
            "x": from_frame(self.x, feature_names, self.place),
            "y": y,
            "x_test": from_frame(self.x_test, feature_names, test_place),
            "y_test": y_test,
            "x_server": from_frame(self.x_server, feature_names, "the server's data"),
            "class_names": class_names,
            "feature_names": None if feature_names is None else tuple(feature_names),
        }
        if class_names is not None and self.classes is None:
            converted["classes"] = len(class_names)
        for name, value in converted.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def __len__(self) -> int:
        """Number of training examples, n."""
        return len(self.x)

    @property
    def name(self) -> str:
        """The name for messages, such as "Dataset 'mnist'"."""
        return f"Dataset '{self.info['source']}'" if "source" in self.info else "The dataset"

    @property
    def place(self) -> str:
        """The location of the rows for messages: the file if there is exactly one, or the name."""
        files = self.info.get("files", ())
        return str(files[0]) if len(files) == 1 else self.name[0].lower() + self.name[1:]

    def labels(self) -> Rows:
        """Returns the class of each training row, [n]; raises unless each row has one class."""
        y = as_tensor(self.y)
        if y.is_floating_point() or y.dim() != 1:
            got = f"{str(y.dtype).removeprefix('torch.')} targets of shape {tuple(y.shape)}"
            advice = advise_labels(y) or (
                "Use the partition iid, quantity, contiguous or, if there are natural clients, "
                "natural."
            )
            raise InputError(
                f"{self.name} has no class label for each example (it has {got}), so it cannot be "
                f"divided by label. {advice}"
            )
        return y.long().cpu().numpy()


def load(name: str, **options: Any) -> Dataset:
    """Returns the dataset of this name; raises for unknown options.

    >>> load("gaussians", n=60, classes=3).classes
    3
    """
    function = datasets[name]
    check_names(f"dataset '{name}'", function, options)
    return with_recipe(function(**options), {"source": name, **options})


def make_rng(seed: int, purpose: str) -> np.random.Generator:
    """Returns a random generator that depends on `seed` and `purpose` only, on every machine."""
    # crc32 instead of hash(), because Python salts the hash of strings in every process.
    return np.random.default_rng(
        [require_integer(purpose, "seed", seed), zlib.crc32(purpose.encode())]
    )


def data_folder(root: Path | str | None = None) -> Path:
    """Returns the data folder: `root`, else $FEDENSEMBLE_DATA, else the user's cache folder."""
    folder = root or os.environ.get("FEDENSEMBLE_DATA")
    if not folder:
        import pooch

        folder = pooch.os_cache("fedensemble")
    return Path(folder).expanduser()


def find_file(
    dataset: str, root: Path | str | None, places: Sequence[str], how_to_get: str = ""
) -> Path:
    """Returns the first of `places` that exists; raises an error that lists all of them.

    Args:
        places: paths relative to the data folder.
        how_to_get: a sentence on how to get the file; by default it names `fedensemble data get`.
    """
    folder = data_folder(root)
    for place in places:
        if (folder / place).is_file():
            return folder / place
    searched = ", ".join(str(folder / place) for place in places)
    how_to_get = how_to_get or (
        f"Get it by `fedensemble data get {dataset}`, or set FEDENSEMBLE_DATA to the folder that "
        "has it."
    )
    raise DataError(
        f"Dataset '{dataset}' needs the file {Path(places[0]).name}, which is missing. "
        f"Looked for {searched}. {how_to_get}"
    )


def read_bytes(path: Path) -> bytes:
    """Returns the content of a file, decompressed if its name ends in .gz."""
    try:
        return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise bad_file_error(path, f"it cannot be read ({error})") from None


def bad_file_error(path: Path, problem: str) -> DataError:
    """Returns the error for a dataset file that exists but cannot be used."""
    return DataError(
        f"The file {path} is damaged or of another kind: {problem}. Delete it and get it again."
    )
