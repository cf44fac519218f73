"""Corruptions of images: closed forms, oracles of other libraries, repeatability, severity."""

import io

import numpy as np
import pytest
from matplotlib.colors import hsv_to_rgb, rgb_to_hsv
from PIL import Image
from scipy import ndimage

from fedensemble.data.corruptions import ABSENT, CORRUPTIONS, SEVERITIES, corrupt
from fedensemble.data.corruptions.blur import soft_disk
from fedensemble.data.corruptions.warp import motion_kernel, sample, zoom_center
from fedensemble.data.corruptions.weather import plasma_fractal
from fedensemble.errors import InputError


def smooth_images(n, channels, side):
    """Images with large structures, as photographs have."""
    noise = np.random.default_rng(0).random((n, channels, side, side))
    smooth = ndimage.gaussian_filter(noise, (0, 0, 3, 3))
    low, high = smooth.min((1, 2, 3), keepdims=True), smooth.max((1, 2, 3), keepdims=True)
    return np.rint(255 * (smooth - low) / (high - low)).astype(np.uint8)


GRAY, COLOR = smooth_images(80, 1, 28), smooth_images(80, 3, 32)


def distortion(images, corruption, severity):
    changed = corrupt(images, corruption, severity)
    return float(((changed / 255.0 - images / 255.0) ** 2).mean())


@pytest.mark.parametrize("images", [GRAY, COLOR], ids=["gray", "color"])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_shape_dtype_repeatability_and_keys(images, corruption):
    before = images.copy()
    first = corrupt(images, corruption, 3, image_set="a")
    assert first.dtype == np.uint8 and first.shape == images.shape
    assert np.array_equal(images, before)
    assert not np.array_equal(first, images)
    assert np.array_equal(first, corrupt(images, corruption, 3, image_set="a"))
    deterministic = {
        "brightness",
        "contrast",
        "defocus_blur",
        "zoom_blur",
        "pixelate",
        "jpeg_compression",
    }
    for other in (
        corrupt(images, corruption, 3, image_set="b"),
        corrupt(images, corruption, 3, image_set="a", seed=1),
    ):
        assert np.array_equal(first, other) == (corruption in deterministic)


# The constants of glass blur and of the elastic transform do not rise with the severity: those of
# glass blur alternate, and a weaker affine map comes with a stronger elastic field.
@pytest.mark.parametrize("images", [GRAY, COLOR], ids=["gray", "color"])
@pytest.mark.parametrize(
    "corruption", [c for c in CORRUPTIONS if c not in ("glass_blur", "elastic_transform")]
)
def test_distortion_grows_with_severity(images, corruption):
    found = [distortion(images, corruption, severity) for severity in SEVERITIES]
    assert found == sorted(found) and found[-1] > 1.5 * found[0] > 0


def test_gaussian_noise_has_its_variance():
    gray = np.full((200, 1, 28, 28), 128, np.uint8)
    for severity, deviation in zip(SEVERITIES, (0.04, 0.06, 0.08, 0.09, 0.10), strict=True):
        noise = corrupt(gray, "gaussian_noise", severity) / 255.0 - 128 / 255
        # Rounding to bytes adds a variance of 1/12 level.
        assert noise.std() == pytest.approx(np.hypot(deviation, 1 / 255 / np.sqrt(12)), rel=0.01)
        assert abs(noise.mean()) < 0.001


def test_shot_noise_is_poisson():
    gray = np.full((200, 1, 28, 28), 102, np.uint8)
    values = corrupt(gray, "shot_noise", 5) / 255.0
    assert values.mean() == pytest.approx(0.4, abs=0.002)
    assert values.var() == pytest.approx(0.4 / 50, rel=0.02)


def test_impulse_noise_replaces_a_share_by_black_and_white():
    gray = np.full((200, 3, 16, 16), 100, np.uint8)
    values = corrupt(gray, "impulse_noise", 5)
    assert set(np.unique(values)) == {0, 100, 255}
    assert (values != 100).mean() == pytest.approx(0.07, abs=0.002)
    assert (values == 255).mean() == pytest.approx(0.035, abs=0.002)


@pytest.mark.parametrize(("severity", "added"), [(1, 0.05), (5, 0.3)])
def test_brightness_is_the_value_of_hsv(severity, added):
    hsv = rgb_to_hsv(np.moveaxis(COLOR, 1, -1) / 255.0)
    hsv[..., 2] = np.minimum(hsv[..., 2] + added, 1)
    expected = np.moveaxis(hsv_to_rgb(hsv), -1, 1) * 255
    assert np.abs(corrupt(COLOR, "brightness", severity) - expected).max() <= 0.5 + 1e-9
    gray = np.clip(GRAY / 255.0 + added, 0, 1) * 255
    assert np.abs(corrupt(GRAY, "brightness", severity) - gray).max() <= 0.5 + 1e-9


def test_contrast_is_linear_around_the_mean():
    mean = COLOR.mean((2, 3), keepdims=True)
    expected = mean + 0.15 * (COLOR - mean)
    assert np.abs(corrupt(COLOR, "contrast", 5) - expected).max() <= 0.5 + 1e-9


def test_defocus_blur_is_a_convolution_with_a_disk():
    assert soft_disk(1.5, 0.1)[1:-1, 1:-1] == pytest.approx(np.full((3, 3), 1 / 9))
    point = np.zeros((1, 1, 15, 15), np.uint8)
    point[0, 0, 7, 7] = 255
    blurred = corrupt(point, "defocus_blur", 5)
    assert blurred.sum() == pytest.approx(255, abs=5)
    assert blurred[0, 0, 6:9, 6:9].min() == 28  # 255 / 9
    softer = soft_disk(0.5, 0.6)  # one pixel, blurred by a Gaussian over 3x3 pixels
    side = np.exp(-1 / (2 * 0.6**2))
    assert softer == pytest.approx(np.outer([side, 1, side], [side, 1, side]) / (1 + 2 * side) ** 2)


def test_motion_kernel_moves_each_image_along_its_line():
    point = np.zeros((3, 1, 31, 31))
    point[:, 0, 15, 15] = 1
    blurred = motion_kernel(point, 6, 2.0, np.array([0.0, 90.0, 45.0]))
    assert blurred.sum((1, 2, 3)) == pytest.approx(1, abs=1e-3)
    weights = np.exp(-(np.arange(13) ** 2) / 8)
    weights /= weights.sum()
    # A pixel takes the values to its right, so that the point is spread to the left.
    assert blurred[0, 0, 15, 15:2:-1] == pytest.approx(weights, abs=1e-5)
    assert blurred[1, 0, 15:2:-1, 15] == pytest.approx(weights, abs=1e-5)
    assert np.count_nonzero(blurred[2]) == np.count_nonzero(np.diagonal(blurred[2, 0]))


def test_zoom_equals_scipy():
    for side, factor in ((28, 1.17), (32, 1.25), (32, 1.0), (32, 2.25)):
        image = np.random.default_rng(1).random((2, 1, side, side))
        kept = int(np.ceil(side / factor))
        top = (side - kept) // 2
        inner = image[1, 0, top : top + kept, top : top + kept]
        large = ndimage.zoom(inner, factor, order=1)
        trim = (len(large) - side) // 2
        expected = large[trim : trim + side, trim : trim + side]
        assert zoom_center(image, factor)[1, 0] == pytest.approx(expected, abs=1e-12)


def test_sampling_equals_scipy():
    rng = np.random.default_rng(2)
    image = rng.random((2, 3, 9, 11))
    rows, columns = rng.uniform(-4, 12, (2, 9, 11)), rng.uniform(-4, 14, (2, 9, 11))
    found = sample(image, rows, columns)
    for n in range(2):
        for channel in range(3):
            expected = ndimage.map_coordinates(
                image[n, channel], [rows[n], columns[n]], order=1, mode="mirror"
            )
            assert found[n, channel] == pytest.approx(expected, abs=1e-12)


def test_elastic_transform_of_severity_1_is_affine():
    """A linear ramp stays linear under an affine map, away from the border."""
    ramp = np.tile((np.arange(32) * 8).astype(np.uint8), (6, 1, 32, 1))
    inner = corrupt(ramp, "elastic_transform", 1)[:, 0, 9:23, 9:23].astype(float)
    assert np.abs(np.diff(inner, 2, axis=2)).max() <= 2  # two roundings to bytes
    rough = corrupt(ramp, "elastic_transform", 5)[:, 0, 9:23, 9:23].astype(float)
    assert np.abs(np.diff(rough, 2, axis=2)).max() > 8


def test_jpeg_and_pixelate_are_those_of_pillow():
    gray, color = Image.fromarray(GRAY[0, 0]), Image.fromarray(np.moveaxis(COLOR[0], 0, -1))
    file = io.BytesIO()
    color.save(file, "JPEG", quality=40)
    found = np.moveaxis(corrupt(COLOR, "jpeg_compression", 5)[0], 0, -1)
    assert np.array_equal(found, np.asarray(Image.open(file)))
    small = gray.resize((18, 18), Image.Resampling.BOX)  # 0.65 * 28
    expected = np.asarray(small.resize((28, 28), Image.Resampling.BOX))
    assert np.array_equal(corrupt(GRAY, "pixelate", 5)[0, 0], expected)


def test_fog_is_brighter_cloudy_and_scaled():
    clouds = plasma_fractal(3, 28, 2.0, np.random.default_rng(0))
    assert clouds.shape == (3, 32, 32)
    assert clouds.min((1, 2)) == pytest.approx(0) and clouds.max((1, 2)) == pytest.approx(1)
    white = np.full((2, 1, 28, 28), 255, np.uint8)
    foggy = corrupt(white, "fog", 4) / 255.0
    # Of white: (1 + clouds) / 2.
    assert foggy.min() >= 0.5 and foggy.max() <= 1


def test_chunks_do_not_repeat():
    gray = np.full((1001, 1, 8, 8), 128, np.uint8)
    noisy = corrupt(gray, "gaussian_noise", 1)
    assert not np.array_equal(noisy[0], noisy[500]) and not np.array_equal(noisy[0], noisy[1000])
    assert np.array_equal(noisy[:500], corrupt(gray[:500], "gaussian_noise", 1))


@pytest.mark.parametrize(
    ("images", "name", "severity", "problem"),
    [
        (GRAY, "frost", 1, "'frost' is not available: it needs photographs"),
        (GRAY, "foggy", 1, "unknown corruption 'foggy': did you mean 'fog'"),
        (GRAY, "fog", 6, "severity is one of 1, 2, 3, 4, 5; got 6"),
        (GRAY, "fog", 0, "severity"),
        (GRAY / 255.0, "fog", 1, "got float64 of shape"),
        (GRAY[0], "fog", 1, r"got uint8 of shape \(1, 28, 28\)"),
        (GRAY[:0], "fog", 1, "got uint8 of shape"),
        (np.zeros((2, 4, 8, 8), np.uint8), "fog", 1, "1 or 3 channels"),
    ],
)
def test_bad_input(images, name, severity, problem):
    with pytest.raises(InputError, match=problem):
        corrupt(images, name, severity)


def test_fifteen_corruptions_with_those_that_are_absent():
    assert len(CORRUPTIONS) + len(ABSENT) == 15
