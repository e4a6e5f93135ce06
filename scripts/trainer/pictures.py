"""One picture: decoded as teachers see it, and told apart from others by what it shows.

The file of a picture is kept as it came. What a teacher sees is decoded from it, always by `open_rgb`: turned as its
EXIF orientation says, laid over white where it is transparent, RGB. The digest and the thumbnail of a picture are of
that, not of the file.
"""

import hashlib
import warnings
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainer.errors import TrainerError

# The decoders that may see foreign bytes, and the suffix of their files.
_SUFFIXES = {"JPEG": ".jpg", "PNG": ".png", "WEBP": ".webp", "BMP": ".bmp"}
THUMBNAIL = 8  # pixels a side
MOST_PIXELS = 89_478_485  # of a picture that a diffusion model is trained on: beyond, Pillow warns of bombs

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = {
    Image.Transpose.TRANSPOSE,
    Image.Transpose.ROTATE_270,
    Image.Transpose.TRANSVERSE,
    Image.Transpose.ROTATE_90,
}


class Measured(NamedTuple):
    """What a picture shows.

    digest: 32 hex digits, the same for all files with the same size and pixels.
    suffix: of a file of this format.
    thumbnail: RGB bytes of the picture scaled to `THUMBNAIL` x `THUMBNAIL`.
    """

    digest: str
    suffix: str
    thumbnail: bytes


def open_rgb(path: str | Path) -> Image.Image:
    """The picture in a file as a teacher sees it, in mode RGB.

    Raises:
        TrainerError: it is missing, corrupt, truncated, or no JPEG, PNG, WebP or BMP picture.
    """
    try:
        return _decoded(Path(path).read_bytes())[0]
    except (OSError, ValueError) as error:
        raise TrainerError(f"the picture {path} cannot be read ({_reason(error)}); replace or remove it") from None


def size(path: str | Path) -> tuple[int, int]:
    """Height and width of the picture in a file as `open_rgb` gives it; only the file's header is read.

    Raises:
        TrainerError: it is missing, or the header is none of such a picture.
    """
    try:
        with Image.open(path, formats=list(_SUFFIXES)) as image:
            width, height = image.size
            # A PNG may have notes behind its pixels, all of which Pillow decodes to get there.
            decodes = image.format != "PNG" or _notes_behind_pixels(path)
            turned = _TURNS.get(_orientation(image, decodes)) in _SIDEWAYS
    except Exception as error:  # on damaged bytes decoders raise whatever they run into
        raise TrainerError(f"the picture {path} cannot be read ({_reason(error)}); replace or remove it") from None
    return (width, height) if turned else (height, width)


def measure(data: bytes) -> Measured:
    """What the picture in the bytes of a file shows.

    Raises:
        ValueError: why it cannot be decoded, in a few words.
    """
    image, suffix = _decoded(data)
    content = hashlib.sha256(f"{image.width}x{image.height}:".encode() + image.tobytes())
    thumbnail = image.resize((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)
    return Measured(content.hexdigest()[:32], suffix, thumbnail.tobytes())


def unfit(data: bytes) -> str:
    """Why a picture that `measure` might take is none to train a diffusion model on; empty if it is one.

    Only the header is read: of bytes that are no picture `measure` says more.
    """
    if not data:
        return "the file is empty"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # told below
            with Image.open(BytesIO(data), formats=list(_SUFFIXES)) as image:
                (width, height), frames = image.size, getattr(image, "n_frames", 1)
                moves = frames > 1 and image.format != "MPO"  # a phone's, whose further pictures are smaller ones
    except Image.DecompressionBombError:
        return f"more than {2 * MOST_PIXELS / 1e6:.0f} million pixels"
    except Exception:
        return ""
    if width * height > MOST_PIXELS:
        return f"{width} x {height} are more than {MOST_PIXELS / 1e6:.0f} million pixels"
    return f"it is animated: {frames} pictures in one" if moves else ""


def _decoded(data: bytes) -> tuple[Image.Image, str]:
    try:
        with Image.open(BytesIO(data), formats=list(_SUFFIXES)) as image:
            image.load()
            # Phones write MPO: a JPEG with further ones behind it, which the JPEG decoder opens.
            return _rgb(image), _SUFFIXES.get(str(image.format), ".jpg")
    except Image.UnidentifiedImageError:
        raise ValueError("no JPEG, PNG, WebP or BMP picture") from None
    except MemoryError:
        raise
    except Exception as error:  # on damaged bytes decoders raise whatever they run into
        raise ValueError(_reason(error)) from None


def _reason(error: Exception) -> str:
    text = (getattr(error, "strerror", None) or str(error)).partition("\n")[0].strip().rstrip(".")
    return text or type(error).__name__


def _rgb(image: Image.Image) -> Image.Image:
    turn = _TURNS.get(_orientation(image))
    if image.mode.startswith("I;16"):  # Pillow would cut off all that is brighter than 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.has_transparency_data:
        colours = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", colours.size, "white"), colours)
    image = image.convert("RGB")
    return image if turn is None else image.transpose(turn)


def _orientation(image: Image.Image, decodes: bool = True) -> int:
    """What the notes of a picture say of it; with those of its header alone, or with all."""
    try:
        return int((image.getexif() if decodes else Image.Image.getexif(image)).get(_ORIENTATION, 1))
    except Exception:  # damaged notes beside a good picture
        return 1


def _notes_behind_pixels(path: str | Path) -> bool:
    """Whether a PNG has some: the chunks' headers are read, four bytes of length and four of a name."""
    with open(path, "rb") as file:
        file.seek(8)
        pixels = False
        while len(header := file.read(8)) == 8:
            if pixels and header[4:] in (b"eXIf", b"iTXt", b"zTXt", b"tEXt"):
                return True
            pixels = pixels or header[4:] == b"IDAT"
            file.seek(int.from_bytes(header[:4], "big") + 4, 1)
    return False
