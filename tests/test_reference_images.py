"""Reference pictures reach the tower as the engine would show them, to the pixel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer import reference_images as pictures
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
sides = st.integers(1, 1500)
few = settings(max_examples=40, deadline=None)


def picture(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def f32(value):
    return np.float32(value)


def c_round(value):
    """To the nearest whole number, the larger one of two."""
    return int(np.floor(value + 0.5))


def slow_mageflow_size(height, width):
    """Of tests/test_engine.py: what the real engine does."""
    if max(height, width) <= 384:
        return tuple(max(32, c_round(side / 32) * 32) for side in (height, width))
    beta = 384 / max(height, width)
    return tuple(max(32, int(np.floor(side * beta / 32)) * 32) for side in (height, width))


def slow_mageflow_pixel(image, y, x, height, width):
    """One pixel, step by step: scale, repeat the edge, crop."""
    scale = max(f32(f32(height) / f32(len(image))), f32(f32(width) / f32(len(image[0]))))
    scaled_height, scaled_width = int(f32(len(image)) * scale), int(f32(len(image[0])) * scale)
    padded_height, padded_width = max(scaled_height, height), max(scaled_width, width)
    y += (padded_height - height) // 2
    x += (padded_width - width) // 2
    y, x = min(y, scaled_height - 1), min(x, scaled_width - 1)
    color = image[y * len(image) // scaled_height][x * len(image[0]) // scaled_width]
    return [(float(color[c]) / 255 - MEAN[c]) / STD[c] for c in range(3)]


@few
@given(height=sides, width=sides, seed=st.integers(0, 9))
def test_mageflow_shows_the_pixels_of_the_slow_reference(height, width, seed):
    image = picture(height, width, seed)
    size = pictures.mageflow_size(height, width)
    assert size == slow_mageflow_size(height, width)
    pixels = pictures.mageflow_pixels(image, size)
    assert pixels.dtype == np.float32
    assert pixels.shape == (*size, 3)
    ends = [(0, 0), (size[0] - 1, size[1] - 1), (0, size[1] - 1), (size[0] - 1, 0)]
    for y, x in [*ends, *np.random.default_rng(seed).integers(0, size, (100, 2)).tolist()]:
        assert pixels[y, x] == pytest.approx(slow_mageflow_pixel(image, y, x, *size), abs=1e-5)


@few
@given(height=sides, width=sides, area=st.sampled_from([384**2, 512**2, 768**2]))
def test_qwen_image_shows_the_pixels_of_the_slow_reference(height, width, area):
    image = picture(height, width)
    wide = ((area * width) // height) ** 0.5
    expected = [max(32, c_round(side / 32) * 32) for side in (wide * height / width, wide)]
    size = pictures.qwen_image_size(height, width, area)
    assert list(size) == expected
    if max(size) > 4000:
        return
    pixels = pictures.qwen_image_pixels(image, size)
    assert pixels.dtype == np.float32
    ends = [(0, 0), (size[0] - 1, size[1] - 1)]
    for y, x in [*ends, *np.random.default_rng(area).integers(0, size, (100, 2)).tolist()]:
        color = image[y * height // size[0]][x * width // size[1]]
        assert pixels[y, x] == pytest.approx([2 * float(value) / 255 - 1 for value in color], abs=1e-6)


@few
@given(height=st.integers(1, 20000), width=st.integers(1, 20000))
def test_mageflow_never_takes_more_than_144_tokens(height, width):
    high, wide = pictures.mageflow_size(height, width)
    assert high % 32 == wide % 32 == 0
    assert 1 <= high // 32 * wide // 32 <= 144


def test_a_pixel_that_f32_leaves_out_is_that_of_the_edge():
    """In exact arithmetic nothing would ever be a pixel short."""
    image = picture(41, 42)
    assert pictures.mageflow_size(41, 42) == (32, 32)
    pixels = pictures.mageflow_pixels(image, (32, 32))  # 31 rows, the last one twice
    assert np.array_equal(pixels[31], pixels[30])
    assert pixels[31, 31] == pytest.approx(slow_mageflow_pixel(image, 31, 31, 32, 32), abs=1e-5)


def test_half_a_slot_rounds_up():
    assert pictures.mageflow_size(48, 80) == (64, 96)
    assert pictures.mageflow_size(16, 15) == (32, 32)
    assert pictures.qwen_image_size(500, 500, 80**2) == (96, 96)


def test_large_pictures_shrink_from_their_own_sides_and_not_from_rounded_ones():
    assert pictures.mageflow_size(400, 384) == (384, 352)
    assert pictures.mageflow_size(427, 640) == (256, 384)


@pytest.mark.parametrize(("side", "tokens"), [(384, 144), (512, 256), (768, 576), (1024, 1024)])
def test_token_counts_at_the_four_areas(side, tokens):
    high, wide = pictures.qwen_image_size(600, 600, side**2)
    assert (high // 32) * (wide // 32) == tokens
    assert len(pictures.patches(np.zeros((high, wide, 3), np.float32))) == 4 * tokens


def test_patches_lie_as_transformers_lays_them():
    image = picture(96, 160)
    for pixels, mean, std in (
        (pictures.mageflow_pixels(image, (96, 160)), MEAN, STD),
        (pictures.qwen_image_pixels(image, (96, 160)), (0.5,) * 3, (0.5,) * 3),
    ):
        processor = Qwen2VLImageProcessorPil(
            do_resize=False, image_mean=mean, image_std=std, patch_size=16, temporal_patch_size=2, merge_size=2
        )
        expected = processor(images=[image], return_tensors="np")
        assert expected["image_grid_thw"].tolist() == [[1, 6, 10]]
        found = pictures.patches(pixels)
        assert found.flags.c_contiguous
        np.testing.assert_allclose(found, expected["pixel_values"], atol=1e-6)
