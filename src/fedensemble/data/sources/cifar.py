"""CIFAR-10 and CIFAR-100 (Krizhevsky, 2009): 32x32 color images, official binary version."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...arguments import require_one_of
from ..dataset import Dataset, bad_file_error, datasets, find_file, read_bytes
from ..normalize import Standardise

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32


def scale_to_bytes(mean: tuple[float, ...], std: tuple[float, ...]) -> Standardise:
    """Returns the normalization of bytes 0..255, given channel statistics for values 0..1."""
    return Standardise(tuple(255 * value for value in mean), tuple(255 * value for value in std))


# Means and standard deviations per channel of the two training sets.
CIFAR10 = scale_to_bytes((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
CIFAR100 = scale_to_bytes((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))

# Names of the classes in the order of their numbers, from the files batches.meta.txt,
# fine_label_names.txt and coarse_label_names.txt of the archives.
_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_FINE = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle
    bowl boy bridge bus butterfly camel can castle caterpillar cattle
    chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur
    dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard
    lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain
    mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree
    plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider
    squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
_COARSE = """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables
    household_electrical_devices household_furniture insects large_carnivores
    large_man-made_outdoor_things large_natural_outdoor_scenes large_omnivores_and_herbivores
    medium_mammals non-insect_invertebrates people reptiles small_mammals trees vehicles_1
    vehicles_2
"""
CIFAR10_NAMES, FINE_NAMES, COARSE_NAMES = (
    tuple(names.split()) for names in (_CIFAR10, _FINE, _COARSE)
)


@datasets.register("cifar10")
def cifar10(*, root: Path | None = None) -> Dataset:
    """CIFAR-10: 50,000 training and 10,000 test images, uint8 [n, 3, 32, 32], labels 0..9.

    Args:
        root: data folder, with the files in its subfolder cifar-10-batches-bin.
    """
    names = [f"data_batch_{number}.bin" for number in range(1, 6)]
    paths = [
        find_file("cifar10", root, [f"cifar-10-batches-bin/{name}"])
        for name in [*names, "test_batch.bin"]
    ]
    batches = [read_records(path, label_bytes=1) for path in paths]
    for path, batch in zip(paths[1:5], batches[1:5], strict=True):
        # The size of a file that was cut off between two records is still a multiple of the size
        # of a record, so only a comparison with another file detects it.
        if len(batch) != len(batches[0]):
            raise bad_file_error(
                path, f"expected {len(batches[0])} images, as in {paths[0].name}, got {len(batch)}"
            )
    train, test = np.concatenate(batches[:5]), batches[5]
    for path, batch in zip(paths, batches, strict=True):
        check_labels(path, batch[:, 0], classes=10)
    x, x_test = extract_images(train, label_bytes=1), extract_images(test, label_bytes=1)
    y, y_test = train[:, 0].astype(np.int64), test[:, 0].astype(np.int64)
    info = {"source": "cifar10", "files": [str(path) for path in paths]}
    return Dataset(x, y, x_test, y_test, class_names=CIFAR10_NAMES, standardise=CIFAR10, info=info)


@datasets.register("cifar100")
def cifar100(*, root: Path | None = None, labels: str = "fine") -> Dataset:
    """CIFAR-100: 50,000 training and 10,000 test images, uint8 [n, 3, 32, 32].

    Args:
        root: data folder, with the files in its subfolder cifar-100-binary.
        labels: "fine" for the 100 classes, "coarse" for the 20 superclasses.
    """
    column = {"coarse": 0, "fine": 1}[
        require_one_of("dataset 'cifar100'", "labels", labels, ("fine", "coarse"))
    ]
    class_names = {"coarse": COARSE_NAMES, "fine": FINE_NAMES}[labels]
    paths = [
        find_file("cifar100", root, [f"cifar-100-binary/{part}.bin"]) for part in ("train", "test")
    ]
    train, test = (read_records(path, label_bytes=2) for path in paths)
    for path, records in zip(paths, (train, test), strict=True):
        check_labels(path, records[:, 0], classes=20)
        check_labels(path, records[:, 1], classes=100)
    x, x_test = extract_images(train, label_bytes=2), extract_images(test, label_bytes=2)
    y, y_test = train[:, column].astype(np.int64), test[:, column].astype(np.int64)
    info = {"source": "cifar100", "labels": labels, "files": [str(path) for path in paths]}
    return Dataset(x, y, x_test, y_test, class_names=class_names, standardise=CIFAR100, info=info)


def read_records(path: Path, label_bytes: int) -> NDArray[np.uint8]:
    """Returns the records of a binary file, [n, label_bytes + 3072].

    A record is the label bytes, followed by the red, the green and the blue plane of the image.
    """
    content = read_bytes(path)
    size = label_bytes + PIXELS
    if not content or len(content) % size:
        raise bad_file_error(
            path, f"expected complete records of {size} bytes, got {len(content)} bytes"
        )
    return np.frombuffer(content, np.uint8).reshape(-1, size)


def check_labels(path: Path, values: NDArray[np.uint8], classes: int) -> None:
    """Raises unless all labels are below `classes`; a file in another format fails this check."""
    if values.max() >= classes:
        raise bad_file_error(path, f"expected labels 0 to {classes - 1}, got {values.max()}")


def extract_images(records: NDArray[np.uint8], label_bytes: int) -> NDArray[Any]:
    """Returns the pixels of the records as a contiguous copy, [n, 3, 32, 32]."""
    return np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, *SHAPE)
