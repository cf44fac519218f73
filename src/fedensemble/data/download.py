"""Downloads of public datasets into the data folder: checked by their hashes, and all or
nothing.
"""

import logging
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataError
from .dataset import data_folder, sources

CONNECT_SECONDS = 30.0  # without an answer for so long, a download has failed


@dataclass(frozen=True)
class Remote:
    """One file to download.

    Args:
        url: where it is.
        known_hash: "md5:..." or "sha256:...".
        folder: the folder below the data folder it, or what is in it, belongs to.
        members: for an archive, the files it must have in `folder`, and their sizes in bytes; empty
            for a plain file.
    """

    url: str
    known_hash: str
    folder: str
    members: Mapping[str, int] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self.url.rsplit("/", 1)[-1]


def mnist_file(name: str, md5: str) -> Remote:
    """One of the four files of MNIST, from the mirror that torchvision uses."""
    return Remote(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}.gz", f"md5:{md5}", "mnist")


CIFAR10_FILES = [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]

REMOTES: dict[str, tuple[Remote, ...]] = {
    "mnist": (
        mnist_file("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        mnist_file("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
        mnist_file("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
        mnist_file("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
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

BY_HAND = {
    "openimage": "It is too large to download here. Get it from https://fedscale.ai (benchmark/dataset/download.sh of "
    "FedScale) and unpack it to {folder}/openimage: client_data_mapping/train.csv and test.csv, train/ and test/.",
    "npz": "It is a file of your own: write one by numpy.savez with arrays x and y, and give its path.",
}


def get(
    name: str, root: Path | str | None = None, progress: Callable[[str], None] | None = None
) -> list[Path]:
    """The dataset's files, downloaded if they are not there yet; empty for datasets that need none.

    Args:
        root: data folder; by default $FEDENSEMBLE_DATA or the user's cache folder.
        progress: called with one line before each download.
    """
    folder = data_folder(root)
    if name in BY_HAND:
        raise DataError(
            f"Dataset '{name}' cannot be downloaded. {BY_HAND[name].format(folder=folder)}"
        )
    if name not in REMOTES:
        sources[name]  # raises for unknown names
        return []
    paths: list[Path] = []
    for remote in REMOTES[name]:
        try:
            if remote.members:
                paths += get_archive(remote, folder, progress)
            else:
                paths.append(fetch(remote, folder / remote.folder, progress))
        # requests' errors are OSErrors, pooch's ValueErrors
        except (OSError, ValueError, tarfile.TarError) as error:
            if getattr(error, "response", None) is not None:
                error.response.close()  # type: ignore[union-attr]  # pooch leaves the connection of a refusal open
            what = "unpack it there" if remote.members else "put it there"
            place = folder if remote.members else folder / remote.folder
            raise DataError(
                f"Could not get {remote.url} for dataset '{name}': {first_line(error)} "
                f"Try again, or download it by hand and {what}: {place}."
            ) from None
    return paths


def get_archive(remote: Remote, folder: Path, progress: Callable[[str], None] | None) -> list[Path]:
    """The archive's files in their folder, which appears complete or not at all."""
    target = folder / remote.folder
    if not is_complete(remote, target):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".unpack-") as scratch:
            archive = fetch(remote, Path(scratch), progress)
            with tarfile.open(archive) as tar:
                # refuses paths and links that lead outside
                tar.extractall(Path(scratch) / "new", filter="data")
            unpacked = Path(scratch) / "new" / remote.folder
            if not is_complete(remote, unpacked):
                raise ValueError(
                    f"the archive has not all of {', '.join(remote.members)} in {remote.folder}"
                )
            if target.exists():  # left by someone else, and incomplete
                os.replace(target, Path(scratch) / "old")
            os.replace(unpacked, target)
    return [target / name for name in remote.members]


def is_complete(remote: Remote, target: Path) -> bool:
    """Whether all the archive's files are in `target` and have their sizes."""
    files = {target / name: size for name, size in remote.members.items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def fetch(remote: Remote, folder: Path, progress: Callable[[str], None] | None) -> Path:
    """The file in `folder`, written under another name until its hash is checked; kept if one there
    has it already.
    """
    import pooch

    path = folder / remote.file_name
    if progress is not None and not path.exists():
        progress(f"downloading {remote.url} to {path}")
    downloader = pooch.HTTPDownloader(timeout=CONNECT_SECONDS)
    with quiet(pooch.get_logger()):
        pooch.retrieve(
            remote.url,
            remote.known_hash,
            fname=remote.file_name,
            path=folder,
            downloader=downloader,
        )
    return path


@contextmanager
def quiet(logger: logging.Logger) -> Iterator[None]:
    """Keeps a logger from anything below a warning for a while; what is to be said, `progress`
    says.
    """
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def first_line(error: Exception) -> str:
    """The error's message in one line, with a full stop."""
    return " ".join(str(error).split()).rstrip(".") + "."
