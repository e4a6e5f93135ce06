"""Reference pictures as the engine shows them to Qwen3-VL's vision tower: the same pixels, cut into patches.

A picture is uint8 RGB [H, W, 3], upright and without transparency. Both models of the engine pick the nearest pixel:
of `size` pixels made of `length`, number i is number i * length // size.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

# A row of the tower's output stands for a square of SLOT pixels: MERGE x MERGE patches of PATCH pixels. The tower takes
# films; a picture is one of FRAMES equal frames.
PATCH, MERGE, FRAMES = 16, 2, 2
SLOT = PATCH * MERGE
ROW = 3 * FRAMES * PATCH**2  # values of a patch
_LONGEST = 384
_CLIP_MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
_CLIP_STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)

Size = tuple[int, int]
Pixels = NDArray[np.float32]


def mageflow_size(height: int, width: int, area: int | None = None) -> Size:
    """Height and width at which MageFlow's tower sees a picture.

    Args:
        height: of the picture, in pixels.
        width: likewise.
        area: of no meaning here; other models take it.
    """
    if max(height, width) <= _LONGEST:
        return _rounded(height), _rounded(width)
    scale = _LONGEST / max(height, width)
    high, wide = (max(SLOT, int(side * scale / SLOT) * SLOT) for side in (height, width))
    return high, wide


def qwen_image_size(height: int, width: int, area: int) -> Size:
    """Height and width at which Qwen-Image's tower sees a picture, for about `area` pixels in its own proportions."""
    wide = (area * width // height) ** 0.5
    return _rounded(wide * height / width), _rounded(wide)


def mageflow_pixels(image: NDArray[np.uint8], size: Size) -> Pixels:
    """A picture that fills `size`, cut at its middle, standardized as CLIP's, [h, w, 3]."""
    scale = max(np.float32(to) / np.float32(of) for of, to in zip(image.shape, size, strict=False))
    rows, columns = (_covering(of, to, scale) for of, to in zip(image.shape, size, strict=False))
    return (_unit(image[rows[:, None], columns]) - _CLIP_MEAN) / _CLIP_STD


def qwen_image_pixels(image: NDArray[np.uint8], size: Size) -> Pixels:
    """A picture stretched to `size`, from -1 to 1, [h, w, 3]."""
    rows, columns = (np.arange(to) * of // to for of, to in zip(image.shape, size, strict=False))
    return 2 * _unit(image[rows[:, None], columns]) - 1


def patches(pixels: Pixels) -> NDArray[np.float32]:
    """What the tower reads of [h, w, 3], sides being multiples of 32: [N, 3 * FRAMES * PATCH * PATCH].

    N = h / PATCH * w / PATCH; the MERGE x MERGE patches of a row of its output follow each other.
    """
    high, wide, channels = pixels.shape
    cut = pixels.reshape(high // SLOT, MERGE, PATCH, wide // SLOT, MERGE, PATCH, channels)
    cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    frames = np.broadcast_to(cut, (*cut.shape[:5], FRAMES, PATCH, PATCH))
    return frames.reshape(-1, channels * FRAMES * PATCH * PATCH)


def _rounded(side: float) -> int:
    """The nearest multiple of 32 from 32 on, the upper one of two, as C rounds."""
    return max(SLOT, int(side / SLOT + 0.5) * SLOT)


def _covering(length: int, size: int, scale: np.float32) -> NDArray[np.int64]:
    """The `size` middle ones of `length` pixels that were scaled.

    Where f32 leaves one too few, the last repeats; the engine ends with an error on such a picture.
    """
    scaled = int(np.float32(length) * scale)
    places = np.arange(size) + max(scaled - size, 0) // 2
    return np.minimum(places, scaled - 1) * length // scaled


def _unit(image: NDArray[Any]) -> Pixels:
    return image.astype(np.float32) / np.float32(255)
