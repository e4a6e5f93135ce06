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

The header (metadata key `trainer`, JSON) says what the shard was made from and carries a checksum of everything.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.errors import TrainerError
from trainer.files import written_whole


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
        header: what the shard was made from; `samples`, `rows`, `student_rows`, `ids` and `checksum` are added.
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


def _read_back(name: str, tensors: dict[str, torch.Tensor], start: int, stop: int) -> torch.Tensor:
    """Rows `start` to `stop`, in bf16."""
    rows, scales = tensors[name][start:stop], tensors.get(f"{name}_scale")
    return rows if scales is None else (rows * scales[start:stop, None] * tensors[f"{name}_columns"]).bfloat16()


def _moments(name: str, tensors: dict[str, torch.Tensor]) -> Moments:
    rows, dim = tensors[name].shape
    total = torch.zeros(dim, dtype=torch.float64)
    squares = torch.zeros_like(total)
    for start in range(0, rows, _PIECE):
        part = _read_back(name, tensors, start, start + _PIECE).double()
        total += part.sum(0)
        squares += part.square().sum(0)
    return total, squares


def _checksum(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> str:
    described = json.dumps({k: v for k, v in header.items() if k != "checksum"}, sort_keys=True)
    state = xxhash.xxh3_128(described.encode())
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().view(torch.uint8).reshape(-1).numpy().data)
    return state.hexdigest()


@dataclass
class Shard:
    """A shard opened for reading; tensors are views of the mapped file."""

    path: Path
    header: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        try:
            with safe_open(self.path, "pt") as file:
                self.header = json.loads((file.metadata() or {})["trainer"])
        except (SafetensorError, OSError, KeyError, ValueError):
            raise to_rebuild(self.path, "damaged" if self.path.exists() else "missing") from None

    def __len__(self) -> int:
        return self.header["samples"]

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, mapped, not read."""
        with safe_open(self.path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)

    @cached_property
    def offsets(self) -> list[int]:
        """Where the target rows of each sample begin, and the end."""
        return self.tensors["offsets"].tolist()

    @cached_property
    def student_offsets(self) -> list[int]:
        """Where the student rows of each sample begin, and the end."""
        return self.tensors["student_offsets"].tolist()

    @cached_property
    def vision_offsets(self) -> list[int]:
        """Where the vision rows of each sample begin, and the end."""
        return self.tensors["vision_offsets"].tolist()

    def rows(self, sample: int) -> Rows:
        """The rows of one sample."""
        a, b = self.offsets[sample : sample + 2]
        c, d = self.student_offsets[sample : sample + 2]
        t = self.tensors
        more: dict[str, Any] = {}
        if "vision" in t:
            e, f = self.vision_offsets[sample : sample + 2]
            more = {"vision": _read_back("vision", t, e, f), "vision_at": t["vision_at"][e:f].tolist()}
        if "target_at" in t:
            more |= {"target_at": t["target_at"][a:b].tolist(), "start": int(t["start"][sample])}
        slots = t["slots"][a:b].tolist()
        student, target = _read_back("student", t, c, d), _read_back("target", t, a, b)
        return Rows(self.header["ids"][sample], slots, student, target, **more)

    def damaged(self) -> bool:
        """Whether the content differs from what was written. Reads the whole file."""
        return _checksum(self.header, self.tensors) != self.header.get("checksum")


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
    if path.exists():
        path.replace(path.with_suffix(".damaged"))
    path.with_name(f"{path.stem.partition('-')[0]}.json").unlink(missing_ok=True)
    return TrainerError(f"shard {path} is {problem}; run the same command again, which rebuilds it")
