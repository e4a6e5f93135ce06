"""Shards of what the network is given: latents of pictures, embeddings of captions.

A shard is a safetensors file with the tensors `<id>/<name>` of its items.

    of a picture, for each variant (crop and flip) v:
    v/mean, v/std  [C, h, w]  f32    of the latents, as the network takes them; no std where the mode is trained on
    v/time_ids     [6]        int32  of families that take them
    v/mask         [h, w]     f32    of pictures that have a mask
    of a caption:
    names, shapes and types as the family's text encoder gives them

The header (metadata key `trainer`, JSON) says what the shard was made from and, of each item, the key, which is a
digest of everything that the item depends on, checksums of its tensors and what else is to be known of it. So an item
is read, verified and used by itself, in whichever shard it is found.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from trainer import safetensors_files
from trainer.files import written_whole
from trainer.safetensors_files import Stored

FORMAT = 1  # of the shard file; raise it when older items must not be used
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Item:
    """What is made of a picture or of a caption.

    key: digest of everything that it depends on.
    tensors: on the CPU, by name.
    info: what is told of it in the header, JSON-able.
    """

    key: str
    tensors: Tensors
    info: dict[str, Any]


def write(path: Path, items: Mapping[str, Item], header: dict[str, Any]) -> None:
    """Write a shard whole. The same items and header give the same bytes, in whatever order they come.

    Args:
        path: the file.
        items: by id.
        header: what is told besides; `format`, `items` and `checksum` are added.
    """
    entries = {
        id: {**item.info, "key": item.key, "checksums": {name: _checksum(it) for name, it in item.tensors.items()}}
        for id, item in items.items()
    }
    header = {**header, "format": FORMAT, "items": entries}
    header["checksum"] = _described(header)
    tensors = {f"{id}/{name}": it.contiguous() for id, item in items.items() for name, it in item.tensors.items()}
    with written_whole(path) as aside:  # the library sorts the tensors, by type and name
        save_file(tensors, aside, metadata={"trainer": json.dumps(header, sort_keys=True)})


@dataclass
class Shard:
    """A shard opened for reading; only its header is in memory.

    Raises (when it is made): ValueError: it is missing, or its header is damaged or of another format.

    items: what the header tells of each item, by id.
    bytes_read: bytes of tensors that were read.
    """

    path: Path
    header: dict[str, Any] = field(init=False)
    items: dict[str, dict[str, Any]] = field(init=False)
    bytes_read: int = 0

    def __post_init__(self) -> None:
        try:
            self._stored, metadata = safetensors_files.header(self.path)
            self.header = json.loads(metadata["trainer"])
            self.items = self.header["items"]
            if _described(self.header) != self.header["checksum"]:
                raise ValueError("its checksum is wrong")
        except (OSError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it cannot be read ({error!r})") from None
        if self.header["format"] != FORMAT:
            raise ValueError("it is of another format")

    def __len__(self) -> int:
        return len(self.items)

    def shape(self, id: str, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return self._stored[f"{id}/{name}"].shape

    def has(self, id: str, key: str) -> bool:
        """Whether there is an item of this id that depends on the same."""
        return id in self.items and self.items[id]["key"] == key

    def read(self, id: str, prefix: str = "") -> Tensors:
        """The tensors of an item whose names begin so, without that beginning, in the types they are stored in.

        Raises:
            ValueError: it is damaged.
        """
        checksums = self.items[id]["checksums"]
        wanted = {name: self._stored.get(f"{id}/{name}") for name in sorted(checksums) if name.startswith(prefix)}
        found = {}
        try:
            handle = os.open(self.path, os.O_RDONLY)
            try:
                for name, stored in wanted.items():
                    found[name] = self._read(handle, stored)
            finally:
                os.close(handle)
        except OSError as error:
            raise ValueError(f"it cannot be read ({error!r})") from None
        for name, tensor in found.items():
            if _checksum(tensor) != checksums[name]:
                raise ValueError(f"the item {id} is damaged")
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def item(self, id: str) -> Item:
        """An item whole.

        Raises:
            ValueError: it is damaged.
        """
        info = {name: value for name, value in self.items[id].items() if name not in ("key", "checksums")}
        return Item(self.items[id]["key"], self.read(id), info)

    def whole(self) -> bool:
        """Whether all items are as they were written. Reads the whole file."""
        try:
            for id in self.items:
                self.read(id)
        except ValueError:
            return False
        return True

    def _read(self, handle: int, stored: Stored | None) -> Tensor:
        if stored is None or stored.dtype is None:
            raise ValueError("a tensor is missing")
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        if tensor.numel():
            safetensors_files.read(handle, stored.start, safetensors_files.bytes_of(tensor))
        self.bytes_read += stored.bytes
        return tensor


class Pool:
    """The shards of some folders as they are now, whatever their state: where items may be found."""

    # Those in use; what a stop left; items that belong to other shards now; those that training found to be damaged.
    SUFFIXES = (".safetensors", ".partial", ".moved", ".damaged")

    def __init__(self, *folders: Path) -> None:
        self.folders = folders
        self._opened: dict[Path, tuple[tuple[int, ...], Shard | None]] = {}

    def shards(self, *suffixes: str) -> dict[Path, Shard]:
        """Those whose header can be read, of some suffixes or of all; one that has not changed is not opened again."""
        found = {}
        paths = [path for folder in self.folders if folder.is_dir() for path in folder.iterdir()]
        for path in sorted(path for path in paths if path.suffix in (suffixes or self.SUFFIXES)):
            if not path.name.startswith(".") and (shard := self.get(path)):
                found[path] = shard
        return found

    def get(self, path: Path) -> Shard | None:
        """A shard; None if it cannot be read."""
        try:
            state = path.stat()
        except OSError:
            return None
        mark = (state.st_ino, state.st_mtime_ns, state.st_size)
        if self._opened.get(path, ((), None))[0] != mark:
            self._opened[path] = (mark, None)
            with suppress(ValueError):
                self._opened[path] = (mark, Shard(path))
        return self._opened[path][1]

    def holds(self, path: Path, id: str, key: str) -> bool:
        """Whether a shard has the item."""
        shard = self.get(path)
        return shard is not None and shard.has(id, key)

    def take(self, keys: Mapping[str, str]) -> dict[str, Item]:
        """Of the items of these ids and keys those that any shard has whole, by id."""
        shards, found = list(self.shards().values()), {}
        for id, key in keys.items():
            for shard in shards:
                if shard.has(id, key):
                    with suppress(ValueError):
                        found[id] = shard.item(id)
                        break
        return found


def caption_digest(text: str) -> str:
    """64 hex digits of what a caption says."""
    return hashlib.sha256(text.encode()).hexdigest()


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all values are."""
    return all(bool(torch.isfinite(it).all()) for it in tensors)


def _checksum(tensor: Tensor) -> str:
    """Of a tensor's type, shape and values."""
    state = xxhash.xxh3_64(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    state.update(safetensors_files.bytes_of(tensor))
    return state.hexdigest()


def _described(header: dict[str, Any]) -> str:
    """The checksum of a header."""
    told = {name: value for name, value in header.items() if name != "checksum"}
    return xxhash.xxh3_128(json.dumps(told, sort_keys=True).encode()).hexdigest()
