"""The user's own images: a folder with one subfolder per class."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np

from ...arguments import require_bool, require_one_of
from ...errors import DataError
from ..dataset import Dataset, datasets
from ..folders.file_clients import clients_by_pattern, clients_of_files, split_clients
from ..folders.find_files import find_labelled_files, note_ignored
from ..folders.image_files import (
    SUFFIXES,
    Color,
    Fit,
    check_size,
    pixel_moments,
    read_images,
)
from ..labels.label_names import check_class_names
from ..splits.holdout import SEED, draw_holdout_mask, share_of_tests
from .user_file import find_path


@datasets.register("images")
def images(
    *,
    path: Path | str,
    client: str | None = None,
    client_file: Path | str | None = None,
    root: Path | None = None,
    size: list[int] | None = None,
    fit: Fit = "stretch",
    color: Color = "auto",
    class_names: list[str] | None = None,
    test_path: Path | str | None = None,
    test_share: float | None = None,
    scale: bool = True,
) -> Dataset:
    """A folder of images with one subfolder per class: uint8 [n, channels, height, width].

    Args:
        path: the folder. If it does not exist, it is looked for in the data folder.
        client: pattern of the file names that has the client, such as "{client}_*" for ann_01.png;
            with slashes of the path below the folder, such as "*/{client}/*". For partition
            natural.
        client_file: a .csv or .parquet file with the columns file (path below the folder) and
            client, in place of a pattern.
        root: data folder.
        size: [height, width] to which all images are resized, or [side] for squares; by default
            they must have one size.
        fit: how images of another shape are resized: stretch, crop the longer side, or pad the
            shorter one with black.
        color: auto (three channels if any image has color), gray or rgb.
        class_names: the subfolders in the order of the classes' numbers; by default sorted.
        test_path: a folder of test images with the same subfolders.
        test_share: share of the images that is drawn as test set, of every class; by default 0.2,
            and 0 with test_path.
        scale: whether channels are standardised by mean and standard deviation of the training
            images; otherwise values are divided by 255.
    """
    owner = "dataset 'images'"
    require_one_of(owner, "fit", fit, get_args(Fit))
    require_one_of(owner, "color", color, get_args(Color))
    require_bool(owner, "scale", scale)
    sides = check_size(size)
    share = share_of_tests(owner, test_share, {"test_path": test_path})
    names = None if class_names is None else check_class_names(class_names)

    folder = find_path("images", path, root, folder=True)
    found = find_labelled_files(folder, SUFFIXES, "images").ordered(names)
    files, label = found.paths, found.label
    clients = clients_of_files(found.names, folder, client, client_file)
    notes = note_ignored(found.ignored, "images")
    is_test = np.zeros(len(files), bool)
    if test_path is not None:
        other = find_path("images", test_path, root, folder=True)
        test = find_labelled_files(other, SUFFIXES, "images").as_test(found.classes)
        files, label = files + test.paths, np.concatenate([label, test.label])
        is_test = np.arange(len(files)) >= len(found.names)
        if clients is not None and client is not None:
            clients += clients_by_pattern(test.names, client, test.folder)
        notes += note_ignored(test.ignored, "images")
    elif share:
        is_test = draw_holdout_mask(label, share, SEED)
    if is_test.all():
        raise DataError(f"All images of {folder} are test images; training needs some.")
    pixels = read_images(files, sides, fit, color)
    x = pixels[~is_test]
    tested = bool(is_test.any())
    group, test_group, client_names = split_clients(clients, is_test)
    return Dataset(
        x,
        label[~is_test],
        pixels[is_test] if tested else None,
        label[is_test] if tested else None,
        class_names=found.classes,
        standardise=pixel_moments(x) if scale else None,
        group=group,
        group_names=client_names,
        test_group=test_group if tested else None,
        info={"source": "images", "files": [str(folder)], "images": len(files)},
        notes=tuple(notes),
    )
