"""Shards: the teacher rows and student states of some samples in one safetensors file.

Rows are ragged: those of all samples stand one after another, and `offsets[s]:offsets[s + 1]` are sample s's.

    student          [T, student_dim]  bf16   student states after the final norm
    student_offsets  [S + 1]           int64
    target           [P, teacher_dim]  bf16   teacher rows
    offsets          [S + 1]           int64
    slots            [P]               int32  teacher token ids of those rows, end marker included; empty where rows are
                                              not of tokens
    target_at        [P]               int32  position of each teacher row among its sample's student rows, and
    start            [S]               int32  the first position that the DiT reads; both of token-aligned packs only
    vision           [V, vision_dim]   bf16   rows of the vision tower, of packs with pictures only
    vision_at        [V]               int32  position of each among its sample's student rows
    vision_offsets   [S + 1]           int64
    {student,target,vision}_{sum,sumsq}  f64  per dimension, over all rows as they are read back

Where rows are stored in a byte a value, `student`, `target` and `vision` are int8; a value is to be multiplied by the
factors of its row, `<name>_scale`, and of its dimension, `<name>_columns`, both f32, and is read back as bf16. Without
factors for dimensions, of which a few may be hundreds of times as large as the others, these would lose all digits.

Samples that stand next to each other make a chunk, of some megabytes: what is read, verified and shuffled at a time.
The header (metadata key `trainer`, JSON) says what the shard was made from, and lists the chunks: the number of samples
of each and a checksum of their rows. Its own checksum covers all the rest.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from safetensors.torch import save_file

from trainer import safetensors_files
from trainer.errors import TrainerError
from trainer.files import written_whole
from trainer.safetensors_files import Stored


@dataclass(frozen=True)
class Rows:
    """What one sample contributes.

    student [L, student_dim] and target [P, teacher_dim], bf16; slots: P ids or none.
    vision: [V, vision_dim] bf16; None for packs without pictures.
    vision_at, target_at, start: as in the file.
    """

    id: str
    slots: list[int]
    student: torch.Tensor
    target: torch.Tensor
    vision: torch.Tensor | None = None
    vision_at: list[int] = field(default_factory=list)
    target_at: list[int] = field(default_factory=list)
    start: int = 0


Storage = Literal["bf16", "int8"]
Moments = tuple[torch.Tensor, torch.Tensor]
# Rows that are converted at a time: a wider copy of all would be several times the shard.
_PIECE = 4096
_TINY = 1e-30  # stands for a scale of zero
# Bytes of a chunk's rows, in bf16 whatever they are stored in, so that the order of training does not depend on that.
CHUNK_BYTES = 1 << 23
# The tensors of rows, and those of the numbers of rows before each sample.
OFFSETS = {"student": "student_offsets", "target": "offsets", "vision": "vision_offsets"}
# The tensors with a value for each row, and which rows these are.
OF_ROWS = {"slots": "target", "target_at": "target", "vision_at": "vision"}


def write(
    path: Path,
    samples: Sequence[Rows],
    header: dict[str, Any],
    dims: tuple[int, int] | tuple[int, int, int | None],
    moments: tuple[Moments, Moments] | None = None,
    storage: Storage = "bf16",
) -> None:
    """Write a shard whole.

    Args:
        path: the file.
        samples: in the order they are stored; may be empty.
        header: what the shard was made from; `samples`, `rows`, `student_rows`, `ids`, `chunks` and `checksum` are
            added.
        dims: (student_dim, teacher_dim), and vision_dim of packs with pictures.
        moments: (sums, sums of squares) per dimension, f64, of all student and all target rows, where they are known;
            they are those of bf16 rows.
        storage: the type of the rows.
    """
    student = _cat([s.student for s in samples], dims[0])
    target = _cat([s.target for s in samples], dims[1])
    tensors = {
        **_stored("student", student, storage),
        "student_offsets": _offsets([len(s.student) for s in samples]),
        "slots": _int32(token for s in samples for token in s.slots),
        **_stored("target", target, storage),
        "offsets": _offsets([len(s.target) for s in samples]),
    }
    for number, name in enumerate(("student", "target")):
        known = moments[number] if moments and storage == "bf16" else _moments(name, tensors)
        tensors |= {f"{name}_sum": known[0], f"{name}_sumsq": known[1]}
    if any(s.target_at for s in samples):
        tensors["target_at"] = _int32(at for s in samples for at in s.target_at)
        tensors["start"] = _int32(s.start for s in samples)
    if len(dims) > 2 and dims[2]:
        tensors |= {
            **_stored("vision", _cat([s.vision for s in samples], dims[2]), storage),
            "vision_at": _int32(at for s in samples for at in s.vision_at),
            "vision_offsets": _offsets([len(s.vision_at) for s in samples]),
        }
        tensors["vision_sum"], tensors["vision_sumsq"] = _moments("vision", tensors)
    header = header | {
        "samples": len(samples),
        "rows": len(target),
        "student_rows": len(student),
        "ids": [s.id for s in samples],
    }
    sizes = [sum(2 * it.numel() for it in (s.student, s.target, s.vision) if it is not None) for s in samples]
    header["chunks"] = list(_chunks(tensors, sizes))
    header["checksum"] = _checksum(header, tensors)
    with written_whole(path) as aside:
        save_file(tensors, aside, metadata={"trainer": json.dumps(header, sort_keys=True)})


def sample_bytes(
    student: int, target: int, vision: int, dims: tuple[int, int] | tuple[int, int, int | None], storage: Storage
) -> int:
    """What a sample of so many rows takes in a shard of a token-aligned pack."""
    value, scale = (2, 0) if storage == "bf16" else (1, 4)
    rows = [(student, dims[0], 0), (target, dims[1], 4), (vision, dims[2] if len(dims) > 2 and dims[2] else 0, 4)]
    # Positions of target and vision rows; ends of the three; the start.
    return sum(count * (dim * value + scale + position) for count, dim, position in rows) + 3 * 8 + 4


def _offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _cat(rows: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat([torch.empty(0, dim, dtype=torch.bfloat16), *rows])


def _stored(name: str, rows: torch.Tensor, storage: Storage) -> dict[str, torch.Tensor]:
    """Rows as they are stored: themselves, or each, its dimensions of equal size, in 127 steps to its largest value."""
    if storage == "bf16":
        return {name: rows}
    squares = sum(part.double().square().sum(0) for part in rows.split(_PIECE))  # f32 would overflow from 2e19 on
    columns = (squares / max(1, len(rows))).sqrt().float().clamp_min(_TINY)
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows))
    for value, scale, part in zip(values.split(_PIECE), scales.split(_PIECE), rows.split(_PIECE), strict=True):
        part = part.float() / columns
        scale.copy_((part.abs().amax(1) / 127).clamp_min(_TINY))
        value.copy_((part / scale[:, None]).round())
    return {name: values, f"{name}_scale": scales, f"{name}_columns": columns}


def _read_back(rows: torch.Tensor, scales: torch.Tensor | None, columns: torch.Tensor | None) -> torch.Tensor:
    """Rows as they were stored, in bf16."""
    return rows if scales is None else (rows * scales[:, None] * columns).bfloat16()


def _moments(name: str, tensors: dict[str, torch.Tensor]) -> Moments:
    rows, dim = tensors[name].shape
    total = torch.zeros(dim, dtype=torch.float64)
    squares = torch.zeros_like(total)
    for start in range(0, rows, _PIECE):
        stored = (tensors[it][start : start + _PIECE] if it in tensors else None for it in (name, f"{name}_scale"))
        part = _read_back(*stored, tensors.get(f"{name}_columns")).double()
        total += part.sum(0)
        squares += part.square().sum(0)
    return total, squares


def _chunks(tensors: dict[str, torch.Tensor], sizes: list[int]) -> Iterator[list[Any]]:
    """The number of samples and the checksum of each chunk, of samples of these sizes."""
    first = total = 0
    for number, size in enumerate(sizes, 1):
        total += size
        if total >= CHUNK_BYTES or number == len(sizes):
            rows = {}
            for name in _row_tensors(tensors):
                offsets = tensors[OFFSETS[name.removesuffix("_scale")]]
                rows[name] = tensors[name][offsets[first] : offsets[number]]
            yield [number - first, _checksum_of(rows)]
            first, total = number, 0


def _row_tensors(names: Iterable[str]) -> list[str]:
    return [name for name in sorted(names) if name.removesuffix("_scale") in OFFSETS]


def _checksum(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    """The checksum of a header and of the tensors that do not hold rows."""
    described = json.dumps({k: v for k, v in header.items() if k != "checksum"}, sort_keys=True)
    rest = {name: it for name, it in tensors.items() if name not in _row_tensors(tensors)}
    return _checksum_of(rest, described)


def _checksum_of(tensors: dict[str, torch.Tensor], described: str = "") -> str:
    state = xxhash.xxh3_128(described.encode())
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(safetensors_files.bytes_of(tensors[name]))
    return state.hexdigest()


@dataclass
class Shard:
    """A shard opened for reading: all but its rows is in memory and verified.

    columns: the tensors that do not hold rows.
    chunks: the first sample of each chunk, and the end.
    bytes_read: bytes of rows that were read.
    """

    path: Path
    header: dict[str, Any] = field(init=False)
    columns: dict[str, torch.Tensor] = field(init=False)
    chunks: list[int] = field(init=False)
    bytes_read: int = 0

    def __post_init__(self) -> None:
        try:
            self._stored, metadata = safetensors_files.header(self.path)
            self.header = json.loads(metadata["trainer"])
            self.chunks = np.cumsum([0, *(samples for samples, _ in self.header["chunks"])]).tolist()
            self._rows = _row_tensors(self._stored)
            rest = {name: stored for name, stored in self._stored.items() if name not in self._rows}
            self.columns = {name: torch.empty(it.shape, dtype=it.dtype) for name, it in rest.items()}
            self._read((stored, self.columns[name]) for name, stored in rest.items())
            if _checksum(self.header, self.columns) != self.header["checksum"]:
                raise ValueError("its checksum is wrong")
        except (OSError, KeyError, ValueError, TypeError, AttributeError):
            raise to_rebuild(self.path, "damaged" if self.path.exists() else "missing") from None

    def __len__(self) -> int:
        return self.header["samples"]

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def size(self, name: str) -> tuple[int, int]:
        """Number of rows of a name ("student", "target", "vision"), and of their dimensions."""
        rows, dim = self._stored[name].shape
        return rows, dim

    def chunk_rows(self, name: str, chunk: int) -> tuple[int, int]:
        """The first row of a chunk, and the end."""
        offsets = self.columns[OFFSETS[name]]
        return int(offsets[self.chunks[chunk]]), int(offsets[self.chunks[chunk + 1]])

    def chunk_bytes(self, chunk: int) -> int:
        """Bytes that the rows of a chunk take in memory."""
        spans = {name: self.chunk_rows(name, chunk) for name in OFFSETS if name in self}
        return sum(2 * (end - first) * self.size(name)[1] for name, (first, end) in spans.items())

    def described(self, chunk: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Of a chunk: how many rows of each name each sample has, and the columns that have a value a row or sample."""
        samples = slice(self.chunks[chunk], self.chunks[chunk + 1])
        counts, columns = {}, {}
        for name in (name for name in OFFSETS if name in self):
            counts[name] = self.columns[OFFSETS[name]][samples.start : samples.stop + 1].diff().numpy()
        for name, of in OF_ROWS.items():
            if name in self and len(self.columns[name]) == self.size(of)[0]:  # `slots` may be empty
                columns[name] = self.columns[name][slice(*self.chunk_rows(of, chunk))].numpy()
        if "start" in self:
            columns["start"] = self.columns["start"][samples].numpy()
        return counts, columns

    def read(self, chunk: int, out: dict[str, torch.Tensor]) -> None:
        """Read and verify the rows of a chunk.

        Args:
            chunk: its number.
            out: where they go: of each name that there is, [rows of the chunk, dim] bf16.

        Raises:
            TrainerError: they are damaged; the shard was set aside.
        """
        if not self._read_chunk(chunk, out):
            raise to_rebuild(self.path, "damaged" if self.path.exists() else "missing")

    def damaged(self) -> bool:
        """Whether rows differ from what was written. Reads the whole file."""
        for chunk in range(len(self.chunks) - 1):
            out = {}
            for name in (name for name in OFFSETS if name in self):
                first, end = self.chunk_rows(name, chunk)
                out[name] = torch.empty(end - first, self.size(name)[1], dtype=torch.bfloat16)
            if not self._read_chunk(chunk, out):
                return True
        return False

    def _read_chunk(self, chunk: int, out: dict[str, torch.Tensor]) -> bool:
        wanted, rows = [], {}
        for name in self._rows:
            stored = self._stored[name]
            first, end = self.chunk_rows(name.removesuffix("_scale"), chunk)
            size = stored.bytes // max(1, stored.shape[0])
            part = Stored(stored.file, stored.dtype, (), stored.start + first * size, (end - first) * size)
            into = out.get(name)
            if into is None or stored.dtype != into.dtype:
                into = torch.empty(end - first, *stored.shape[1:], dtype=stored.dtype)
            rows[name] = into
            wanted.append((part, into))
        try:
            self._read(wanted)
        except (OSError, ValueError):
            return False
        self.bytes_read += sum(part.bytes for part, _ in wanted)
        if _checksum_of(rows) != self.header["chunks"][chunk][1]:
            return False
        for name in (name for name in rows if f"{name}_scale" in rows):
            out[name].copy_(_read_back(rows[name], rows[f"{name}_scale"], self.columns[f"{name}_columns"]))
        return True

    def _read(self, wanted: Iterable[tuple[Stored, torch.Tensor]]) -> None:
        handle = os.open(self.path, os.O_RDONLY)
        try:
            for stored, into in wanted:
                if into.numel():
                    safetensors_files.read(handle, stored.start, safetensors_files.bytes_of(into))
        finally:
            os.close(handle)


def why_stale(path: Path, inputs: str) -> str | None:
    """Why a shard has to be rebuilt, or None if it is whole and made from `inputs`. Reads the whole file."""
    if not path.exists():
        return "missing"
    try:
        shard = Shard(path)
    except TrainerError:
        return "truncated or damaged"
    if shard.header.get("inputs") != inputs:
        return "made from other inputs"
    return "its checksum is wrong" if shard.damaged() else None


def to_rebuild(path: Path, problem: str) -> TrainerError:
    """Arrange for a shard to be rebuilt: it is moved aside, and its block's list goes, so that the next run makes both.

    Gives the error to raise.
    """
    with suppress(FileNotFoundError):  # another process may have met the same
        path.replace(path.with_suffix(".damaged"))
    path.with_name(f"{path.stem.partition('-')[0]}.json").unlink(missing_ok=True)
    return TrainerError(f"shard {path} is {problem}; run the same command again, which rebuilds it")
