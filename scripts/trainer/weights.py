"""The weights of a snapshot: where each tensor lies in its safetensors files, read into memory of the reader's own.

Files are read, not mapped: pages of a mapping that were touched count as memory of the process, and a teacher may be
larger than what a job is given. The system's page cache, which counts for nobody and gives way when memory is short,
serves the next block of shards from RAM where there is enough.
"""

import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from trainer import safetensors_files
from trainer.errors import TrainerError
from trainer.safetensors_files import Stored

# A model's weights; integers are something else.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# Bytes of a tensor in another dtype that are converted at a time.
_PIECE = 1 << 24
# A fast disk wants several requests at once.
_READERS = 4


class Weights:
    """The stored tensors of a snapshot by name; those of a component's folder are called `<folder>/<tensor>`.

    bytes_read: how much was read from the files.
    """

    def __init__(self, path: Path, folders: tuple[str, ...] = ("",)) -> None:
        """Read the headers of the safetensors files of these folders of a snapshot; with an index, of those it names.

        Raises:
            TrainerError: a file is missing or damaged.
        """
        self.path = path
        self.tensors: dict[str, Stored] = {}
        for folder in folders:
            for file in _files(path / folder):
                self.tensors |= {(f"{folder}/" if folder else "") + name: it for name, it in _header(file).items()}
        self.bytes_read = 0
        self._open: dict[Path, int] = {}
        self._readers = ThreadPoolExecutor(_READERS, "weights")

    def __del__(self) -> None:
        for handle in getattr(self, "_open", {}).values():
            os.close(handle)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def prefix(self, *names: str) -> str:
        """What stands before one of `names` in the snapshot, whose exporter may have put the model into another.

        Raises:
            TrainerError: it has none of them.
        """
        for name in names:
            for stored in self.tensors:
                if stored == name or stored.endswith(f".{name}"):
                    return stored.removesuffix(name)
        raise TrainerError(f"the teacher in {self.path} has no tensor {' or '.join(names)}; get it again")

    def tensor(self, name: str) -> Tensor:
        """A copy of one tensor, in its stored dtype, on the CPU."""
        stored = self.tensors[name]
        out = torch.empty(stored.bytes, dtype=torch.uint8)
        self.read([(name, stored.dtype, out)])
        return out.view(stored.dtype).view(stored.shape)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of some rows of one tensor, in its stored dtype, on the CPU."""
        whole = self.tensors[name]
        size = whole.bytes // whole.shape[0]
        out = torch.empty((stop - start) * size, dtype=torch.uint8)
        self._read_bytes(whole, whole.start + start * size, out)
        return out.view(whole.dtype).view(stop - start, *whole.shape[1:])

    def read(self, wanted: Iterable[tuple[str, torch.dtype, Tensor]]) -> None:
        """Read tensors, several at once, into memory that is there: each (name, dtype it becomes, uint8 [bytes], CPU).

        Raises:
            TrainerError: a file ended early.
        """
        wanted = list(wanted)
        for name, _, _ in wanted:
            self._handle(self.tensors[name].file)
        list(self._readers.map(lambda item: self._read(*item), wanted))
        self.bytes_read += sum(self.tensors[name].bytes for name, _, _ in wanted)

    def _handle(self, file: Path) -> int:
        if file not in self._open:
            self._open[file] = os.open(file, os.O_RDONLY)
        return self._open[file]

    def _read(self, name: str, dtype: torch.dtype, out: Tensor) -> None:
        stored = self.tensors[name]
        if stored.dtype == dtype:
            self._read_bytes(stored, stored.start, out)
            return
        step = _PIECE // stored.dtype.itemsize
        values = out.view(dtype)
        for start in range(0, len(values), step):
            part = values[start : start + step]
            piece = torch.empty(len(part) * stored.dtype.itemsize, dtype=torch.uint8)
            self._read_bytes(stored, stored.start + start * stored.dtype.itemsize, piece)
            part.copy_(piece.view(stored.dtype))

    def _read_bytes(self, stored: Stored, start: int, out: Tensor) -> None:
        try:
            safetensors_files.read(self._handle(stored.file), start, memoryview(out.numpy()))
        except ValueError as error:
            raise TrainerError(
                f"the weights in {stored.file} cannot be read ({error}); get the teacher again"
            ) from None


def _files(folder: Path) -> list[Path]:
    try:
        # With an index, only what it names counts: other files may lie beside it. The shortest name is that of the
        # weights themselves; variants add to it, such as model.fp16.safetensors.index.json.
        for index in sorted(folder.glob("*.safetensors.index.json"), key=lambda index: (len(index.name), index.name)):
            return sorted(
                {folder / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
            )
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainerError(f"{index} cannot be read ({error}); get the teacher again") from None
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise TrainerError(f"{folder} has no weights in safetensors files; get the teacher again")
    return files


def _header(path: Path) -> dict[str, Stored]:
    try:
        tensors, _ = safetensors_files.header(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainerError(f"the weights in {path} cannot be read ({error}); get the teacher again") from None
    return {name: replace(it, dtype=it.dtype if it.dtype in _FLOATS else None) for name, it in tensors.items()}
