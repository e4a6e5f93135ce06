"""Some samples with their pictures, small enough to be part of a page."""

import base64
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from PIL import Image

from trainer import corpus_files
from trainer.errors import TrainerError
from trainer.pictures import open_rgb

SIDE = 176  # pixels of the longer side
_SINGLES, _PAIRS = 20, 4


def samples(corpus: Path) -> list[dict[str, Any]]:
    """Samples of a corpus with pictures: text, source, and thumbnails as data URIs; empty if it has none.

    Always the same ones: the first train samples by id, which is a hash, with one picture and with two. A sample whose
    pictures are gone or damaged is left out.

    Args:
        corpus: the folder with train.jsonl and images.
    """
    if not (corpus / "images").is_dir():
        return []
    return [
        sample
        for number, count in ((1, _SINGLES), (2, _PAIRS))
        for sample in islice(_with_pictures(corpus, number), count)
    ]


def thumbnails(corpus: Path, names: Iterable[str]) -> list[str]:
    """Pictures of a corpus as data URIs; those that are gone or damaged are left out."""
    found = []
    for name in names:
        with suppress(TrainerError):
            found.append(thumbnail(corpus / "images" / name))
    return found


def thumbnail(path: Path, side: int = SIDE) -> str:
    """A picture as a data URI, at most so many pixels on a side.

    Raises:
        TrainerError: the picture cannot be read.
    """
    image = open_rgb(path)
    image.thumbnail((side, side), Image.Resampling.BOX)
    data = BytesIO()
    image.save(data, "JPEG", quality=70, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()


def _with_pictures(corpus: Path, number: int) -> Iterator[dict[str, Any]]:
    for sample in corpus_files.read(corpus / "train.jsonl"):
        if len(sample.images) == number and len(images := thumbnails(corpus, sample.images)) == number:
            yield {"text": sample.text, "source": sample.source, "images": images}
