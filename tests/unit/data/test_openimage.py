"""OpenImage from a few small images in FedScale's layout."""

import builtins

import numpy as np
import pytest
from PIL import Image

from fedensemble.data import load, partition
from fedensemble.errors import DataError, InputError

HEADING = "client_id,sample_path,label_name,label_id\n"
TRAIN = [
    ("7", "a.png", "Dog", 2),
    ("3", "b.png", "Cat", 0),
    ("7", "c.jpg", "Cat", 0),
    ("9", "d.png", "Dog", 2),
]
TEST = [("1", "e.png", "Tree", 4), ("1", "f.png", "Cat", 0), ("2", "g.png", "Cat", 0)]


def write_table(path, rows):
    path.write_text(HEADING + "".join(",".join(map(str, row)) + "\n" for row in rows))


@pytest.fixture(params=["test", "val"])
def base(tmp_path, request):
    """The folder openimage with four training images and three test images."""
    base = tmp_path / "openimage"
    (base / "client_data_mapping").mkdir(parents=True)
    for part, rows in (("train", TRAIN), (request.param, TEST)):
        (base / part).mkdir()
        write_table(base / "client_data_mapping" / f"{part}.csv", rows)
        for number, row in enumerate(rows):
            Image.new("RGB", (9 + number, 7), (200, 100, 10 * number)).save(base / part / row[1])
    Image.new("L", (5, 5), 50).save(base / "train" / "b.png")
    return base


def test_clients_labels_and_pixels(base):
    source = load("openimage", root=base.parent, size=4)
    assert source.x.shape == (4, 3, 4, 4)
    assert source.x_test.shape == (3, 3, 4, 4)
    assert source.classes == 5
    assert (source.x[1] == 50).all()  # gray becomes red, green and blue
    assert source.x[3, :, 0, 0].tolist() == [200, 100, 30]
    data = partition(source, "natural")
    assert data.names == ("7", "3", "9")
    assert data.size.tolist() == [2, 1, 1]


def test_limits_keep_the_number_of_classes(base):
    source = load("openimage", root=base.parent, size=2, limit_clients=1, limit_test=2)
    assert source.group_names == ("7",)
    assert source.y.tolist() == [2, 0]
    assert source.y_test.tolist() == [4, 0]
    assert source.classes == 5
    assert load("openimage", root=base.parent, size=2, min_examples=2).group_names == ("7",)


def test_errors_name_the_file(base):
    root, tables = base.parent, base / "client_data_mapping"
    with pytest.raises(DataError, match="lower min_examples"):
        load("openimage", root=root, min_examples=9)
    with pytest.raises(InputError, match="limit_clients"):
        load("openimage", root=root, limit_clients=0)
    (base / "train" / "d.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"d\.png is damaged"):
        load("openimage", root=root, size=2)
    (base / "train" / "d.png").unlink()
    with pytest.raises(DataError, match=r"image d\.png, which is missing"):
        load("openimage", root=root, size=2)
    (tables / "train.csv").write_text(HEADING + "1,a.png,Dog,two\n")
    with pytest.raises(DataError, match=r"train\.csv is damaged.*line 2"):
        load("openimage", root=root)
    (tables / "train.csv").write_text("client,path\n1,a.png\n")
    with pytest.raises(
        DataError, match="expected the columns client_id, sample_path, label_id, got client, path"
    ):
        load("openimage", root=root)
    (tables / "train.csv").write_text(HEADING)
    with pytest.raises(DataError, match="at least one line"):
        load("openimage", root=root)
    (tables / "train.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot be read as a table"):
        load("openimage", root=root)
    (tables / "train.csv").unlink()
    with pytest.raises(DataError, match=r"train\.csv, which is missing.*fedscale"):
        load("openimage", root=root)


def test_cut_off_image(base):
    path = base / "train" / "c.jpg"
    noise = np.random.default_rng(0).integers(256, size=(64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:-800])
    with pytest.raises(DataError, match=r"c\.jpg is damaged"):
        load("openimage", root=base.parent, size=2)


def test_says_which_package_is_missing(base, monkeypatch):
    real = builtins.__import__

    def without_pillow(name, *rest, **more):
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(DataError, match="Pillow: run `pip install"):
        load("openimage", root=base.parent, size=2)
