"""Folders of images, against Pillow and NumPy."""

import builtins
import sys

import numpy as np
import pytest
from PIL import Image

import fedensemble as fe
from fedensemble.config.build import build_data
from fedensemble.config.schema import resolve
from fedensemble.data import load, partition
from fedensemble.data.folders.image_files import pixel_moments
from fedensemble.errors import DataError, FedEnsembleError, InputError

RNG = np.random.default_rng(0)


def save(pixels, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def pets(tmp_path):
    """Writes 12 color images of cats and dogs of three people; returns the folder and the pixels."""
    pixels = {}
    for row in range(12):
        name = f"{('cat', 'dog')[row % 2]}/{('ann', 'bob', 'eve')[row % 3]}_{row:02}.png"
        pixels[name] = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
        save(pixels[name], tmp_path / "pets" / name)
    return tmp_path / "pets", pixels


def test_images_are_what_was_written(pets):
    folder, pixels = pets
    data = load("images", path=folder, client="{client}_*", test_share=0)
    names = sorted(pixels)
    expected = np.stack([pixels[name].transpose(2, 0, 1) for name in names])
    assert np.array_equal(data.x, expected) and data.x.dtype == np.uint8
    assert data.class_names == ("cat", "dog") and data.classes == 2
    assert [data.class_names[label] for label in data.y] == [n.split("/")[0] for n in names]
    assert [data.group_names[g] for g in data.group] == [n[4:7] for n in names]
    flat = expected.transpose(1, 0, 2, 3).reshape(3, -1).astype(float)
    np.testing.assert_allclose(data.standardise.mean, flat.mean(1))
    np.testing.assert_allclose(data.standardise.std, flat.std(1))
    assert data.x_test is None and not data.notes


def test_moments_of_pieces_are_those_of_all():
    pixels = RNG.integers(0, 256, (700, 2, 3, 1), dtype=np.uint8)
    pixels[:, 1] = 9  # constant: only centred
    moments = pixel_moments(pixels)
    np.testing.assert_allclose(moments.mean, pixels.mean((0, 2, 3)))
    np.testing.assert_allclose(moments.std, [pixels[:, 0].std(), 1.0])


def test_test_images_are_a_share_of_every_class_and_have_clients(pets):
    folder, _ = pets
    source = load("images", path=folder, client="{client}_*", test_share=1 / 3)
    assert np.bincount(source.y_test).tolist() == [2, 2] and len(source.x) == 8
    assert np.isin(source.test_group, [-1, 0, 1, 2]).all()
    data = partition(source, "natural")
    assert set(data.names) == {"ann", "bob", "eve"} and data.class_names == ("cat", "dog")


def test_a_folder_of_test_images(pets, tmp_path):
    folder, _ = pets
    pixel = RNG.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    save(pixel, tmp_path / "more" / "dog" / "bob_1.png")
    save(pixel, tmp_path / "more" / "dog" / "zoe_1.png")
    data = load("images", path=folder, test_path=tmp_path / "more", client="{client}_*")
    assert len(data.x) == 12 and data.y_test.tolist() == [1, 1]
    assert [*data.test_group] == [data.group_names.index("bob"), -1]
    save(pixel, tmp_path / "more" / "cow" / "zoe_1.png")
    with pytest.raises(DataError, match=r"subfolder 'cow', and the classes .* are cat, dog"):
        load("images", path=folder, test_path=tmp_path / "more")
    with pytest.raises(InputError, match="test_share draws test rows, and test_path gives them"):
        load("images", path=folder, test_path=tmp_path / "more", test_share=0.1)


def test_clients_of_paths_and_tables(pets, tmp_path):
    folder, pixels = pets
    names = sorted(pixels)
    by_class = load("images", path=folder, client="{client}/*", test_share=0)
    assert by_class.group_names == ("cat", "dog") and np.array_equal(by_class.group, by_class.y)
    lines = [f"{name},{4 + int(name[-6:-4])}" for name in reversed(names)]
    (folder / "clients.csv").write_text("\n".join(["file,client", *lines]))
    by_table = load("images", path=folder, client_file="clients.csv", test_share=0)
    assert by_table.group_names == tuple(map(str, range(4, 16)))  # in the order of numbers
    assert [by_table.group_names[g] for g in by_table.group] == [
        str(4 + int(n[-6:-4])) for n in names
    ]
    short = tmp_path / "short.csv"  # names alone are enough if they occur once
    short.write_text("client,file\n" + "\n".join(f"x,{name.split('/')[1]}" for name in names))
    assert load("images", path=folder, client_file=short).group_names == ("x",)
    short.write_text(f"client,file\nx,{names[0]}\n")
    with pytest.raises(DataError, match=r"no client for 11 of 12 files .*the first is cat/ann_06"):
        load("images", path=folder, client_file=short)
    short.write_text(f"client,file\nx,{names[0]}\ny,{names[0]}\n")
    with pytest.raises(DataError, match=r"to the clients x and y \(line 3\)"):
        load("images", path=folder, client_file=short)
    with pytest.raises(DataError, match=r"client_file none.csv is missing. Looked for"):
        load("images", path=folder, client_file="none.csv")
    with pytest.raises(InputError, match="set only one"):
        load("images", path=folder, client_file=short, client="{client}_*")


@pytest.mark.parametrize("pattern", ["{client}", "*", "{client}_{client}", 3])
def test_patterns_that_do_not_fit(pets, pattern):
    with pytest.raises(FedEnsembleError, match=r"such as '\{client\}_\*'"):
        load("images", path=pets[0], client=pattern if pattern != "{client}" else "{client}.gif")


def test_different_sizes_say_what_to_do_and_are_resized(pets):
    folder, _ = pets
    other = RNG.integers(0, 256, (20, 10, 3), dtype=np.uint8)
    save(other, folder / "dog" / "zoe_1.png")
    with pytest.raises(
        DataError,
        match=r"2 different sizes \(height x width\): 12 of 13 are 5x7, .*zoe_1.png is 20x10. "
        r"Set size = \[5, 7\]",
    ):
        load("images", path=folder)
    for fit, expected in {
        "stretch": np.asarray(Image.fromarray(other).resize((4, 4), Image.Resampling.BILINEAR)),
        "crop": np.asarray(
            Image.fromarray(other).resize((4, 4), Image.Resampling.BILINEAR, box=(0, 5, 10, 15))
        ),
    }.items():
        data = load("images", path=folder, size=[4], fit=fit, test_share=0)
        assert data.x.shape == (13, 3, 4, 4)
        assert np.array_equal(data.x[-1], expected.transpose(2, 0, 1)), fit
    padded = load("images", path=folder, size=[4, 4], fit="pad", test_share=0).x[-1]
    assert not padded[:, :, [0, 3]].any() and padded[:, :, 1:3].any()


def test_gray_images_and_16_bits(tmp_path):
    gray = RNG.integers(0, 256, (4, 4), dtype=np.uint8)
    deep = RNG.integers(0, 2**16, (4, 4), dtype=np.uint16)
    save(gray, tmp_path / "g" / "0" / "a.png")
    save(deep, tmp_path / "g" / "1" / "b.png")
    data = load("images", path=tmp_path / "g", test_share=0, scale=False)
    assert data.x.shape == (2, 1, 4, 4)
    assert np.array_equal(data.x[0, 0], gray) and np.array_equal(data.x[1, 0], deep >> 8)
    assert data.standardise is None
    federated = partition(data, "iid", 2)
    assert federated.standardise == fe.data.Standardise((0.0,), (255.0,))
    save(np.stack([gray] * 3, -1), tmp_path / "g" / "1" / "c.png")
    mixed = load("images", path=tmp_path / "g", test_share=0)
    assert mixed.x.shape == (3, 3, 4, 4) and np.array_equal(mixed.x[0], np.stack([gray] * 3))
    forced = load("images", path=tmp_path / "g", test_share=0, color="gray")
    assert forced.x.shape == (3, 1, 4, 4) and np.array_equal(forced.x[2, 0], gray)
    Image.fromarray(gray.astype(np.int32)).save(tmp_path / "g" / "1" / "d.tif")
    with pytest.raises(DataError, match=r"d.tif has values of 32 bits"):
        load("images", path=tmp_path / "g")


def test_pictures_are_turned_as_cameras_ask(tmp_path):
    pixels = np.zeros((2, 6, 3), np.uint8)
    pixels[:, :3] = 200  # bright on the left
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter, clockwise: bright at the top
    (tmp_path / "p" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "p" / "a" / "x.png", exif=exif)
    data = load("images", path=tmp_path / "p", test_share=0)
    assert data.x.shape == (1, 3, 6, 2)
    assert (data.x[0, :, :3] == 200).all() and not data.x[0, :, 3:].any()


def test_palettes_and_transparency_make_no_warnings(tmp_path):
    image = Image.fromarray(RNG.integers(0, 256, (4, 4, 4), dtype=np.uint8))
    (tmp_path / "p" / "a").mkdir(parents=True)
    image.save(tmp_path / "p" / "a" / "x.png")
    image.convert("P").save(tmp_path / "p" / "a" / "y.png", transparency=b"\0\1\2")
    assert load("images", path=tmp_path / "p", test_share=0).x.shape == (2, 3, 4, 4)


def test_classes_that_are_numbers_are_in_their_order(tmp_path):
    for name in ("10", "9", "2"):
        save(np.zeros((2, 2), np.uint8), tmp_path / name / "a.png")
    assert load("images", path=tmp_path, test_share=0).class_names == ("2", "9", "10")
    named = load("images", path=tmp_path, class_names=["9", "2", "10", "11"], test_share=0)
    assert named.classes == 4 and named.y.tolist() == [1, 0, 2]
    with pytest.raises(DataError, match="subfolder '9', which is not among class_names"):
        load("images", path=tmp_path, class_names=["2", "10"])


def test_other_files_are_named(pets):
    folder, _ = pets
    (folder / "cat" / "notes.txt").write_text("x")
    (folder / "cat" / ".DS_Store").write_text("x")
    (folder / ".cache").mkdir()
    data = load("images", path=folder)
    assert data.notes == ("Files that are no images are left out: cat/notes.txt.",)
    assert data.class_names == ("cat", "dog")


def test_folders_that_are_arranged_otherwise(pets, tmp_path):
    folder, _ = pets
    (folder / "cow").mkdir()
    with pytest.raises(DataError, match=r"folder .*cow of class 'cow' has no images .*remove it"):
        load("images", path=folder)
    (folder / "cow").rmdir()
    with pytest.raises(DataError, match="has no subfolders, and their names are the classes"):
        load("images", path=folder / "cat")
    for part in ("train", "test"):
        save(np.zeros((2, 2), np.uint8), tmp_path / "parts" / part / "a" / "x.png")
    with pytest.raises(DataError, match=r"Set path = '.*train' and test_path = '.*test'"):
        load("images", path=tmp_path / "parts")
    with pytest.raises(DataError, match=r"needs the folder nowhere, which is missing"):
        load("images", path=tmp_path / "nowhere")
    (folder / "cat" / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    with pytest.raises(DataError, match=r"bad.png cannot be read as an image: .* remove the file"):
        load("images", path=folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": [0]}, "size to be an integer >= 1"),
        ({"size": [1, 2, 3]}, r"\[height, width\], or \[side\]"),
        ({"fit": "zoom"}, "fit to be one of stretch, crop, pad"),
        ({"color": "blue"}, "color to be one of auto, gray, rgb"),
        ({"scale": 1}, "scale to be true or false"),
    ],
)
def test_options_that_do_not_fit(pets, options, message):
    with pytest.raises(InputError, match=message):
        load("images", path=pets[0], **options)


def test_pillow_that_is_missing(pets, monkeypatch):
    real = builtins.__import__

    def without_pillow(name, *args, **kwargs):
        if name == "PIL":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "PIL", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_pillow)
    with pytest.raises(DataError, match=r"pip install 'fedensemble\[images\]'"):
        load("images", path=pets[0])


def test_a_config_takes_the_clients_of_the_pattern(pets):
    table = {"source": "images", "path": str(pets[0]), "client": "{client}_*"}
    config = resolve({"data": table, "model": {"name": "mlp"}, "ensemble": {"modes": 1}})
    assert config.data["partition"] == "natural"
    data = build_data(config)
    assert data.names == ("ann", "bob", "eve") and data.class_names == ("cat", "dog")
