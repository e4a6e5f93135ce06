"""What an adapter is given at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor


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
        lengths = torch.tensor(self.lengths).to(device, non_blocking=True)[:, None]
        place = torch.arange(max(self.lengths), device=device)
        first = lengths.cumsum(0) - lengths
        return self.student[first + place.minimum(lengths - 1)], place < lengths

    def wanted(self, rows: Tensor) -> Tensor:
        """Of a row for each slot or token, those that have a target, in its order."""
        return rows if self.at is None else rows[self.at]

    def split(self, tokens: int) -> Iterator["Batch"]:
        """Parts of at most so many rows, student's and target's, or of one sample."""
        total, bounds = 0, [0]
        for number, size in enumerate(map(sum, zip(self.lengths, self.counts, strict=True))):
            if total and total + size > tokens:
                bounds.append(number)
                total = 0
            total += size
        for first, end in pairwise([*bounds, len(self)]):
            yield self._part(first, end)

    def _part(self, first: int, end: int) -> "Batch":
        """Some samples, next to each other."""
        ends = [[0, *accumulate(counts)] for counts in (self.lengths, self.counts, self.seen)]
        part = slice(first, end)
        tokens, rows, vision = (slice(of[first], of[end]) for of in ends)
        before = tokens.start if self.slots is None else first * self.slots.shape[1]
        return Batch(
            *(self.lengths[part], self.counts[part], self.seen[part]),
            *(self.student[tokens], self.target[rows]),
            at=None if self.at is None else self.at[rows] - before,
            slots=None if self.slots is None else self.slots[part],
            vision=None if self.vision is None else self.vision[vision],
            vision_at=None if self.vision_at is None else self.vision_at[vision] - tokens.start,
            read=None if self.read is None else self.read[rows],
        )
