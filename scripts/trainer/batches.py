"""The order of training samples, and batches made ahead of time.

The stream of samples is a function of (seed, position): sample number n is always the same one, whatever was stopped
and resumed in between. An epoch shuffles the shards, takes `window` of them at a time and shuffles their samples
together: samples of the whole corpus mix while few files are read at once.
"""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer.shards import Shard, to_rebuild


@dataclass(frozen=True)
class Batch:
    """Some samples; rows are packed: those of all samples stand one after another.

    lengths, counts, seen: of each sample, its student rows, its target rows, its rows of the vision tower.
    student [T, student_dim] bf16, target [R, teacher_dim] bf16.
    at [R] int64: which of the adapter's rows each target is for: its slots, B times Q of them, or its tokens, T of
        them; None: all of them, in their order.
    slots [B, Q] int64: 0 at pads; None where slots are not seeded.
    vision [V, vision_dim] bf16: rows of the vision tower, and vision_at [V] int64: which of the T tokens they are at;
        None for packs without pictures.
    read [R] bool: which target rows the DiT reads; None where it reads all.
    """

    lengths: tuple[int, ...]
    counts: tuple[int, ...]
    seen: tuple[int, ...]
    student: Tensor
    target: Tensor
    at: Tensor | None = None
    slots: Tensor | None = None
    vision: Tensor | None = None
    vision_at: Tensor | None = None
    read: Tensor | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    def to(self, device: torch.device) -> "Batch":
        """A copy on a device, without waiting for it where memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """A copy in pinned memory."""
        return self._each(Tensor.pin_memory)

    def widened(self) -> "Batch":
        """A copy with all rows in f32."""
        return self._each(lambda tensor: tensor.float() if tensor.is_floating_point() else tensor)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return replace(self, **{name: change(it) for name, it in vars(self).items() if isinstance(it, Tensor)})

    def padded(self) -> tuple[Tensor, Tensor]:
        """Student rows [B, L, student_dim] and where they are real [B, L]; other rows mean nothing."""
        device = self.student.device
        lengths = torch.tensor(self.lengths, device=device)[:, None]
        place = torch.arange(max(self.lengths), device=device)
        first = lengths.cumsum(0) - lengths
        return self.student[first + place.minimum(lengths - 1)], place < lengths

    def wanted(self, rows: Tensor) -> Tensor:
        """Of a row for each slot or token, those that have a target, in its order."""
        return rows if self.at is None else rows[self.at]

    def split(self, size: int) -> Iterator["Batch"]:
        """Parts of at most `size` samples."""
        ends = [[0, *accumulate(counts)] for counts in (self.lengths, self.counts, self.seen)]
        for start in range(0, len(self), size):
            part = slice(start, min(start + size, len(self)))
            tokens, rows, vision = (slice(of[part.start], of[part.stop]) for of in ends)
            first = tokens.start if self.slots is None else start * self.slots.shape[1]
            yield Batch(
                *(self.lengths[part], self.counts[part], self.seen[part]),
                *(self.student[tokens], self.target[rows]),
                at=None if self.at is None else self.at[rows] - first,
                slots=None if self.slots is None else self.slots[part],
                vision=None if self.vision is None else self.vision[vision],
                vision_at=None if self.vision_at is None else self.vision_at[vision] - tokens.start,
                read=None if self.read is None else self.read[rows],
            )


def collate(picks: Sequence[tuple[Shard, int]], queries: int | None) -> Batch:
    """The batch of these (shard, sample) pairs, for a resampler of so many queries or a token-aligned adapter."""
    samples = [shard.rows(sample) for shard, sample in picks]
    lengths, counts = (tuple(len(getattr(it, name)) for it in samples) for name in ("student", "target"))
    vision = None if samples[0].vision is None else torch.cat([it.vision for it in samples])
    batch = Batch(
        *(lengths, counts, tuple(len(it.vision_at) for it in samples)),
        *(torch.cat([getattr(it, name) for it in samples]) for name in ("student", "target")),
        vision=vision,
        vision_at=None if vision is None else _flat([it.vision_at for it in samples], accumulate((0, *lengths[:-1]))),
    )
    if queries is None:
        at = _flat([it.target_at for it in samples], accumulate((0, *lengths[:-1])))
        read = torch.cat([torch.tensor(it.target_at, dtype=torch.int64) >= it.start for it in samples])
        return replace(batch, at=at if len(at) < len(batch.student) else None, read=read)
    if not samples[0].slots:
        return batch
    slots = torch.zeros(len(samples), queries, dtype=torch.int64)
    for padded, it in zip(slots, samples, strict=True):
        padded[: len(it.slots)] = torch.tensor(it.slots)
    at = _flat([range(count) for count in counts], range(0, slots.numel(), queries))
    return replace(batch, at=at if len(at) < slots.numel() else None, slots=slots)


def _flat(places: Sequence[Sequence[int]], firsts: Iterable[int]) -> Tensor:
    """Places within samples as places within the batch, from the first place of each sample."""
    parts = zip(places, firsts, strict=True)
    return torch.cat([torch.tensor(sample, dtype=torch.int64) + first for sample, first in parts])


class Order:
    """Which sample comes at which position of the stream."""

    def __init__(self, counts: Sequence[int], seed: int, window: int) -> None:
        self.counts, self.seed, self.window = counts, seed, window
        self.total = sum(counts)
        self._epoch: tuple[int, np.ndarray] = (-1, np.empty((0, 2), dtype=np.int64))

    def epoch(self, number: int) -> np.ndarray:
        """[total, 2] int64: (shard, sample) of every position of an epoch."""
        if self._epoch[0] != number:
            random = np.random.default_rng([self.seed, number])
            shards = random.permutation(len(self.counts))
            parts = []
            for start in range(0, len(shards), self.window):
                part = np.concatenate(
                    [
                        np.stack([np.full(self.counts[shard], shard), np.arange(self.counts[shard])], axis=1)
                        for shard in shards[start : start + self.window]
                    ]
                )
                parts.append(random.permutation(part))
            self._epoch = (number, np.concatenate(parts))
        return self._epoch[1]

    def at(self, position: int, count: int) -> list[tuple[int, int]]:
        """(shard, sample) of `count` positions from `position` on, across epochs."""
        picks: list[tuple[int, int]] = []
        while len(picks) < count:
            number, start = divmod(position + len(picks), self.total)
            part = self.epoch(number)[start : start + count - len(picks)]
            picks += [(int(shard), int(sample)) for shard, sample in part]
        return picks


class Loader:
    """Batches of the stream from a position on, made by a thread two steps ahead of training.

    A shard's checksum is verified when the first sample of it is wanted.
    """

    def __init__(
        self, files: Sequence[Path], order: Order, position: int, size: int, queries: int | None, pin: bool
    ) -> None:
        self.shards = [Shard(file) for file in files]
        self._order, self._size, self._queries, self._pin = order, size, queries, pin
        self._verified: set[int] = set()
        self._queue: queue.Queue[Batch | Exception] = queue.Queue(maxsize=2)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(position,), daemon=True)
        self._thread.start()

    def __next__(self) -> Batch:
        """The next batch.

        Raises:
            TrainerError: a shard is damaged (it was set aside).
        """
        item = self._queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        while self._thread.is_alive():
            with self._queue.mutex:
                self._queue.queue.clear()
                self._queue.not_full.notify()
            self._thread.join(0.05)

    def _run(self, position: int) -> None:
        try:
            while not self._closed.is_set():
                picks = self._order.at(position, self._size)
                for index in {shard for shard, _ in picks} - self._verified:
                    if self.shards[index].damaged():
                        raise to_rebuild(self.shards[index].path, "damaged")
                    self._verified.add(index)
                batch = collate([(self.shards[shard], sample) for shard, sample in picks], self._queries)
                self._queue.put(batch.pin() if self._pin else batch)
                position += self._size
        except Exception as error:
            self._queue.put(error)
