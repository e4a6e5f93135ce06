"""From a picture to what the VAE sees: buckets, crops and mirrors, all in whole pixels of the turned picture.

A picture goes to the bucket whose shape is nearest to its own: it is scaled until it just covers the bucket, cut to it,
and mirrored if the variant is. Everything follows from the picture's id, its size and the settings. Sizes are (width,
height). Light to import: torch only where tensors are made.
"""

import math
from collections.abc import Iterable
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

from trainer.config import Pictures

if TYPE_CHECKING:
    import torch

Size = tuple[int, int]

STEP = 64  # pixels that the sides of a bucket are a multiple of
WIDEST = 2.0  # ratio of its sides
LATENT = 8  # pixels a side of one place of the latents, in all families


class Placement(NamedTuple):
    """What a variant shows of a picture.

    original: size of the picture. scaled: size that it is scaled to. left, top: corner of the bucket in that, in
    pixels, before mirroring. bucket: size of the result. flip: whether it is mirrored from left to right.
    """

    original: Size
    scaled: Size
    left: int
    top: int
    bucket: Size
    flip: bool

    @property
    def time_ids(self) -> tuple[int, int, int, int, int, int]:
        """What SDXL is told: height and width of the original, top and left of the crop, height and width of it.

        Of a mirrored picture the crop is where it is in the mirrored whole.
        """
        left = self.scaled[0] - self.bucket[0] - self.left if self.flip else self.left
        return (self.original[1], self.original[0], self.top, left, self.bucket[1], self.bucket[0])


def buckets(resolution: int, ratios: int) -> list[Size]:
    """The shapes that pictures are cut to, narrowest first, of about the area of a square of `resolution` a side.

    Args:
        resolution: in pixels, a multiple of `STEP`.
        ratios: how many ratios of width to height, evenly spaced on a logarithmic scale from 1:2 to 2:1; odd, so that
            the square is among them. At low resolutions some round to the same shape.
    """
    half = ratios // 2
    places = [place / half for place in range(-half, half + 1)] if half else [0.0]

    def side(share: float) -> int:
        return max(STEP, round(resolution * WIDEST ** (share / 2) / STEP) * STEP)

    return list(dict.fromkeys((side(place), side(-place)) for place in places))


def bucket(size: Size, shapes: Iterable[Size]) -> Size:
    """The shape that the least of a picture is cut off for; of two such the one that is nearer to a square."""

    def shape(size: Size) -> float:
        return math.log(size[0]) - math.log(size[1])

    return min(shapes, key=lambda one: (round(abs(shape(one) - shape(size)), 9), abs(shape(one))))


def scaled(size: Size, bucket: Size) -> Size:
    """The size of a picture when it just covers a bucket."""
    scale = max(bucket[0] / size[0], bucket[1] / size[1])
    return max(bucket[0], round(size[0] * scale)), max(bucket[1], round(size[1] * scale))


def cut_off(size: Size, bucket: Size) -> float:
    """The share of a picture's area that a bucket of another ratio does not show."""
    whole = scaled(size, bucket)
    return 1 - bucket[0] * bucket[1] / (whole[0] * whole[1])


def variants(settings: Pictures) -> range:
    """The numbers of the variants of every picture."""
    return range(settings.variants * (2 if settings.flip else 1))


def place(key: str, size: Size, bucket: Size, settings: Pictures, variant: int) -> Placement:
    """Where one variant of a picture is in it.

    Args:
        key: the picture's id.
        size: the picture's, in pixels.
        bucket: the picture's.
        settings: where crops are.
        variant: one of `variants`: crop * (2 if flip else 1) + flip.
    """
    crop, flip = divmod(variant, 2) if settings.flip else (variant, 0)
    whole = scaled(size, bucket)
    left, top = whole[0] - bucket[0], whole[1] - bucket[1]  # the largest that there can be
    if settings.crop == "center":
        left, top = left // 2, top // 2
    else:
        digits = sha256(f"{settings.seed}:{key}:{crop}".encode()).digest()
        left, top = int.from_bytes(digits[:8]) % (left + 1), int.from_bytes(digits[8:16]) % (top + 1)
    return Placement(size, whole, left, top, bucket, bool(flip))


def pixels(image: Image.Image, placement: Placement) -> "torch.Tensor":
    """What the VAE sees.

    Args:
        image: the picture as `pictures.open_rgb` gives it.
        placement: of the variant.

    Returns:
        Float 32, [3, height, width] of the bucket, from -1 to 1.
    """
    import torch

    shown = np.asarray(_placed(image, placement, Image.Resampling.LANCZOS), np.float32)
    return torch.from_numpy(shown / np.float32(127.5) - 1).permute(2, 0, 1).contiguous()


def mask(image: Image.Image, placement: Placement) -> "torch.Tensor":
    """How much each place of a variant's latents counts.

    Args:
        image: the mask, a picture of the size of the picture; white counts, black does not.
        placement: of the variant.

    Returns:
        Float 32, [height, width] of the bucket over `LATENT`, from 0 to 1: means of the pixels there.
    """
    import torch

    shown = np.asarray(_placed(image.convert("L"), placement, Image.Resampling.BILINEAR), np.float32)
    height, width = (side // LATENT for side in shown.shape)
    means = shown.reshape(height, LATENT, width, LATENT).mean((1, 3)) / np.float32(255)
    return torch.from_numpy(means)


def _placed(image: Image.Image, placement: Placement, how: Image.Resampling) -> Image.Image:
    left, top, (width, height) = placement.left, placement.top, placement.bucket
    if image.size != placement.original:
        raise ValueError(f"a picture of {image.size} is placed as one of {placement.original}")
    cut = image.resize(placement.scaled, how).crop((left, top, left + width, top + height))
    return cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if placement.flip else cut
