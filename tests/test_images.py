"""Images: files opened as sRGB, pixels in rows of batches, images of arrays, and colors against published values."""

import concurrent.futures
import io
import itertools
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib

import icc
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import simplejpeg
from conftest import assert_trees_equal
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms
from test_bad_input import refuses

import millstream as ms
from millstream.integrations.images import (
    FRACTIONAL,
    IMAGENET,
    Coefficients,
    balanced,
    linear_to_oklab,
    linear_to_srgb,
    oklab_to_linear,
    oklab_to_srgb,
    open_srgb,
    read_srgb,
    rescale,
    srgb_to_linear,
    srgb_to_oklab,
    standardized,
    to_pillow,
    write_chw,
    write_hwc,
)
from millstream.sources import image_file

rng = np.random.default_rng(0)
PIXELS = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
SMOOTH = np.asarray(Image.fromarray(PIXELS[:3, :4]).resize((64, 48), Image.Resampling.BICUBIC))
ADOBE = icc.rgb_profile(icc.ADOBE, icc.gamma(2.2))
LINEAR_GRAY = icc.gray_profile(icc.gamma(1.0))
ORIENTATION = 0x0112


def saved(image, form, **options):
    """The bytes of a file of this format."""
    file = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(file, form, **options)
    return file.getvalue()


def png(width, height, bits, color, row, **chunks):
    """The bytes of a PNG file, chunk by chunk."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0))
    between = b"".join(chunk(kind.encode(), data) for kind, data in chunks.items())
    return b"\x89PNG\r\n\x1a\n" + head + between + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")


def opened(file, **options):
    return np.asarray(open_srgb(file, **options)).astype(int)


def far(found, expected):
    return np.abs(found - expected).max()


# Colors of files.


@pytest.mark.parametrize(
    ("primaries", "curve"),
    [(icc.ADOBE, icc.gamma(2.2)), (icc.DISPLAY_P3, icc.srgb_curve), (icc.SRGB, icc.gamma(1.0))],
    ids=["Adobe RGB", "Display P3", "linear"],
)
def test_colors_of_other_profiles_become_srgb(primaries, curve):
    file = saved(PIXELS, "PNG", icc_profile=icc.rgb_profile(primaries, curve))
    expected = icc.rgb_to_srgb(PIXELS, primaries, curve)
    assert far(opened(file), expected) <= 1
    assert far(PIXELS, expected) > 10


@pytest.mark.parametrize(
    "profile",
    [
        None,
        ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes(),
        icc.rgb_profile(icc.SRGB, icc.srgb_curve),  # by another name, with a table for a curve
    ],
    ids=["none", "LittleCMS", "by hand"],
)
@pytest.mark.parametrize("intent", ["perceptual", "relative", "saturation", "absolute"])
def test_pixels_that_are_srgb_are_not_changed(profile, intent):
    for shape in (PIXELS, PIXELS[..., 0]):
        file = saved(shape, "PNG", icc_profile=profile)
        np.testing.assert_array_equal(opened(file, intent=intent), np.broadcast_to(shape.T, (3, 30, 20)).T)


@pytest.mark.parametrize("exponent", [1.0, 1.8, 2.2])
def test_gray_has_a_profile_too(exponent):
    profile = icc.gray_profile(icc.gamma(exponent))
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    expected = 255 * icc.srgb_inverse((levels / 255) ** exponent)[..., None]
    for form in ("PNG", "TIFF"):
        for gray in (levels, levels.astype(np.uint16) * 257):
            assert far(opened(saved(gray, form, icc_profile=profile)), expected) <= 1


def test_dark_grays_of_16_bits_keep_their_differences():
    levels = np.arange(0, 1024, dtype=np.uint16).reshape(32, 32)
    found = opened(saved(levels, "PNG", icc_profile=LINEAR_GRAY))
    assert far(found, 255 * icc.srgb_inverse(levels / 65535)[..., None]) <= 1
    assert len(np.unique(found)) > 25  # 8 bits would have given 4


def test_gray_pixels_with_a_profile_for_rgb():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    expected = icc.rgb_to_srgb(np.stack([levels] * 3, axis=-1), icc.ADOBE, icc.gamma(2.2))
    for gray in (levels, levels.astype(np.uint16) * 257):
        assert far(opened(saved(gray, "PNG", icc_profile=ADOBE)), expected) <= 1


def test_16_bits_are_rounded_to_8_and_not_cut_off_at_255():
    levels = np.array([[0, 128, 129, 385, 386, 32768, 65535]], np.uint16)
    expected = [0, 0, 1, 1, 2, 128, 255]
    big_endian = Image.frombytes("I;16B", (7, 1), levels.astype(">u2").tobytes())
    portable = b"P5 7 1 65535\n" + levels.astype(">u2").tobytes()
    for file in (saved(levels, "PNG"), saved(levels, "TIFF"), saved(big_endian, "TIFF"), portable):
        assert opened(file)[0, :, 0].tolist() == expected


INKS = list(itertools.product((0, 1), repeat=4))


def inks_image(form="TIFF", **options):
    """A file of one pixel for each set of inks."""
    image = Image.frombytes("CMYK", (16, 1), bytes(255 * one for inks in INKS for one in inks))
    return saved(image, form, **options)


@pytest.mark.parametrize(("intent", "paper"), [("perceptual", 90), ("relative", 100), ("saturation", 80)])
def test_an_intent_chooses_the_tables_of_a_profile(intent, paper):
    profile = icc.cmyk_profile(papers=(90, 100, 80), black=0)
    expected = icc.lab_to_srgb(np.array([icc.ink(paper, 0, *inks) for inks in INKS]))
    found = opened(inks_image(icc_profile=profile), intent=intent)[0]
    assert far(found[1:], expected[1:]) <= 3  # the paper itself is white whatever the tables say


def test_the_absolute_intent_keeps_the_color_of_the_paper():
    white = icc.D50 * np.array([0.8, 0.8, 0.7])
    profile = icc.cmyk_profile(papers=(100, 100, 100), black=0, white=white)
    assert opened(inks_image(icc_profile=profile))[0, 0].tolist() == [255, 255, 255]
    red, green, blue = opened(inks_image(icc_profile=profile), intent="absolute")[0, 0]
    assert 240 > red > green > blue > 200


def test_black_stays_black_unless_told_otherwise():
    file = inks_image(icc_profile=icc.cmyk_profile(papers=(100, 100, 100), black=20))
    assert opened(file)[0, 1].tolist() == [0, 0, 0]
    gray = icc.lab_to_srgb(np.array([20.0, 0, 0]))
    assert far(opened(file, black_point=False)[0, 1], gray) <= 1


def test_inks_without_a_profile_are_the_complement_of_light():
    for form, tolerance in (("TIFF", 0), ("JPEG", 8)):
        file = saved(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), form)
        assert far(opened(file)[0, 0], [0, 255, 255]) <= tolerance


def test_jpegs_of_inks_are_converted_by_their_profile():
    profile = icc.cmyk_profile(papers=(100, 100, 100), black=0)
    file = saved(Image.new("CMYK", (8, 8), (0, 0, 255, 0)), "JPEG", icc_profile=profile, quality=100)
    expected = icc.lab_to_srgb(np.array(icc.ink(100, 0, 0, 0, 1, 0)))
    assert far(opened(file)[4, 4], expected) <= 4
    np.testing.assert_array_equal(read_srgb(file), opened(file))


def test_lab_is_that_of_the_icc():
    bytes_of = np.concatenate([[[255, 0, 0], [0, 0, 0]], rng.integers(0, 256, (98, 3))]).astype(np.uint8)
    lab = np.stack([bytes_of[:, 0] / 2.55, *bytes_of[:, 1:].T.astype(np.int8)], axis=1)
    image = Image.frombytes("LAB", (100, 1), bytes_of.tobytes())
    assert far(opened(saved(image, "TIFF"))[0], icc.lab_to_srgb(lab)) <= 1


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_white_are_refused(mode):
    with refuses(ValueError, "cannot be read as an image", f"mode {mode} have no known white", "8 or 16 bits"):
        open_srgb(saved(Image.new(mode, (2, 2)), "TIFF"))


# Transparency.


def test_alpha_is_kept_and_only_colors_are_converted():
    alpha = np.arange(600, dtype=np.uint16).astype(np.uint8).reshape(20, 30, 1)
    file = saved(np.concatenate([PIXELS, alpha], axis=-1), "PNG", icc_profile=ADOBE)
    found = open_srgb(file)
    assert found.mode == "RGBA"
    np.testing.assert_array_equal(np.asarray(found)[..., 3:], alpha)
    assert far(opened(file)[..., :3], icc.rgb_to_srgb(PIXELS, icc.ADOBE, icc.gamma(2.2))) <= 1
    np.testing.assert_array_equal(opened(file, mode="RGB"), opened(file)[..., :3])
    assert open_srgb(saved(PIXELS, "PNG"), mode="RGBA").getpixel((0, 0)) == (*PIXELS[0, 0].tolist(), 255)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (png(2, 1, 8, 3, b"\0\1", PLTE=bytes([9, 8, 7, 1, 2, 3]), tRNS=bytes([77])), [[9, 8, 7, 77], [1, 2, 3, 255]]),
        (png(2, 1, 8, 2, bytes([9, 8, 7, 1, 2, 3]), tRNS=bytes([0, 1, 0, 2, 0, 3])), [[9, 8, 7, 255], [1, 2, 3, 0]]),
        (png(2, 1, 8, 0, bytes([5, 9]), tRNS=bytes([0, 9])), [[5, 5, 5, 255], [9, 9, 9, 0]]),
        (png(2, 1, 16, 0, bytes([2, 2, 5, 5]), tRNS=bytes([2, 2])), [[2, 2, 2, 0], [5, 5, 5, 255]]),
        (png(2, 1, 8, 4, bytes([5, 6, 7, 8])), [[5, 5, 5, 6], [7, 7, 7, 8]]),
        (png(1, 1, 16, 6, bytes([1, 1, 2, 2, 3, 3, 4, 4])), [[1, 2, 3, 4]]),
    ],
    ids=["palette", "key color", "key gray", "key of 16 bits", "gray and alpha", "16 bits and alpha"],
)
def test_every_kind_of_transparency_becomes_alpha(file, expected):
    assert opened(file)[0].tolist() == expected
    assert opened(file, mode="RGB")[0].tolist() == [pixel[:3] for pixel in expected]


def test_key_colors_are_found_before_colors_are_converted():
    profile = b"x\0\0" + zlib.compress(ADOBE)
    file = png(2, 1, 8, 2, bytes([10, 20, 30, 200, 100, 50]), iCCP=profile, tRNS=bytes([0, 200, 0, 100, 0, 50]))
    assert opened(file)[0, :, 3].tolist() == [255, 0]
    assert opened(file)[0, 1].tolist() != [200, 100, 50, 0]


def test_modes():
    file = png(1, 1, 8, 6, bytes([200, 100, 50, 128]))
    assert open_srgb(file, mode="RGBa").getpixel((0, 0)) == (100, 50, 25, 128)
    assert open_srgb(file, mode="LA").getpixel((0, 0)) == (124, 128)
    assert open_srgb(file, mode="L").getpixel((0, 0)) == 124
    assert open_srgb(saved(PIXELS, "PNG"), mode="RGBa").mode == "RGBa"
    assert read_srgb(file, mode="L").shape == (1, 1, 1)


# Orientation.


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF"])
def test_pictures_are_turned_upright(number, form):
    upright = Image.fromarray(SMOOTH)
    turns = [None, 0, 3, 1, 5, 2, 6, 4]  # what a camera held so has done to it, as Pillow's numbers of transpositions
    stored = upright if turns[number - 1] is None else upright.transpose(Image.Transpose(turns[number - 1]))
    exif = Image.Exif()
    exif[ORIENTATION] = number
    file = saved(stored, form, exif=exif)
    assert far(opened(file), SMOOTH) <= (40 if form == "JPEG" else 0)
    np.testing.assert_array_equal(read_srgb(file), opened(file))
    if form != "TIFF":  # which Pillow turns itself
        assert far(opened(file, upright=False), np.asarray(stored)) <= (40 if form == "JPEG" else 0)


def test_damaged_metadata_say_nothing_about_pixels():
    file = saved(SMOOTH, "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x09 and no more")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        np.testing.assert_array_equal(opened(file), opened(saved(SMOOTH, "JPEG")))


# Profiles that cannot be used.


@pytest.mark.parametrize(
    ("profile", "reason"),
    [
        (b"no profile at all, but a good many bytes", "is broken"),
        (ADOBE[:300], "is broken"),
        (LINEAR_GRAY, "is for GRAY colors, and the pixels are RGB"),
        (icc.cmyk_profile((100, 100, 100), 0), "is for CMYK colors, and the pixels are RGB"),
    ],
    ids=["garbage", "cut", "gray", "inks"],
)
def test_profiles_that_cannot_be_used(profile, reason, tmp_path):
    path = tmp_path / "odd.png"
    path.write_bytes(saved(PIXELS, "PNG", icc_profile=profile))
    with pytest.warns(UserWarning, match="odd.png: the ICC profile of this image " + reason):
        np.testing.assert_array_equal(opened(path), PIXELS)
    np.testing.assert_array_equal(opened(path, bad_profile="ignore"), PIXELS)
    with refuses(ValueError, "odd.png cannot be read as an image", "its ICC profile " + reason):
        open_srgb(path, bad_profile="raise")
    with refuses(ValueError, "odd.jpg cannot be read as an image", "its ICC profile " + reason):
        (tmp_path / "odd.jpg").write_bytes(saved(PIXELS, "JPEG", icc_profile=profile))
        read_srgb(tmp_path / "odd.jpg", bad_profile="raise")


def test_nothing_of_an_old_profile_is_saved_again():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    image = open_srgb(saved(PIXELS, "PNG", icc_profile=ADOBE, exif=exif))
    assert image.info == {}
    again = Image.open(io.BytesIO(saved(image, "PNG")))
    assert "icc_profile" not in again.info
    assert ORIENTATION not in again.getexif()
    np.testing.assert_array_equal(np.asarray(again), np.asarray(image))


def test_threads_share_what_is_known_of_profiles():
    profiles = [ADOBE, icc.rgb_profile(icc.DISPLAY_P3, icc.srgb_curve), None]
    files = [saved(PIXELS + np.uint8(turn), "PNG", icc_profile=profiles[turn % 3]) for turn in range(30)]
    expected = [opened(file) for file in files]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for found, one in zip(pool.map(opened, files * 4), expected * 4, strict=True):
            np.testing.assert_array_equal(found, one)


# What is refused.


def test_large_pictures_are_refused_before_they_are_decoded(tmp_path):
    path = tmp_path / "wide.png"
    path.write_bytes(saved(PIXELS, "PNG"))
    assert open_srgb(path, max_pixels=600).size == (30, 20)
    with refuses(ValueError, "wide.png cannot be read", "30 x 20 pixels are more than the 599", "raise max_pixels"):
        open_srgb(path, max_pixels=599)
    path.write_bytes(png(8000, 10000, 8, 2, b""))
    tracemalloc.start()
    with refuses(ValueError, "wide.png cannot be read", "8000 x 10000 pixels are more than the 67108864"):
        read_srgb(path)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_pillows_own_limit_holds_too():
    with refuses(ValueError, "a file of", "3600000000 pixels", "raise PIL.Image.MAX_IMAGE_PIXELS if you trust it"):
        open_srgb(png(60_000, 60_000, 8, 2, b""), max_pixels=None)


WHOLE = {form: saved(SMOOTH, form) for form in ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")}


@given(form=st.sampled_from(sorted(WHOLE)), part=st.floats(0, 0.98))
def test_files_that_are_cut_short_are_refused_by_name(form, part):
    file = io.BytesIO(WHOLE[form][: int(part * len(WHOLE[form]))])
    file.name = "half.picture"
    for read in (open_srgb, read_srgb):
        with refuses(ValueError, "half.picture cannot be read as an image"):
            read(file)


@given(form=st.sampled_from(sorted(WHOLE)), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_damaged_files_are_pictures_or_refused_by_name(form, place, bit):
    damaged = bytearray(WHOLE[form])
    damaged[int(place * len(damaged))] ^= 1 << bit
    file = io.BytesIO(damaged)
    file.name = "damaged.picture"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = open_srgb(file, max_pixels=1 << 20)
        except ValueError as error:
            assert "damaged.picture cannot be read as an image" in str(error)
        else:
            np.testing.assert_array_equal(read_srgb(file, mode="RGB"), np.asarray(image.convert("RGB")))


def test_what_is_no_picture_is_refused_and_nothing_is_run():
    for file in (b"", b"words", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n"):
        with refuses(ValueError, f"open_srgb: a file of {len(file)} bytes", "none of BMP, GIF, JPEG"):
            open_srgb(file)
    with refuses(ValueError, "it is damaged or none of GIF, WEBP."):
        open_srgb(WHOLE["PNG"], formats=["GIF", "WEBP"])


class Unplugged(io.BytesIO):
    def read(self, size=-1, /):
        if self.tell() > 100:
            raise ConnectionError("the line is dead")
        return super().read(size)


def test_faults_of_reading_are_not_blamed_on_the_picture():
    for read in (open_srgb, read_srgb):
        with refuses(ConnectionError, "the line is dead"):
            read(Unplugged(WHOLE["JPEG"]))


def test_bad_arguments_of_opening(tmp_path):
    with refuses(FileNotFoundError, "open_srgb: ", "nowhere.png does not exist"):
        open_srgb(tmp_path / "nowhere.png")
    with refuses(ValueError, "read_srgb needs a plain file"):
        read_srgb(tmp_path)
    with refuses(TypeError, "open_srgb needs a path, bytes, or a binary file. Got 3 (int)"):
        open_srgb(3)  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "open_srgb needs mode 'RGB', 'RGBA', 'RGBa', 'L' or 'LA'. Got 'CMYK'"):
        open_srgb(b"", mode="CMYK")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs intent 'perceptual', 'relative', 'saturation' or 'absolute'"):
        open_srgb(b"", intent="pretty")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs bad_profile 'warn', 'ignore' or 'raise'"):
        open_srgb(b"", bad_profile="skip")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "needs max_pixels to be an int of at least 1"):
        open_srgb(b"", max_pixels=0)
    for formats in ("PNG", [], ["NONSENSE"]):
        with refuses(ValueError, "needs formats that Pillow can read", "JPEG2000"):
            open_srgb(b"", formats=formats)


def test_without_pillow_there_is_the_line_that_installs_it(monkeypatch):
    for name in ("PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: open_srgb(b""), lambda: to_pillow(np.zeros((2, 2)))):
        with refuses(ImportError, "needs Pillow. Run: pip install 'pillow>=11' 'simplejpeg>=1.8'"):
            call()


# Where images come from, and fast JPEG.


def test_paths_bytes_and_files_are_the_same(tmp_path):
    path = tmp_path / "x.png"
    path.write_bytes(data := saved(PIXELS, "PNG"))
    with path.open("rb") as file:
        file.seek(7)
        for one in (path, str(path), data, bytearray(data), memoryview(data), file, Unseekable(data)):
            np.testing.assert_array_equal(opened(one), PIXELS)
        assert not file.closed


class Unseekable(io.BytesIO):
    def seekable(self):
        return False

    def seek(self, *arguments):
        raise io.UnsupportedOperation("seek")


@pytest.fixture
def decodings(monkeypatch):
    """How often simplejpeg has decoded something."""
    calls, decode = [], simplejpeg.decode_jpeg
    monkeypatch.setattr(simplejpeg, "decode_jpeg", lambda *args: calls.append(args) or decode(*args))
    return calls


SRGB = icc.rgb_profile(icc.SRGB, icc.srgb_curve)
JPEGS = {
    "plain": ({}, {}, True),
    "subsampled": ({"subsampling": "4:2:0"}, {}, True),
    "progressive": ({"progressive": True}, {}, True),
    "sRGB profile": ({"icc_profile": SRGB}, {}, True),
    "other profile": ({"icc_profile": ADOBE}, {}, False),
    "with alpha": ({}, {"mode": "RGBA"}, False),
    "as gray": ({}, {"mode": "L"}, False),
}


@pytest.mark.parametrize("name", JPEGS)
def test_fast_jpeg_gives_the_pixels_of_pillow(name, decodings):
    saving, opening, fast = JPEGS[name]
    file = saved(SMOOTH, "JPEG", **saving)
    expected = np.asarray(open_srgb(file, **opening))
    found = read_srgb(file, **opening)
    assert found.dtype == np.uint8
    assert not found.flags.writeable
    np.testing.assert_array_equal(found, expected.reshape(48, 64, -1))
    assert len(decodings) == fast


def test_fast_jpeg_of_gray(decodings):
    file = saved(SMOOTH[..., 1], "JPEG")
    np.testing.assert_array_equal(read_srgb(file), np.asarray(open_srgb(file)))
    np.testing.assert_array_equal(read_srgb(file, mode="L")[..., 0], np.asarray(open_srgb(file, mode="L")))
    assert len(decodings) == 2


def test_without_simplejpeg_pillow_decodes(monkeypatch):
    file = saved(SMOOTH, "JPEG")
    expected = read_srgb(file)
    monkeypatch.setitem(sys.modules, "simplejpeg", None)
    image_file._simplejpeg.cache_clear()
    np.testing.assert_array_equal(read_srgb(file), expected)
    image_file._simplejpeg.cache_clear()


# Pixels into rows.

SETS = {"fractional": FRACTIONAL, "balanced": balanced(), "wide": balanced(3.0), "ImageNet": IMAGENET}
HALF = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, HALF], ids=str)
def test_pixels_are_written_with_coefficients(name, channels, dtype):
    coefficients = SETS[name]
    pixels = rng.integers(0, 256, (150, 300, channels), dtype=np.uint8)  # more than one block
    scale, offset = (np.ravel(one) for one in (coefficients.scale, coefficients.offset))
    expected = pixels / 255.0
    expected[..., :3] = pixels[..., :3] * scale + offset
    hwc, chw = np.empty((150, 300, channels), dtype), np.empty((channels, 150, 300), dtype)
    write_hwc(Image.fromarray(pixels), hwc, coefficients)
    write_chw(Image.fromarray(pixels), chw, coefficients)
    rounding = {np.float64: 1e-12, np.float32: 1e-6, np.float16: 2e-3}.get(dtype, 1e-2)
    np.testing.assert_allclose(hwc.astype(np.float64), expected, rtol=rounding, atol=rounding)
    assert_trees_equal(chw, np.ascontiguousarray(hwc.transpose(2, 0, 1)))


def test_coefficients_are_the_published_ones():
    row = np.empty((1, 1, 3))
    write_hwc(np.array([[[124, 116, 104]]], np.uint8), row, IMAGENET)
    by_hand = (np.array([124, 116, 104]) / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(row[0, 0], by_hand, rtol=1e-12)
    assert standardized([0.5] * 3, [0.5] * 3) == Coefficients((1 / 127.5,) * 3, (-1.0,) * 3)


def test_fractions_are_pixels_divided_by_255_and_ends_are_exact():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    row = np.empty((16, 16), np.float32)
    write_hwc(levels, row, FRACTIONAL)
    np.testing.assert_array_equal(row, levels / np.float32(255))
    for scale in (1.0, 0.5, 2.0, 0.7):
        write_hwc(levels, row, balanced(scale))
        assert (row.min(), row.max()) == (np.float32(-scale), np.float32(scale))


def test_alpha_has_coefficients_of_its_own():
    row = np.empty((1, 2, 2), np.float32)
    write_hwc(Image.new("LA", (2, 1), (255, 51)), row, Coefficients(1.0, 0.0, alpha=(2.0, 1.0)))
    assert row[0, 0].tolist() == [255.0, 103.0]
    write_hwc(Image.new("LA", (2, 1), (255, 51)), row, balanced())
    np.testing.assert_allclose(row[0, 0], [1.0, 0.2])


def test_without_coefficients_pixels_are_written_as_they_are():
    for dtype in (np.uint8, np.int32, np.float32, np.float16):
        hwc, chw = np.empty((20, 30, 3), dtype), np.empty((3, 20, 30), dtype)
        write_hwc(PIXELS, hwc)
        write_chw(PIXELS, chw)
        np.testing.assert_array_equal(hwc, PIXELS)
        np.testing.assert_array_equal(chw, PIXELS.transpose(2, 0, 1))


def test_gray_goes_into_arrays_with_and_without_an_axis_of_channels():
    gray = Image.fromarray(PIXELS[..., 0])
    for write, shape in ((write_hwc, (20, 30)), (write_hwc, (20, 30, 1)), (write_chw, (1, 20, 30))):
        row = np.empty(shape, np.float32)
        write(gray, row, FRACTIONAL)
        np.testing.assert_array_equal(row.reshape(20, 30), PIXELS[..., 0] / np.float32(255))


def test_parts_of_larger_arrays_are_written_and_nothing_around_them():
    batch = np.full((2, 24, 40, 3), 7, np.float32)
    write_hwc(PIXELS, batch[1, 2:22, 5:35], FRACTIONAL)
    channels_first = np.full((2, 3, 24, 40), 7, np.float32)
    write_chw(PIXELS, channels_first[1, :, 2:22, 5:35], FRACTIONAL)
    for array in (batch, channels_first.transpose(0, 2, 3, 1)):
        np.testing.assert_array_equal(array[1, 2:22, 5:35], PIXELS / np.float32(255))
        assert (array != 7).sum() == PIXELS.size


def test_nothing_of_the_size_of_an_image_is_made_on_the_way():
    pixels = np.zeros((1000, 1000, 3), np.uint8)
    for write, shape, dtype in ((write_hwc, (1000, 1000, 3), np.float32), (write_chw, (3, 1000, 1000), np.float16)):
        row = np.empty(shape, dtype)
        tracemalloc.start()
        write(pixels, row, IMAGENET)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_bad_arguments_of_writing():
    image, row = Image.fromarray(PIXELS), np.empty((20, 30, 3), np.float32)
    with refuses(
        ValueError, "write_hwc needs an array (height, width, channels)", "height 20, width 30 and 3", "(RGB)"
    ):
        write_hwc(image, np.empty((30, 20, 3), np.float32))
    with refuses(ValueError, "write_chw needs an array (channels, height, width)", "shape (20, 30, 3), float32"):
        write_chw(image, row)
    with refuses(ValueError, "4 channels (RGBA)"):
        write_hwc(image.convert("RGBA"), row, FRACTIONAL)
    with refuses(TypeError, "write_hwc needs an array of floats to write with coefficients", "uint8"):
        write_hwc(image, np.empty((20, 30, 3), np.uint8), FRACTIONAL)
    with refuses(TypeError, "needs an array that can hold uint8", "int8"):
        write_hwc(image, np.empty((20, 30, 3), np.int8))
    with refuses(ValueError, "image of the mode RGB, RGBA, RGBa, L or LA. Got P", "open_srgb"):
        write_hwc(image.convert("P"), row)
    with refuses(ValueError, "NumPy array of one image that can be written to", "read-only"):
        write_hwc(image, np.broadcast_to(row, row.shape))
    with refuses(ValueError, "NumPy array of one image that can be written to", "shape (20, 30, 3)"):
        write_hwc(image, jnp.asarray(row))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "write_hwc needs an image, (height, width, channels) of numbers", "(2, 20, 30, 3)"):
        write_hwc(np.stack([PIXELS] * 2), row)
    with refuses(ValueError, "one scale for all colors or one for each. Got 3", "1 channels"):
        write_hwc(PIXELS[..., 0], row[..., 0], IMAGENET)


def test_bad_coefficients():
    with refuses(ValueError, "Coefficients needs scale of finite numbers", "nan"):
        Coefficients(float("nan"), 0.0)
    with refuses(ValueError, "Coefficients needs offset of finite numbers", "'dark'"):
        Coefficients(1.0, "dark")  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "scales other than 0"):
        Coefficients((1.0, 0.0, 1.0), 0.0)
    with refuses(ValueError, "alpha (scale, offset)", "(1.0,)"):
        Coefficients(1.0, 0.0, alpha=(1.0,))  # pyright: ignore[reportArgumentType]
    with refuses(ValueError, "standardized needs a mean and a positive std for each color"):
        standardized([0.5, 0.5], [0.5])


# Back to images.

COLORS = st.lists(st.integers(0, 255), min_size=4, max_size=4)


@given(
    pixel=COLORS,
    scale=st.floats(1e-3, 10),
    offset=st.floats(-10, 10),
    channels=st.integers(1, 4),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_images_come_back_from_what_was_written(pixel, scale, offset, channels, dtype):
    coefficients = Coefficients(scale, offset, alpha=(scale / 2, -offset))
    pixels = np.array(pixel[:channels], np.uint8) * np.ones((2, 3, 1), np.uint8)
    hwc, chw = np.empty((2, 3, channels), dtype), np.empty((channels, 2, 3), dtype)
    write_hwc(pixels, hwc, coefficients)
    write_chw(pixels, chw, coefficients)
    for image in (to_pillow(hwc, coefficients), to_pillow(chw, coefficients, axis=0), to_pillow(pixels)):
        assert image.mode == ("L", "LA", "RGB", "RGBA")[channels - 1]
        np.testing.assert_array_equal(np.asarray(image).reshape(pixels.shape), pixels)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16], ids=str)
def test_every_pixel_value_comes_back(name, dtype):
    levels = np.stack([np.arange(256, dtype=np.uint8).reshape(16, 16)] * 3, axis=-1)
    row = np.empty(levels.shape, dtype)
    write_hwc(levels, row, SETS[name])
    for array in (row, jnp.asarray(row)):
        np.testing.assert_array_equal(np.asarray(to_pillow(array, SETS[name])), levels)


def test_numbers_are_rounded_and_clipped_and_the_array_is_kept():
    numbers = np.array([[-5.0, 0.4, 0.6, 99.6, 254.6, 300.0, np.inf, -np.inf]], np.float32)
    kept = numbers.copy()
    assert np.asarray(to_pillow(numbers)).tolist() == [[0, 0, 1, 100, 255, 255, 255, 0]]
    assert np.asarray(to_pillow(numbers / 255, FRACTIONAL)).tolist() == [[0, 0, 1, 100, 255, 255, 255, 0]]
    np.testing.assert_array_equal(numbers, kept)
    assert np.asarray(to_pillow(np.array([[-1, 256, 7]]))).tolist() == [[0, 255, 7]]
    assert to_pillow(np.zeros((1, 1, 4), np.uint8), mode="RGBa").mode == "RGBa"


def test_bad_arguments_of_going_back():
    with refuses(ValueError, "to_pillow needs numbers. 1 of 12 are NaN"):
        to_pillow(np.where(np.arange(12) == 3, np.nan, 0.5).reshape(2, 2, 3), FRACTIONAL)
    with refuses(ValueError, "to_pillow needs one image", "shape (5, 2, 2, 3)", "one by one"):
        to_pillow(np.zeros((5, 2, 2, 3)), FRACTIONAL)
    with refuses(ValueError, "channels on axis -1", "shape (3, 20, 30)", "need axis=0"):
        to_pillow(np.zeros((3, 20, 30)), FRACTIONAL)
    with refuses(ValueError, "mode='RGBA'", "shape (2, 2, 3)"):
        to_pillow(np.zeros((2, 2, 3)), FRACTIONAL, mode="RGBA")
    with refuses(TypeError, "to_pillow needs floats to undo coefficients", "leave the coefficients out"):
        to_pillow(PIXELS, FRACTIONAL)


# Other numbers for the same colors.


@pytest.mark.parametrize("axis", [-1, 1], ids=["last", "first"])
def test_numbers_go_from_one_set_of_coefficients_to_another(axis):
    image = np.moveaxis(rng.random((2, 5, 6, 4)), -1, axis)
    found = image
    for name, new in SETS.items():
        found = rescale(image, FRACTIONAL, new, axis=axis)
        alpha = [np.take(array, 3, axis) for array in (found, image)]
        np.testing.assert_array_equal(*alpha)
        np.testing.assert_allclose(rescale(found, new, FRACTIONAL, axis=axis), image, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(np.take(found, 0, axis), (np.take(image, 0, axis) - 0.485) / 0.229)
    traced = jax.jit(lambda image: rescale(image, FRACTIONAL, IMAGENET, axis=axis))(image.astype(np.float32))
    np.testing.assert_allclose(traced, found, atol=1e-5)


# Oklab. https://bottosson.github.io/posts/oklab/#table-of-example-xyz-and-oklab-pairs
OTTOSSON = [
    [(0.950, 1.000, 1.089), (1.000, 0.000, 0.000)],
    [(1.000, 0.000, 0.000), (0.450, 1.236, -0.019)],
    [(0.000, 1.000, 0.000), (0.922, -0.671, 0.263)],
    [(0.000, 0.000, 1.000), (0.153, -1.415, -0.449)],
]
# What colorjs.io, by the editors of CSS Color 4, gives for 8-bit sRGB.
COLORJS = [
    [(255, 255, 255), (1, 0, 0)],
    [(0, 0, 0), (0, 0, 0)],
    [(128, 128, 128), (0.5998708056221469, 0, 0)],
    [(254, 1, 1), (0.6262871732047106, 0.22407052063705113, 0.12527327000309313)],
    [(1, 254, 1), (0.8639098058999964, -0.2330757717098325, 0.17886166282839522)],
    [(1, 1, 254), (0.4511343049665099, -0.031935070958989176, -0.3103103423701257)],
    [(1, 254, 254), (0.9027384515389787, -0.14893819606031705, -0.03926738454235723)],
    [(254, 1, 254), (0.6997232142868329, 0.27358575972682664, -0.16856336391920845)],
    [(254, 254, 1), (0.9651131560979367, -0.07111863396799117, 0.19788779483410568)],
]
# web-platform-tests, css/css-color/oklab-001, 004 to 007: (lightness, a, b) and sRGB in percent.
WEB = [
    [(0.51975, -0.1403, 0.10768), (0, 50.196, 0)],
    [(0.5, 0.05, 0), (48.477, 34.29, 38.412)],
    [(0.7, -0.1, 0), (29.264, 70.096, 63.017)],
    [(0.7, 0, 0.125), (73.942, 60.484, 19.65)],
    [(0.55, 0, -0.2), (27.888, 38.072, 89.414)],
]


def pairs(table):
    return np.array(table, np.float64).transpose(1, 0, 2)


def test_oklab_is_as_published():
    xyz, oklab = pairs(OTTOSSON)
    linear = xyz @ np.linalg.inv(icc.to_xyz(icc.SRGB)).T
    np.testing.assert_allclose(linear_to_oklab(linear), oklab, atol=1e-3)
    srgb, oklab = pairs(COLORJS)
    np.testing.assert_allclose(srgb_to_oklab(srgb / 255), oklab, atol=1e-12)
    oklab, percent = pairs(WEB)
    np.testing.assert_allclose(oklab_to_srgb(oklab), percent / 100, atol=2e-4)


def test_white_is_one_zero_zero_in_32_bits_too():
    white = np.ones((1, 3), np.float32)
    np.testing.assert_allclose(srgb_to_oklab(white), [[1, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(jax.jit(srgb_to_oklab)(white), [[1, 0, 0]], atol=1e-6)


def test_light_is_as_published():
    srgb = np.array([[0, 0.001, 0.05], [0.3, 0.6, 0.9], [0.99, 0.999, 1]])
    linear = [
        [0, 0.00007739938080495357, 0.003935939504088967],
        [0.07323895587840543, 0.31854677812509186, 0.7874122893956174],
        [0.9774019338064516, 0.9977266276926824, 1],
    ]
    np.testing.assert_allclose(srgb_to_linear(srgb), linear, rtol=1e-12)
    np.testing.assert_allclose(linear_to_srgb(np.array(linear)), srgb, rtol=1e-6)


WAYS = [(srgb_to_oklab, oklab_to_srgb), (linear_to_oklab, oklab_to_linear), (srgb_to_linear, linear_to_srgb)]
INSIDE = st.lists(st.floats(-0.5, 1.5, width=32), min_size=3, max_size=3)


@given(color=INSIDE, way=st.sampled_from(WAYS))
def test_colors_come_back(color, way):
    there, back = way
    for dtype, rounding in ((np.float64, 1e-9), (np.float32, 2e-4)):
        given_color = np.array(color, dtype)
        found = back(there(given_color))
        assert found.dtype == dtype
        np.testing.assert_allclose(found, given_color, atol=rounding)


@pytest.mark.parametrize("way", [one for both in WAYS for one in both], ids=lambda way: way.__name__)
def test_any_axes_any_place_of_channels_and_alpha_untouched(way):
    image = rng.random((2, 5, 6, 4)).astype(np.float32)
    expected = way(image[..., :3])
    found = way(image)
    np.testing.assert_array_equal(found[..., :3], expected)
    np.testing.assert_array_equal(found[..., 3], image[..., 3])
    for channels in (3, 4):
        first = np.ascontiguousarray(np.moveaxis(image[..., :channels], -1, -3))
        np.testing.assert_array_equal(way(first, axis=-3), np.moveaxis(found[..., :channels], -1, -3))
        np.testing.assert_array_equal(way(first[1], axis=0), np.moveaxis(found[1, ..., :channels], -1, -3))


@jax.jit
def everything(image):
    """All conversions and their gradients, in one program."""
    ways = [one for both in WAYS for one in both]
    return [(way(image), jax.grad(lambda image, way=way: way(image).sum())(image)) for way in ways]


def test_traced_is_the_same_and_gradients_are_numbers():
    ends = np.array([[0, 0, 0], [1, 1, 1], [0, 0, 1], [0, 1, 0], [-0.2, 0.5, 1.3], [1e-30, 0, 0], [0.04045] * 3])
    image = np.concatenate([ends, rng.random((20, 3))]).astype(np.float32)
    for way, (found, gradient) in zip([one for both in WAYS for one in both], everything(image), strict=True):
        np.testing.assert_allclose(found, way(image), atol=2e-5, err_msg=way.__name__)
        assert np.isfinite(gradient).all(), way.__name__
        if way in (srgb_to_oklab, linear_to_oklab):
            assert gradient[0].all(), way.__name__  # black can be left, too
        exact, step = image[7:].astype(np.float64), 1e-6
        slopes = [(way(exact + step * axis) - way(exact - step * axis)).sum(axis=-1) / (2 * step) for axis in np.eye(3)]
        np.testing.assert_allclose(gradient[7:], np.stack(slopes, axis=-1), rtol=2e-2, atol=2e-3, err_msg=way.__name__)


def test_halves_are_computed_with_more_bits():
    image = rng.random((100, 3)).astype(np.float16)
    assert_trees_equal(srgb_to_oklab(image), srgb_to_oklab(image.astype(np.float32)).astype(np.float16))
    found = jax.jit(srgb_to_oklab)(image.astype(HALF))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(np.float32), srgb_to_oklab(image.astype(np.float64)), atol=1e-2)


def test_bad_arguments_of_colors():
    with refuses(TypeError, "srgb_to_oklab needs floats", "uint8", "FRACTIONAL"):
        srgb_to_oklab(PIXELS)
    with refuses(TypeError, "oklab_to_srgb needs a NumPy or JAX array", "list"):
        oklab_to_srgb([1.0, 0.0, 0.0])
    with refuses(ValueError, "srgb_to_oklab needs 3 or 4 channels on axis -1", "shape (3, 20, 30)", "axis=-3"):
        srgb_to_oklab(np.zeros((3, 20, 30)))
    with refuses(ValueError, "rescale needs 1, 2, 3 or 4 channels on axis 5"):
        rescale(np.zeros((2, 2, 3)), FRACTIONAL, IMAGENET, axis=5)


# In pipelines.


def fill(path, arrays, rng):
    write_hwc(read_srgb(path, mode="RGB"), arrays["image"], IMAGENET)
    return {"path": path}


def test_pictures_fill_the_rows_of_a_batch(tmp_path):
    paths = []
    for number, profile in enumerate([None, ADOBE, SRGB]):
        paths.append(str(tmp_path / f"{number}.jpg"))
        Image.fromarray(SMOOTH).save(paths[-1], icc_profile=profile)
    source = ms.sources.FillSource(paths, fill, {"image": ((48, 64, 3), np.float32)}, ordering="sequential", debug=True)
    loader = ms.DataLoader([source, ms.BatchTransform(3)], executor=ms.Threads(2))
    batch, _ = next(loader.iterate(loader.init_state(jax.random.key(0))))
    for row, path in zip(batch["image"], paths, strict=True):
        np.testing.assert_array_equal(np.asarray(to_pillow(row, IMAGENET)), np.asarray(open_srgb(path)))
    assert not np.array_equal(batch["image"][0], batch["image"][1])


def test_folders_of_pictures_are_opened_the_same_way(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    path = tmp_path / "root" / "a" / "x.jpg"
    Image.fromarray(SMOOTH).save(path, icc_profile=ADOBE, exif=exif)
    source = ms.ImageFolderSource(tmp_path / "root", ordering="sequential")
    np.testing.assert_array_equal(source.read(np.array([0]))["image"][0], np.asarray(open_srgb(path)))
    small = ms.ImageFolderSource(tmp_path / "root", size=(8, 6)).read(np.array([0]))["image"][0]
    resized = open_srgb(path).resize((6, 8), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(small, np.asarray(resized))


def test_importing_loads_neither_jax_nor_pillow():
    command = (
        "import sys, numpy as np, millstream.integrations.images as images; "
        "images.write_hwc(np.zeros((2, 2, 3), np.uint8), np.empty((2, 2, 3), np.float32), images.IMAGENET); "
        "images.srgb_to_oklab(np.zeros((2, 2, 3))); "
        "assert not {'jax', 'PIL', 'simplejpeg'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", command], check=True)
