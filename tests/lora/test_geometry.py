"""From a picture to what the VAE sees: buckets, crops, mirrors and time ids, in whole pixels."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from tiny_pictures import picture
from trainer.config import Pictures
from trainer.files import digest
from trainer.lora import geometry

KEY = "0123456789abcdef"
RESOLUTIONS = st.integers(1, 32).map(lambda steps: steps * 64)
RATIOS = st.integers(0, 16).map(lambda half: 2 * half + 1)
SIZES = st.tuples(st.integers(1, 4000), st.integers(1, 4000))


def place(size, bucket, variant=0, **changes):
    return geometry.place(KEY, size, bucket, Pictures(**changes), variant)


# Buckets


def test_buckets_are_nine_shapes_of_one_area_from_narrow_to_wide():
    assert geometry.buckets(1024, 9) == [
        (704, 1472),
        (768, 1344),
        (832, 1216),
        (960, 1088),
        (1024, 1024),
        (1088, 960),
        (1216, 832),
        (1344, 768),
        (1472, 704),
    ]
    assert geometry.buckets(768, 1) == [(768, 768)]


@pytest.mark.parametrize(("resolution", "count"), [(512, 11), (768, 19), (1024, 25)])
def test_of_all_ratios_there_are_as_many_shapes_as_the_rule_gives(resolution, count):
    assert len(geometry.buckets(resolution, 20001)) == count


@given(resolution=RESOLUTIONS, ratios=RATIOS)
def test_sides_are_multiples_of_64_squares_are_there_and_every_shape_lies_down_too(resolution, ratios):
    shapes = geometry.buckets(resolution, ratios)
    assert all(side % 64 == 0 and side > 0 for shape in shapes for side in shape)
    assert (resolution, resolution) in shapes
    assert len(set(shapes)) == len(shapes) <= ratios
    assert {(height, width) for width, height in shapes} == set(shapes)


@given(size=SIZES, resolution=RESOLUTIONS, ratios=RATIOS)
@example(size=(1292, 1000), resolution=1024, ratios=9)  # between 1.13 and 1.46: nearer to the second by what is cut
@example(size=(3000, 100), resolution=512, ratios=9)
def test_a_picture_goes_where_least_is_cut_off_and_turned_it_goes_to_the_turned_bucket(size, resolution, ratios):
    shapes = geometry.buckets(resolution, ratios)
    bucket = geometry.bucket(size, shapes)
    turned = geometry.bucket(size[::-1], shapes)
    assert turned == bucket[::-1]

    def lost(shape):
        return abs(math.log(size[0] / size[1]) - math.log(shape[0] / shape[1]))

    assert lost(bucket) <= min(map(lost, shapes)) + 1e-8
    if size[0] == size[1]:
        assert bucket == (resolution, resolution)


@given(size=SIZES, resolution=RESOLUTIONS, ratios=RATIOS)
def test_a_scaled_picture_covers_its_bucket_with_one_side_and_keeps_its_ratio(size, resolution, ratios):
    bucket = geometry.bucket(size, geometry.buckets(resolution, ratios))
    width, height = geometry.scaled(size, bucket)
    assert width == bucket[0] or height == bucket[1]
    assert width >= bucket[0]
    assert height >= bucket[1]
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    assert abs(width - size[0] * scale) <= 0.5 + 1e-6
    assert abs(height - size[1] * scale) <= 0.5 + 1e-6
    assert 0 <= geometry.cut_off(size, bucket) < 1


@given(size=SIZES, resolution=RESOLUTIONS)
def test_in_squares_the_short_side_is_scaled_to_the_resolution(size, resolution):
    scale = resolution / min(size)
    expected = tuple(max(resolution, round(side * scale)) for side in size)
    assert geometry.scaled(size, (resolution, resolution)) == expected


# Crops, mirrors and time ids


@settings(max_examples=300)
@given(
    size=SIZES,
    resolution=RESOLUTIONS,
    crop=st.sampled_from(["center", "random"]),
    flip=st.booleans(),
    data=st.data(),
)
def test_time_ids_are_whole_pixels_inside_the_scaled_picture(size, resolution, crop, flip, data):
    chosen = Pictures(crop=crop, flip=flip, variants=4 if crop == "random" else 1)
    bucket = geometry.bucket(size, geometry.buckets(resolution, 9))
    variant = data.draw(st.sampled_from(geometry.variants(chosen)))
    placed = geometry.place(KEY, size, bucket, chosen, variant)
    height, width, top, left, out_height, out_width = placed.time_ids
    assert all(type(value) is int for value in placed.time_ids)
    assert ((width, height), (out_width, out_height)) == (size, bucket)
    assert 0 <= top <= placed.scaled[1] - bucket[1]
    assert 0 <= left <= placed.scaled[0] - bucket[0]
    if crop == "center":
        assert placed.top == (placed.scaled[1] - bucket[1]) // 2
        assert placed.left == (placed.scaled[0] - bucket[0]) // 2
    assert digest(placed) == digest(list(placed))  # which is how it comes into a key


def test_the_time_ids_of_a_mirrored_crop_are_where_it_is_in_the_mirrored_picture():
    # 1333 x 1000 covers 512 x 512 as 682 x 512: 170 columns do not show.
    plain, mirrored = (place((1333, 1000), (512, 512), variant, flip=True) for variant in (0, 1))
    assert plain.scaled == (682, 512)
    assert plain.time_ids == (1000, 1333, 0, 85, 512, 512)
    assert mirrored.time_ids == (1000, 1333, 0, 85, 512, 512)
    odd, mirrored = (place((1334, 1000), (512, 512), variant, flip=True) for variant in (0, 1))
    assert (odd.scaled, odd.time_ids[3], mirrored.time_ids[3]) == ((683, 512), 85, 86)
    sideways = [place((1001, 3000), (512, 512), 2 * n + 1, flip=True, crop="random", variants=4) for n in range(4)]
    assert {one.time_ids[3] for one in sideways} == {0}
    crops = [
        [place((3000, 1001), (512, 512), 2 * n + side, flip=True, crop="random", variants=4) for side in (0, 1)]
        for n in range(4)
    ]
    assert len({one.left for one, _ in crops}) == 4
    for one, other in crops:
        assert (one.left, one.top, one.flip, other.flip) == (other.left, other.top, False, True)
        assert one.time_ids[3] + other.time_ids[3] == one.scaled[0] - 512
        assert one.time_ids[3] == one.left


def test_values_that_bf16_would_round_stay_as_they_are():
    ids = place((1333, 1023), (512, 512)).time_ids
    assert ids[:2] == (1023, 1333)
    assert torch.tensor(ids, dtype=torch.float32).tolist() == list(ids)
    assert torch.tensor(ids, dtype=torch.bfloat16).tolist() != list(ids)


def test_random_crops_reach_both_ends_and_follow_from_id_seed_and_number_alone():
    chosen = Pictures(crop="random", variants=16)
    seen = [geometry.place(f"{n:016x}", (70, 64), (64, 64), chosen, 0).left for n in range(200)]
    assert set(seen) == set(range(7))
    again = [geometry.place(f"{n:016x}", (70, 64), (64, 64), Pictures(crop="random"), 0).left for n in range(200)]
    assert seen == again  # more variants change none that was there
    other = [geometry.place(f"{n:016x}", (70, 64), (64, 64), Pictures(crop="random", seed=9), 0).left for n in range(9)]
    assert seen[:9] != other
    assert len(geometry.variants(Pictures(crop="random", variants=3, flip=True))) == 6
    assert list(geometry.variants(Pictures())) == [0]


# Pixels


@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(20, 300), st.integers(20, 300)),
    crop=st.sampled_from(["center", "random"]),
    flip=st.booleans(),
)
def test_pixels_are_those_of_the_scaled_picture_at_the_crop(size, crop, flip):
    image = picture(4, size)
    bucket = geometry.bucket(size, geometry.buckets(128, 9))
    placed = place(size, bucket, int(flip), crop=crop, flip=flip)
    shown = geometry.pixels(image, placed)
    assert shown.shape == (3, bucket[1], bucket[0])
    assert shown.dtype == torch.float32
    assert shown.is_contiguous()
    whole = np.asarray(image.resize(placed.scaled, Image.Resampling.LANCZOS)).astype(np.float64)
    cut = whole[placed.top : placed.top + bucket[1], placed.left : placed.left + bucket[0]]
    if flip:
        cut = cut[:, ::-1]
    assert np.abs(shown.permute(1, 2, 0).numpy() - (cut / 255 * 2 - 1)).max() < 1e-6
    assert torch.equal(shown, geometry.pixels(image, placed))
    # The same by the mirrored whole and the time ids, which are of that.
    _, _, top, left, height, width = placed.time_ids
    side = ImageOps.mirror(image.resize(placed.scaled, Image.Resampling.LANCZOS)) if flip else None
    if side:
        expected = np.asarray(side)[top : top + height, left : left + width].astype(np.float32)
        assert np.abs(shown.permute(1, 2, 0).numpy() - (expected / 127.5 - 1)).max() < 1e-6


def test_a_picture_of_its_buckets_size_is_not_touched_and_black_and_white_are_the_ends():
    image = picture(5, (64, 128))
    shown = geometry.pixels(image, place((64, 128), (64, 128)))
    assert np.array_equal(np.round((shown.permute(1, 2, 0).numpy() + 1) * 127.5), np.asarray(image))
    ends = Image.new("RGB", (64, 64))
    ends.paste("white", (0, 0, 32, 64))
    assert geometry.pixels(ends, place((64, 64), (64, 64)))[:, 0].unique().tolist() == [-1, 1]


def test_a_picture_is_not_placed_by_another_ones_size():
    with pytest.raises(ValueError, match="placed as one of"):
        geometry.pixels(picture(1, (64, 65)), place((64, 64), (64, 64)))


@settings(max_examples=25, deadline=None)
@given(size=st.tuples(st.integers(64, 300), st.integers(64, 300)), flip=st.booleans(), seed=st.integers(0, 9))
def test_a_mask_covers_what_its_picture_shows_there(size, flip, seed):
    """A picture that is its own mask: the means of what the VAE sees are the mask."""
    assume(max(size) < 4 * min(size))
    grey = picture(seed, size).convert("L")
    bucket = geometry.bucket(size, geometry.buckets(128, 9))
    placed = place(size, bucket, int(flip), crop="random", flip=flip)
    weights = geometry.mask(grey.convert("RGB"), placed)
    assert weights.shape == (bucket[1] // 8, bucket[0] // 8)
    assert weights.dtype == torch.float32
    seen = (geometry.pixels(grey.convert("RGB"), placed)[:1] + 1) / 2
    means = torch.nn.functional.avg_pool2d(seen, 8)[0]
    assert (weights - means).abs().max() < 0.04


def test_a_mask_counts_white_whole_black_not_and_edges_by_their_share():
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 20, 64))
    row = geometry.mask(mask, place((64, 64), (64, 64)))[3]
    assert row.tolist() == [1, 1, 0.5, 0, 0, 0, 0, 0]
    mirrored = geometry.mask(mask, place((64, 64), (64, 64), 1, flip=True))[3]
    assert mirrored.tolist() == row.tolist()[::-1]


# Settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"resolution": 500},
        {"resolution": 32},
        {"ratios": 4},
        {"variants": 17, "crop": "random"},
        {"variants": 2},
        {"holdout": 0.6},
        {"regularization_weight": 0},
        {"regularization_weight": float("inf")},
        {"folder": "a", "regularization": "a"},
        {"uncaptioned": "drop"},
        {"resolutoin": 512},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Pictures(**wrong)


def test_settings_of_the_command_line_are_strings_and_blanks_are_none():
    given_as = {"resolution": "512", "flip": "true", "instance_prompt": " ", "caption_column": "", "folder": "~/a"}
    chosen = Pictures(**given_as)
    assert (chosen.resolution, chosen.flip, chosen.instance_prompt, chosen.caption_column) == (512, True, None, "text")
    assert not chosen.folder.startswith("~")
