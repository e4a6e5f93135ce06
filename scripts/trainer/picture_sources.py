"""Captioned pictures from where they lie: folders of the user, and the files of the sets that can be downloaded.

A source is read once, from its beginning to its end, as bytes: nothing here decodes a picture. Light to import: the
Snakefile asks for the digests of folders on every call.
"""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import TrainerError
from trainer.files import digest

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_CAPTIONED = (*SUFFIXES, ".txt")
_COLUMNS = {"image", "sentences_raw"}


class Found(NamedTuple):
    """The bytes of a picture's file and its captions, or why they cannot be had. `name`: where it is in its source."""

    name: str
    data: bytes
    captions: tuple[str, ...] = ()
    problem: str = ""


class Source(NamedTuple):
    """Some pictures: their number and themselves."""

    name: str
    count: int
    pictures: Iterator[Found]


def preset(name: str, path: str | Path) -> Source:
    """The pictures of a downloaded set.

    Raises:
        TrainerError: its files are damaged or not as they should be.
    """
    return {"flickr30k": _flickr30k, "coco_captions": _coco_captions}[name](name, Path(path))


def folder(path: str) -> Source:
    """The pictures in a folder and below; `01.txt` beside `01.jpg` holds its captions, one a line.

    Raises:
        TrainerError: there is no such folder, or there are no pictures in it.
    """
    names = [name for name, _ in listing(path) if name.lower().endswith(SUFFIXES)]
    if not names:
        raise TrainerError(
            f"the image folder {path} holds no {', '.join(SUFFIXES)} files; take it out of corpus.image_folders"
        )

    def pictures() -> Iterator[Found]:
        for name in names:
            file = Path(path, name)
            try:
                notes = file.with_suffix(".txt")
                text = notes.read_text(encoding="utf-8-sig", errors="replace") if notes.is_file() else ""
                yield Found(shown(name), file.read_bytes(), tuple(text.splitlines()))
            except OSError as error:
                yield Found(shown(name), b"", problem=error.strerror or type(error).__name__)

    return Source(path, len(names), pictures())


def count(path: str) -> int:
    """How many pictures are directly in a folder; 0 where it cannot be read."""
    try:
        return sum("/" not in name for name, _ in _below(path, SUFFIXES))
    except OSError:
        return 0


def folder_digest(path: str, suffixes: tuple[str, ...] = _CAPTIONED, setting: str = "corpus.image_folders") -> str:
    """A digest of the names, sizes and times of what `listing` finds: another one if anything changed.

    Raises:
        TrainerError: there is no such folder, or it cannot be read.
    """
    return digest([[shown(name), stat.st_size, stat.st_mtime_ns] for name, stat in listing(path, suffixes, setting)])


def listing(
    path: str, suffixes: tuple[str, ...] = _CAPTIONED, setting: str = "corpus.image_folders"
) -> list[tuple[str, os.stat_result]]:
    """Names of the pictures and captions in a folder and below, in order, without hidden ones.

    Args:
        path: the folder.
        suffixes: what names end with, in lower case; those of files may be in upper case.
        setting: the one that names the folder, for messages.

    Raises:
        TrainerError: there is no such folder, or it cannot be read.
    """
    try:
        if not Path(path).is_dir():
            raise TrainerError(f"the image folder {path} does not exist; correct its path in {setting}")
        return sorted(_below(path, suffixes))
    except OSError as error:
        raise TrainerError(
            f"the image folder {path} cannot be read ({error.strerror}: {error.filename}); make it readable, or take "
            f"it out of {setting}"
        ) from None


def shown(name: str) -> str:
    """A file's name as text that can be written: not all names are UTF-8."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _below(path: str, suffixes: tuple[str, ...]) -> list[tuple[str, os.stat_result]]:
    found: list[tuple[str, os.stat_result]] = []
    todo = [""]
    while todo:
        below = todo.pop()
        with os.scandir(Path(path, below)) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}" if below else entry.name
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    todo.append(name)
                elif name.lower().endswith(suffixes):
                    if entry.is_file():
                        found.append((name, entry.stat()))
                    elif entry.is_symlink():  # to nothing: reading it fails, which is told
                        found.append((name, entry.stat(follow_symlinks=False)))
    return found


def _flickr30k(name: str, root: Path) -> Source:
    """A zip of JPEGs, found by the last part of their names, and a CSV: `raw` is a JSON list of captions."""
    import zipfile

    archive = _opened(zipfile.ZipFile, root / "flickr30k-images.zip", (zipfile.BadZipFile, OSError))
    members = {member.filename.rpartition("/")[2]: member for member in archive.infolist() if not member.is_dir()}
    table = root / "flickr_annotations_30k.csv"
    rows = []
    with open(table, encoding="utf-8-sig", errors="replace", newline="") as file:
        for row in csv.DictReader(file):
            if not {"raw", "filename"} <= row.keys():
                raise TrainerError(f"{table} has no columns `raw` and `filename`; replace the file")
            rows.append((row["filename"] or "", row["raw"] or "[]"))
    # In the order of the zip, so that it is read from its beginning to its end.
    rows.sort(key=lambda row: members[row[0]].header_offset if row[0] in members else -1)

    def pictures() -> Iterator[Found]:
        with archive:
            for file, raw in rows:
                if file not in members:
                    yield Found(file, b"", problem=f"not in {root / 'flickr30k-images.zip'}")
                    continue
                try:
                    yield Found(file, archive.read(members[file]), _captions(json.loads(raw)))
                except Exception as error:  # zlib's, zipfile's, or of captions that are no JSON
                    yield Found(file, b"", problem=str(error).partition("\n")[0] or type(error).__name__)

    return Source(name, len(rows), pictures())


def _coco_captions(name: str, root: Path) -> Source:
    """Parquet files with columns `image` {bytes, path} and `sentences_raw`, read row group after row group."""
    import pyarrow as pa
    from pyarrow import parquet

    failures = (pa.ArrowException, OSError)
    paths = sorted((root / "data").glob("*.parquet"))
    files = [_opened(parquet.ParquetFile, path, failures) for path in paths]
    for path, file in zip(paths, files, strict=True):
        if not set(file.schema_arrow.names) >= _COLUMNS:
            raise TrainerError(f"{path} has no columns `image` and `sentences_raw`; replace the file")

    def pictures() -> Iterator[Found]:
        for path, file in zip(paths, files, strict=True):
            number = 0
            with file:
                try:
                    for batch in file.iter_batches(batch_size=32, columns=sorted(_COLUMNS)):
                        for row in batch.to_pylist():
                            number += 1
                            image = row["image"] or {}
                            label = image.get("path") or f"{path.name}, row {number}"
                            data = image.get("bytes") or b""
                            yield Found(label, data, _captions(row["sentences_raw"]), "" if data else "no bytes")
                except failures as error:
                    reason = str(error).partition("\n")[0].rstrip(".")
                    raise TrainerError(f"{path} cannot be read as parquet ({reason}); replace the file") from None

    return Source(name, sum(file.metadata.num_rows for file in files), pictures())


def _opened(opener: Any, path: Path, failures: tuple[type[Exception], ...]) -> Any:
    try:
        return opener(path)
    except failures as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise TrainerError(f"{path} cannot be read ({reason}); replace the file") from None


def _captions(listed: Iterable[Any] | None) -> tuple[str, ...]:
    # JSON can spell halves of characters, which cannot be written.
    texts = (caption for caption in listed or () if isinstance(caption, str))
    return tuple(text.encode("utf-8", "replace").decode("utf-8") for text in texts)
