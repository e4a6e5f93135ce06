"""One picture: what a teacher sees of a file, and when two files show the same."""

import struct
import zlib
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngImageFile
from tiny_pictures import encoded, picture
from trainer import near_pictures, pictures, reference_areas
from trainer.errors import TrainerError


def opened(tmp_path, data, name="a.jpg"):
    path = tmp_path / name
    path.write_bytes(data)
    return np.asarray(pictures.open_rgb(path)).astype(int)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_orientation_says(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "JPEG", "WEBP"):
        stored = encoded(picture(1), kind, exif=exif)
        upright = ImageOps.exif_transpose(Image.open(BytesIO(stored)))
        assert np.array_equal(opened(tmp_path, stored), np.asarray(upright))
        assert upright.size == ((36, 48) if orientation > 4 else (48, 36))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("orientation", range(9))
def test_the_size_in_the_header_is_that_of_the_picture(tmp_path, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {} if kind == "BMP" else {"exif": exif}
    path = tmp_path / "a"
    path.write_bytes(encoded(picture(1, (40, 24)), kind, **options))
    image = pictures.open_rgb(path)
    assert pictures.size(path) == (image.height, image.width)
    path.write_bytes(path.read_bytes()[:12])
    with pytest.raises(TrainerError, match="cannot be read"):
        pictures.size(path)


def test_the_size_of_a_png_is_read_without_its_pixels_and_with_notes_behind_them(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    name, notes = b"eXIf", exif.tobytes()[6:]
    chunk = struct.pack(">I", len(notes)) + name + notes + struct.pack(">I", zlib.crc32(name + notes))
    plain = encoded(picture(1, (40, 24)))
    path, turned = tmp_path / "a.png", tmp_path / "b.png"
    path.write_bytes(plain)
    turned.write_bytes(plain[:-12] + chunk + plain[-12:])
    assert pictures.open_rgb(turned).size == (24, 40)
    assert pictures.size(turned) == (40, 24)
    monkeypatch.setattr(PngImageFile, "load", lambda image: pytest.fail("the pixels were decoded"))
    assert pictures.size(path) == (24, 40)


def test_of_a_phones_file_of_two_pictures_the_first_counts(tmp_path):
    both = encoded(picture(1), "MPO", save_all=True, append_images=[picture(2)], quality=95)
    assert np.abs(opened(tmp_path, both) - np.asarray(picture(1)).astype(int)).mean() < 8
    assert pictures.measure(both).suffix == ".jpg"


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_notes_do_not_cost_the_picture(tmp_path):
    good = encoded(picture(1), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff\x01\x12")
    assert opened(tmp_path, good).shape == (36, 48, 3)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_parts_are_white(tmp_path, mode):
    image = Image.new("RGBA", (4, 4), (10, 20, 30, 255))
    image.paste((200, 0, 0, 0), (0, 0, 2, 4))
    if mode == "P":
        flat = image.convert("RGB").quantize(4)
        hidden = flat.getpixel((0, 0))
        data = encoded(flat, transparency=hidden)
    else:
        data = encoded(image.convert(mode), "PNG")
    seen = opened(tmp_path, data)
    assert np.array_equal(seen[:, :2], np.full((4, 2, 3), 255))
    assert seen[:, 2:].max() < 40


def test_half_transparent_is_mixed_with_white(tmp_path):
    seen = opened(tmp_path, encoded(Image.new("RGBA", (2, 2), (0, 0, 0, 128))))
    assert np.abs(seen - 127).max() <= 1


def test_sixteen_bits_are_scaled_to_eight(tmp_path):
    deep = np.array([[0, 256 * 100, 65535]], np.uint16)
    seen = opened(tmp_path, encoded(Image.fromarray(deep)))
    assert seen[0, :, 0].tolist() == [0, 100, 255]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP"])
@pytest.mark.parametrize("kept", [0.0, 0.02, 0.5, 0.9])
def test_a_truncated_file_is_one_sentence(tmp_path, kind, kept):
    noise = np.random.default_rng(0).integers(0, 256, (96, 96, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(TrainerError) as error:
        opened(tmp_path, data[: int(kept * len(data))])
    assert "a.jpg cannot be read" in str(error.value)
    assert "\n" not in str(error.value)


def test_other_formats_and_missing_files_are_one_sentence(tmp_path):
    with pytest.raises(TrainerError, match="no JPEG, PNG, WebP or BMP picture"):
        opened(tmp_path, encoded(picture(1), "GIF"))
    with pytest.raises(TrainerError, match="No such file"):
        pictures.open_rgb(tmp_path / "none.png")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_the_damage_only_a_value_error_comes_out(data):
    good = bytearray(encoded(picture(3), data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "BMP"]))))
    for place, value in data.draw(st.dictionaries(st.integers(0, len(good) - 1), st.integers(0, 255))).items():
        good[place] = value
    measured, said = None, "said"
    try:
        measured = pictures.measure(bytes(good))
    except ValueError as error:
        said = str(error)
    assert said
    assert "\n" not in said
    assert measured is None or len(measured.thumbnail) == 192


def test_files_that_show_the_same_have_one_digest_whatever_their_format():
    upright = picture(5)
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(upright.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif)
    files = [encoded(upright, "PNG"), encoded(upright, "BMP"), encoded(upright, "WEBP", lossless=True), turned]
    assert len({pictures.measure(data).digest for data in files}) == 1
    assert {pictures.measure(data).suffix for data in files} == {".png", ".bmp", ".webp"}
    others = [encoded(picture(6)), encoded(picture(5, (36, 48))), encoded(upright.convert("L"))]
    assert len({pictures.measure(data).digest for data in [files[0], *others]}) == 4


# Near-identical pictures


def thumbnails(*images):
    files = [data if isinstance(data, bytes) else encoded(data) for data in images]
    return np.stack([np.frombuffer(pictures.measure(data).thumbnail, np.uint8) for data in files])


def test_copies_in_another_size_or_quality_are_near_identical_and_others_are_not():
    original = picture(1, (320, 240))
    copies = [
        encoded(original, "JPEG", quality=30),
        original.resize((160, 120), Image.Resampling.LANCZOS),
        original.resize((311, 242), Image.Resampling.BICUBIC),
        encoded(original, "WEBP", quality=50),
    ]
    others = [picture(number) for number in range(2, 30)]
    mirrored = original.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    groups = near_pictures.groups(thumbnails(original, *copies, mirrored, *others))
    assert len(set(groups[:5].tolist())) == 1
    assert len(set(groups.tolist())) == 1 + 1 + 28


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 60), spread=st.sampled_from([3, 6, 10, 40]))
def test_the_search_finds_what_comparing_all_pairs_finds(seed, count, spread):
    values = np.random.default_rng(seed).integers(100, 100 + spread, (count, 12), dtype=np.uint8)
    blocks = near_pictures._BLOCK
    near_pictures._BLOCK = 7
    try:
        found = near_pictures.groups(values)
    finally:
        near_pictures._BLOCK = blocks
    distance = ((values[:, None].astype(int) - values) ** 2).mean(-1)
    reach = distance <= near_pictures.RADIUS**2
    for _ in range(count):
        reach = reach @ reach
    assert np.array_equal(found[:, None] == found, reach)


# Reference areas

SHARES = [(147456, 0.35), (262144, 0.35), (589824, 0.20), (1048576, 0.10)]


def test_areas_are_drawn_with_their_shares_and_always_the_same():
    drawn = [reference_areas.draw([f"{n:032x}.jpg"], "make it blue", SHARES, 262144) for n in range(4000)]
    for area, share in SHARES:
        assert abs(drawn.count(area) / 4000 - share) < 0.03
    assert drawn == [reference_areas.draw([f"{n:032x}.jpg"], "make it blue", SHARES, 262144) for n in range(4000)]
    # The SHA-1 of "b.jpg|b" begins with d70e, which is 0.840 of the way: in the third of the cumulative shares.
    assert [reference_areas.draw([f"{name}.jpg"], "b", SHARES, 262144) for name in "abc"] == [147456, 589824, 147456]


def test_two_pictures_take_only_the_areas_that_fit():
    drawn = {reference_areas.draw([f"{n}.jpg", "b.jpg"], "", SHARES, 262144) for n in range(200)}
    assert drawn == {147456, 262144}
    assert {reference_areas.draw([f"{n}.jpg", "b.jpg"], "", SHARES, 5000) for n in range(20)} == {147456}
