"""The pictures of a run: corpus/images/<digest>.<suffix>, each kept once, as the file that it came as.

`index.jsonl` beside them says what every file that was ever read shows, by the SHA-256 of the file: so a file is
decoded once, however often the corpus is built, wherever it lies and whatever its name is.
"""

import base64
import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from trainer import pictures
from trainer.picture_sources import Found

INDEX = "index.jsonl"
_AHEAD = 4  # files read and not yet decoded, for each thread

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Stored(NamedTuple):
    """A picture of the run: the name of its file in the folder, and its thumbnail (pictures.Measured)."""

    name: str
    thumbnail: bytes

    @property
    def digest(self) -> str:
        """32 hex digits that say what it shows."""
        return self.name.partition(".")[0]


class Store:
    """The folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._known: dict[str, Stored] = {}
        self._names: dict[str, str] = {}
        self._read_index()

    def add(self, found: Iterable[Found], threads: int) -> Iterator[tuple[Found, Stored | str]]:
        """Keep pictures that are read from somewhere.

        Args:
            found: what was read.
            threads: how many are decoded at a time (the decoders work outside of Python's lock).

        Yields:
            Each of `found`, in its order, and the picture that it is, or why it cannot be read.
        """
        with ThreadPoolExecutor(threads) as pool, open(self.folder / INDEX, "a", encoding="utf-8") as index:
            for picture, (file, result) in in_order(pool, self._examine, found, threads * _AHEAD):
                if isinstance(result, pictures.Measured):
                    result = self._keep(picture.data, result)
                    self._known[file] = result
                    index.write(json.dumps(self._entry(file, result)) + "\n")
                yield picture, result

    def drop_others(self, names: set[str]) -> None:
        """Remove pictures of other names: those of files that are no longer there."""
        for path in list(self.folder.iterdir()):
            if path.name not in names and path.name != INDEX and not path.is_dir():  # such as a file manager's
                path.unlink()

    def _read_index(self) -> None:
        path = self.folder / INDEX
        if not path.exists():
            return
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(self.folder)}
        with open(path, "rb+") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                    stored = Stored(entry["name"], base64.b64decode(entry["thumbnail"]))
                    if sizes.get(stored.name) == entry["bytes"]:  # else it was removed, or cut off by a crash
                        self._known[entry["file"]] = stored
                        self._names[stored.digest] = stored.name
                except (ValueError, KeyError, TypeError):
                    continue  # the last line of a process that was killed; its picture is decoded again
            if file.tell() and not line.endswith(b"\n"):
                file.write(b"\n")

    def _entry(self, file: str, stored: Stored) -> dict[str, str | int]:
        return {
            "file": file,
            "name": stored.name,
            "bytes": (self.folder / stored.name).stat().st_size,
            "thumbnail": base64.b64encode(stored.thumbnail).decode(),
        }

    def _examine(self, found: Found) -> tuple[str, pictures.Measured | Stored | str]:
        if found.problem:
            return "", found.problem
        file = hashlib.sha256(found.data).hexdigest()
        if file in self._known:
            return file, self._known[file]
        try:
            return file, pictures.measure(found.data)
        except ValueError as error:
            return file, str(error)

    def _keep(self, data: bytes, measured: pictures.Measured) -> Stored:
        name = self._names.get(measured.digest)
        if name is None:
            name = self._names[measured.digest] = f"{measured.digest}{measured.suffix}"
            # Not synced, which would take longer than decoding: the index notices a file that a crash cut off.
            aside = self.folder / f".{name}.part"
            aside.write_bytes(data)
            os.replace(aside, self.folder / name)
        return Stored(name, measured.thumbnail)


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[_Item], _Result], items: Iterable[_Item], ahead: int
) -> Iterator[tuple[_Item, _Result]]:
    """What a pool makes of items, in their order; at most `ahead` of them are waiting at a time."""
    waiting: deque = deque()
    for item in items:
        waiting.append((item, pool.submit(function, item)))
        if len(waiting) == ahead:
            first, future = waiting.popleft()
            yield first, future.result()
    while waiting:
        first, future = waiting.popleft()
        yield first, future.result()
