"""The order of training samples, and batches made ahead of time.

The stream of samples is a function of (seed, position): sample number n is always the same one, whatever was stopped
and resumed in between. An epoch shuffles the shards, takes `window` of them at a time and shuffles their samples
together: samples of the whole corpus mix while few files are read at once.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.shards import Shard, to_rebuild


@dataclass(frozen=True)
class Batch:
    """Some samples, student rows and slots padded, target rows packed.

    student [B, L, student_dim] bf16, mask [B, L] bool, counts [B] int64: target rows of each sample,
    target [P, teacher_dim] bf16, slots [B, Q] int64 (0 at pads) or None where slots are not seeded.
    """

    student: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor
    target: torch.Tensor
    slots: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.counts)

    def to(self, device: torch.device) -> "Batch":
        """A copy on a device, without waiting for it where memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Batch":
        """A copy in pinned memory."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Batch":
        fields = self.student, self.mask, self.counts, self.target, self.slots
        return Batch(*(None if tensor is None else change(tensor) for tensor in fields))

    def packed(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, Q, W] rows of all slots -> [P, W], those that have a target, in its order."""
        if len(self.target) == len(rows) * rows.shape[1]:
            return rows.flatten(0, 1)
        return rows[torch.arange(rows.shape[1], device=rows.device) < self.counts[:, None]]

    def split(self, size: int) -> Iterator["Batch"]:
        """Parts of at most `size` samples, padding trimmed to the longest of each."""
        ends = self.counts.cumsum(0).tolist()
        for start in range(0, len(self), size):
            stop = min(start + size, len(self))
            longest = int(self.mask[start:stop].sum(1).max())
            yield Batch(
                self.student[start:stop, :longest],
                self.mask[start:stop, :longest],
                self.counts[start:stop],
                self.target[ends[start - 1] if start else 0 : ends[stop - 1]],
                None if self.slots is None else self.slots[start:stop],
            )


def collate(picks: Sequence[tuple[Shard, int]], queries: int) -> Batch:
    """The batch of these (shard, sample) pairs."""
    rows = [shard.rows(sample) for shard, sample in picks]
    longest = max(len(r.student) for r in rows)
    student = torch.zeros(len(rows), longest, rows[0].student.shape[1], dtype=torch.bfloat16)
    mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    slots = torch.zeros(len(rows), queries, dtype=torch.int64) if rows[0].slots else None
    for index, sample in enumerate(rows):
        student[index, : len(sample.student)] = sample.student
        mask[index, : len(sample.student)] = True
        if slots is not None:
            slots[index, : len(sample.slots)] = torch.tensor(sample.slots)
    counts = torch.tensor([len(sample.target) for sample in rows])
    return Batch(student, mask, counts, torch.cat([sample.target for sample in rows]), slots)


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

    def __init__(self, files: Sequence[Path], order: Order, position: int, size: int, queries: int, pin: bool) -> None:
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
