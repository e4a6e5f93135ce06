"""Small pictures that differ from each other, as files, zips and parquet like those of the downloaded sets."""

import csv
import io
import json
import zipfile
from pathlib import Path

import numpy as np
from PIL import Image

SIZE = (48, 36)


def picture(number: int, size: tuple[int, int] = SIZE) -> Image.Image:
    """A picture of soft colours that its number decides."""
    colours = np.random.default_rng(number).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize(size, Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    """The bytes of its file."""
    data = io.BytesIO()
    image.save(data, kind, **options)
    return data.getvalue()


def write_folder(root: Path, numbers: range, name: str = "{:02d}.png", captions: bool = True) -> Path:
    """A folder of pictures; the captions of number n are `thing n on a table` and `the thing n`."""
    for number in numbers:
        path = root / name.format(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(picture(number)))
        if captions:
            path.with_suffix(".txt").write_text(f"thing {number} on a table\nthe thing {number}\n", encoding="utf-8")
    return root


def write_flickr30k(root: Path, numbers: range, lost: tuple[int, ...] = ()) -> Path:
    """The two files of flickr30k; pictures of `lost` numbers are in the table and not in the zip."""
    root.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(root / "flickr30k-images.zip", "w") as archive:
        archive.writestr("__MACOSX/flickr30k-images/._1.jpg", b"no picture")
        for number in reversed(numbers):
            if number not in lost:
                archive.writestr(f"flickr30k-images/{number}.jpg", encoded(picture(number), "JPEG", quality=95))
    with open(root / "flickr_annotations_30k.csv", "w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["raw", "sentids", "split", "filename", "img_id"])
        for number in numbers:
            raw = json.dumps([f"A boy, number {number} , runs .", f"flickr {number} again"])
            table.writerow([raw, "[0, 1]", "train", f"{number}.jpg", number])
    return root


def write_coco(root: Path, numbers: range, files: int = 2, group: int = 3) -> Path:
    """Parquet files like those of COCO_captions_train, with several row groups each."""
    import pyarrow as pa
    from pyarrow import parquet

    (root / "data").mkdir(parents=True, exist_ok=True)
    parts = np.array_split(np.array(numbers), files)
    for index, part in enumerate(parts):
        rows = [
            {
                "id": int(number),
                "image": {"bytes": encoded(picture(int(number)), "JPEG", quality=95), "path": f"COCO_{number}.jpg"},
                "sentences_raw": [f"coco {number} one", f"coco {number} two"],
            }
            for number in part
        ]
        path = root / "data" / f"train-{index:05d}-of-{files:05d}.parquet"
        parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return root
