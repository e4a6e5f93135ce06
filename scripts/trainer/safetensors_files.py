"""Where tensors lie in a safetensors file, for reading parts of it into memory of one's own.

The library maps files: pages of a mapping that were touched count as memory of the process, and nothing says when they
are read.
"""

import json
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
}


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its bytes are `start` to `start + bytes`.

    dtype: None for a type that nothing here reads.
    """

    file: Path
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    start: int
    bytes: int


def header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it cannot be read, or is damaged.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("it ends within its header")
        entries: dict[str, Any] = json.loads(file.read(length))
    metadata = entries.pop("__metadata__", None) or {}
    implied = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    if path.stat().st_size < implied:
        raise ValueError("it is truncated")
    return {name: _stored(path, 8 + length, entry) for name, entry in entries.items()}, metadata


def _stored(path: Path, base: int, entry: dict) -> Stored:
    dtype, shape, (start, end) = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    if dtype and end - start != prod(shape) * dtype.itemsize:
        raise ValueError("its header contradicts itself")
    return Stored(path, dtype, shape, base + start, end - start)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in main memory; those of one without gaps are its own, and can be written to."""
    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def read(handle: int, start: int, out: memoryview) -> None:
    """Fill `out` with the bytes of an open file from `start` on.

    Raises:
        ValueError: the file ends before.
    """
    while out:
        count = os.preadv(handle, [out], start)
        if not count:
            raise ValueError("it ends within a tensor")
        out, start = out[count:], start + count
