"""Downloads public datasets into the data folder.

Files are verified by their hashes. They appear in the data folder complete or not at all.
"""

import logging
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import DataError
from ..dataset import data_folder, datasets

CONNECT_SECONDS = 30.0  # a download fails after this time without a response


@dataclass(frozen=True)
class Remote:
    """One file to download.

    Args:
        url: address of the file.
        known_hash: "md5:..." or "sha256:...".
        folder: subfolder of the data folder for the file, or for the content of an archive.
        members: for an archive, the names of the files that it must contain in `folder`, and their
            sizes in bytes; empty for a plain file.
    """

    url: str
    known_hash: str
    folder: str
    members: Mapping[str, int] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The last part of the URL."""
        return self.url.rsplit("/", 1)[-1]


def mnist_remote(name: str, md5: str) -> Remote:
    """Returns the download of one of the four MNIST files, from the mirror of torchvision."""
    return Remote(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", f"md5:{md5}", "mnist")


def fashion_remote(name: str, md5: str) -> Remote:
    """Returns the download of one of the four Fashion-MNIST files, from the authors' repository."""
    address = "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion"
    return Remote(f"{address}/{name}.gz", f"md5:{md5}", "fashion-mnist")


CIFAR10_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]

REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": (
        mnist_remote("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        mnist_remote("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
        mnist_remote("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
        mnist_remote("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
    ),
    "fashion-mnist": (
        fashion_remote("train-images-idx3-ubyte", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        fashion_remote("train-labels-idx1-ubyte", "25c81989df183df01b3e8a0aad5dffbe"),
        fashion_remote("t10k-images-idx3-ubyte", "bef4ecab320f06d8554ea6380940ec79"),
        fashion_remote("t10k-labels-idx1-ubyte", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar10": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            "cifar-10-batches-bin",
            dict.fromkeys(CIFAR10_FILES, 10_000 * 3_073),
        ),
    ),
    "cifar100": (
        Remote(
            "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            "cifar-100-binary",
            {"train.bin": 50_000 * 3_074, "test.bin": 10_000 * 3_074},
        ),
    ),
    "shakespeare": (
        Remote(
            "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
            "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            "shakespeare",
        ),
    ),
}

MANUAL_INSTRUCTIONS = {
    "openimage": "It is too large to download here. Get it from https://fedscale.ai "
    "(benchmark/dataset/download.sh of FedScale) and unpack it to {folder}/openimage: "
    "client_data_mapping/train.csv and test.csv, train/ and test/.",
    "table": "It is a .csv or .parquet file of your own: give its path.",
    "images": "It is a folder of your own, with one subfolder per class: give its path.",
    "text": "It is a text file, a table or a folder of your own: give its path.",
    "npz": "It is a file of your own: write one by numpy.savez with arrays x and y, and give its "
    "path.",
}


def get(
    name: str,
    root: Path | str | None = None,
    progress: Callable[[str], None] | None = None,
    bar: Any = None,
) -> list[Path]:
    """Returns the files of a dataset, after downloading those that are missing.

    The list is empty for datasets that need no files.

    Args:
        root: data folder; by default $FEDENSEMBLE_DATA or the user's cache folder.
        progress: called with one line of text before each download.
        bar: shows the progress of a download, with the attribute `total` and the methods `update`,
            `reset` and `close` of tqdm.
    """
    folder = data_folder(root)
    if name in MANUAL_INSTRUCTIONS:
        instructions = MANUAL_INSTRUCTIONS[name].format(folder=folder)
        raise DataError(f"Dataset '{name}' cannot be downloaded. {instructions}")
    if name not in REMOTES:
        datasets[name]  # raises for an unknown name
        return []
    paths: list[Path] = []
    for remote in REMOTES[name]:
        try:
            if remote.members:
                paths += get_archive(remote, folder, progress, bar)
            else:
                paths.append(fetch(remote, folder / remote.folder, progress, bar))
        # The errors of requests are OSErrors, those of pooch are ValueErrors.
        except (OSError, ValueError, tarfile.TarError) as error:
            if getattr(error, "response", None) is not None:
                # After an HTTP error, pooch leaves the connection open.
                error.response.close()  # type: ignore[union-attr]
            action = "unpack it there" if remote.members else "put it there"
            place = folder if remote.members else folder / remote.folder
            raise DataError(
                f"Could not get {remote.url} for dataset '{name}': {format_error(error)} "
                f"Try again, or download it by hand and {action}: {place}."
            ) from None
    return paths


def get_archive(
    remote: Remote, folder: Path, progress: Callable[[str], None] | None, bar: Any = None
) -> list[Path]:
    """Returns the unpacked files of an archive, after downloading it if files are missing."""
    target = folder / remote.folder
    if not is_complete(remote, target):
        folder.mkdir(parents=True, exist_ok=True)
        # Unpack to a scratch folder on the same file system, then rename. A rename is atomic, so an
        # interrupted download never leaves an incomplete folder.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
            archive = fetch(remote, Path(scratch), progress, bar)
            with tarfile.open(archive) as tar:
                # filter="data" rejects paths and links that lead out of the folder.
                tar.extractall(Path(scratch) / "new", filter="data")
            unpacked = Path(scratch) / "new" / remote.folder
            if not is_complete(remote, unpacked):
                raise ValueError(
                    f"the archive does not contain all of {', '.join(remote.members)} in "
                    f"{remote.folder}"
                )
            if target.exists():  # incomplete, from another program
                os.replace(target, Path(scratch) / "old")
            os.replace(unpacked, target)
    return [target / name for name in remote.members]


def is_complete(remote: Remote, target: Path) -> bool:
    """Returns whether `target` has all files of the archive with the expected sizes."""
    files = {target / name: size for name, size in remote.members.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def fetch(
    remote: Remote, folder: Path, progress: Callable[[str], None] | None, bar: Any = None
) -> Path:
    """Returns the path of the file in `folder`, after downloading it if it is missing.

    A file with the right hash is kept. A download has a temporary name until its hash is verified.
    """
    import pooch

    path = folder / remote.file_name
    if progress is not None and not path.exists():
        progress(f"downloading {remote.url} to {path}")
    downloader = pooch.HTTPDownloader(progressbar=bar or False, timeout=CONNECT_SECONDS)
    with suppress_info_logs(pooch.get_logger()):
        pooch.retrieve(
            remote.url,
            remote.known_hash,
            fname=remote.file_name,
            path=folder,
            downloader=downloader,
        )
    return path


@contextmanager
def suppress_info_logs(logger: logging.Logger) -> Iterator[None]:
    """Suppresses log records below warnings inside the `with` block; `progress` reports instead."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def format_error(error: Exception) -> str:
    """Returns the message of an error on one line, with a full stop."""
    return " ".join(str(error).split()).rstrip(".") + "."
