"""Samples in memory: the rows of all of them packed, and batches of some of them gathered from there."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batches import Batch
from trainer.shards import OF_ROWS, Shard

Columns = dict[str, np.ndarray]


@dataclass(frozen=True)
class Samples:
    """The rows of some samples, sample after sample.

    rows: "student" [T, student_dim], "target" [R, teacher_dim], and "vision" [V, vision_dim] of packs with pictures,
        bf16.
    counts: of each of these, how many rows each sample has, [S] int64.
    columns: what shards hold of each row or sample besides (`trainer.shards`).
    """

    rows: dict[str, Tensor]
    counts: Columns
    columns: Columns

    @classmethod
    def read(cls, chunks: Sequence[tuple[Shard, int]]) -> "Samples":
        """The samples of these chunks: each a shard and the number of the chunk in it.

        Raises:
            TrainerError: a shard is damaged; it was set aside.
        """
        described = [shard.described(chunk) for shard, chunk in chunks]
        counts, columns = (_joined([both[which] for both in described]) for which in (0, 1))
        shard = chunks[0][0]
        rows = {
            name: torch.empty(int(n.sum()), shard.size(name)[1], dtype=torch.bfloat16) for name, n in counts.items()
        }
        first = dict.fromkeys(rows, 0)
        for (shard, chunk), (sizes, _) in zip(chunks, described, strict=True):
            end = {name: first[name] + int(sizes[name].sum()) for name in rows}
            shard.read(chunk, {name: rows[name][first[name] : end[name]] for name in rows})
            first = end
        return cls(rows, counts, columns)

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """The samples of several one after another."""
        if len(parts) == 1:
            return parts[0]
        rows = {name: torch.cat([part.rows[name] for part in parts]) for name in parts[0].rows}
        return cls(rows, _joined([part.counts for part in parts]), _joined([part.columns for part in parts]))

    def __len__(self) -> int:
        return len(self.counts["student"])

    @cached_property
    def first(self) -> Columns:
        """Where the rows of each sample begin, [S] int64."""
        return {name: counts.cumsum() - counts for name, counts in self.counts.items()}

    def take(self, wanted: np.ndarray) -> "Samples":
        """Copies of the samples of these numbers, [S] int64, in their order."""
        counts = {name: held[wanted] for name, held in self.counts.items()}
        places = {name: _ranges(self.first[name][wanted], counts[name]) for name in counts}
        rows = {name: _gathered(held, places[name]) for name, held in self.rows.items()}
        columns = {name: held[places.get(OF_ROWS.get(name, ""), wanted)] for name, held in self.columns.items()}
        return Samples(rows, counts, columns)

    def batch(self, queries: int | None) -> Batch:
        """All samples as a batch, for a resampler of so many queries or a token-aligned adapter."""
        counts, columns, targets = self.counts, self.columns, len(self.rows["target"])
        more: dict[str, Any] = {"seen": (0,) * len(self)}
        if "vision" in self.rows:
            places = columns["vision_at"] + np.repeat(self.first["student"], counts["vision"])
            more = {"seen": tuple(counts["vision"].tolist()), "vision": self.rows["vision"], "vision_at": places}
        if queries is None:
            at = columns["target_at"] + np.repeat(self.first["student"], counts["target"])
            more["at"] = at if targets < len(self.rows["student"]) else None
            more["read"] = columns["target_at"] >= np.repeat(columns["start"], counts["target"])
        elif "slots" in columns:
            at = _ranges(np.arange(len(self)) * queries, counts["target"])
            slots = np.zeros(len(self) * queries, dtype=np.int64)
            slots[at] = columns["slots"]
            more["slots"] = slots.reshape(-1, queries)
            more["at"] = at if targets < len(slots) else None
        return Batch(
            lengths=tuple(counts["student"].tolist()),
            counts=tuple(counts["target"].tolist()),
            student=self.rows["student"],
            target=self.rows["target"],
            **{name: torch.from_numpy(it) if isinstance(it, np.ndarray) else it for name, it in more.items()},
        )


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _ranges(first: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """`first[0]`, `first[0] + 1`, ... `counts[0]` of them, then those from `first[1]` on, and so on."""
    return np.repeat(first - (counts.cumsum() - counts), counts) + np.arange(counts.sum())


def _gathered(rows: Tensor, places: np.ndarray) -> Tensor:
    # By numpy, on the thread that asks: torch would take cores from the training that goes on meanwhile.
    return torch.from_numpy(np.take(rows.view(torch.int16).numpy(), places, axis=0)).view(torch.bfloat16)
