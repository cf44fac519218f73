"""OpenImage with the clients of FedScale (Lai et al., 2022).

A CSV table has the client, the image file and the label of each example. The images are in folders.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_integer
from ...errors import DataError
from ..dataset import Dataset, bad_file_error, datasets, find_file
from ..normalize import Standardise

FOLDERS = ("openimage", "openImg", "openImage", "open_images")
COLUMNS = ("client_id", "sample_path", "label_id")
# The usual statistics per channel of natural images (ImageNet), for values 0..255.
STANDARDISE = Standardise(mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
HOW_TO_GET = (
    "Get it by hand from https://fedscale.ai (benchmark/dataset/download.sh of FedScale) and "
    "unpack it there, or set FEDENSEMBLE_DATA to the folder that has it."
)


class Row(NamedTuple):
    """One line of the table: the client, the image file and the class."""

    client: str
    image: str
    label: int


@datasets.register("openimage")
def openimage(
    *,
    root: Path | None = None,
    size: int = 64,
    limit_clients: int | None = None,
    limit_test: int | None = None,
    min_examples: int = 1,
) -> Dataset:
    """OpenImage: images resized to uint8 [n, 3, size, size], with the natural clients of FedScale.

    Args:
        root: data folder. Its subfolder openimage has client_data_mapping/train.csv and test.csv or
            val.csv, and the images in folders of those names.
        size: side of the images, in pixels. All images are kept in memory, 3 size^2 bytes each.
        limit_clients: take only the first `limit_clients` clients of the table; None for all.
        limit_test: take only `limit_test` test images, spread evenly over the table; None for all.
        min_examples: clients with fewer images are dropped.
    """
    owner = "dataset 'openimage'"
    size, min_examples = (
        require_integer(owner, "size", size, minimum=1),
        require_integer(owner, "min_examples", min_examples, minimum=1),
    )
    limit_clients = (
        None
        if limit_clients is None
        else require_integer(owner, "limit_clients", limit_clients, minimum=1)
    )
    limit_test = (
        None if limit_test is None else require_integer(owner, "limit_test", limit_test, minimum=1)
    )
    train_table, test_table = find_table(root, ("train",)), find_table(root, ("test", "val"))
    all_train, test = read_table(train_table), read_table(test_table)
    # Count the classes before clients are dropped, so that the output layer of a model does not
    # depend on which clients are taken.
    classes = 1 + max(row.label for row in (*all_train, *test))
    counts = Counter(row.client for row in all_train)  # in order of first appearance
    names = [name for name, count in counts.items() if count >= min_examples][:limit_clients]
    if not names:
        raise DataError(
            f"No client in {train_table} has {min_examples} images; lower min_examples."
        )
    client_index = {name: index for index, name in enumerate(names)}
    train = [row for row in all_train if row.client in client_index]
    if limit_test is not None and limit_test < len(test):
        test = [test[index] for index in np.linspace(0, len(test) - 1, limit_test).astype(int)]
    files, dropped = [str(train_table), str(test_table)], len(counts) - len(names)
    return Dataset(
        read_images(train, train_table, size),
        np.array([row.label for row in train], np.int64),
        read_images(test, test_table, size),
        np.array([row.label for row in test], np.int64),
        classes=classes,
        standardise=STANDARDISE,
        group=np.array([client_index[row.client] for row in train], np.int64),
        group_names=tuple(names),
        # In FedScale's tables most test images are of clients without training images.
        test_group=np.array([client_index.get(row.client, -1) for row in test], np.int64),
        info={"source": "openimage", "files": files, "dropped_clients": dropped},
    )


def find_table(root: Path | None, parts: tuple[str, ...]) -> Path:
    """Returns the path of the table of the first of `parts` that exists."""
    places = [f"{folder}/client_data_mapping/{part}.csv" for folder in FOLDERS for part in parts]
    return find_file("openimage", root, places, HOW_TO_GET)


def read_table(path: Path) -> list[Row]:
    """Returns the rows of a table, in order."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(parse_table(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise bad_file_error(path, f"it cannot be read as a table ({error})") from None
    if not rows:
        raise bad_file_error(path, "expected at least one line below the heading, got none")
    return rows


def parse_table(path: Path, reader: "csv.DictReader[str]") -> Iterator[Row]:
    """Yields the rows of a table; raises for a missing column or an invalid label."""
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        got = ", ".join(reader.fieldnames or ()) or "an empty file"
        raise bad_file_error(path, f"expected the columns {', '.join(COLUMNS)}, got {got}")
    for line in reader:
        label = line["label_id"]
        if (
            not label
            or not label.strip().isdecimal()
            or not line["client_id"]
            or not line["sample_path"]
        ):
            raise bad_file_error(
                path,
                f"expected a client, an image and a class number in line {reader.line_num}, "
                f"got {line}",
            )
        yield Row(line["client_id"], line["sample_path"], int(label))


def read_images(rows: list[Row], table: Path, size: int) -> NDArray[np.uint8]:
    """Returns the images of the rows, [n, 3, size, size]."""
    try:
        from PIL import Image
    except ImportError:
        raise DataError(
            "Dataset 'openimage' reads images by Pillow: run `pip install fedensemble[images]`."
        ) from None
    pixels = np.empty((len(rows), 3, size, size), np.uint8)
    base = table.parent.parent
    folders = [base / table.stem, base / {"val": "validation"}.get(table.stem, table.stem), base]
    for index, row in enumerate(rows):
        pixels[index] = read_image(Image, find_image(folders, row.image), size)
    return pixels


def find_image(folders: list[Path], name: str) -> Path:
    """Returns the path of the image in the first folder that has it."""
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    searched = ", ".join(str(folder / name) for folder in dict.fromkeys(folders))
    raise DataError(
        f"Dataset 'openimage' needs the image {name}, which is missing. Looked for {searched}. "
        f"{HOW_TO_GET}"
    )


def read_image(pillow: Any, path: Path, size: int) -> NDArray[np.uint8]:
    """Returns the resized pixels of an image file, [3, size, size]."""
    try:
        with pillow.open(path) as image:
            resized = image.convert("RGB").resize((size, size), pillow.Resampling.BILINEAR)
            return np.asarray(resized, np.uint8).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise bad_file_error(path, f"it cannot be read as an image ({error})") from None
