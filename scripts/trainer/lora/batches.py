"""The order of training pictures, and batches made of them ahead of time.

The stream of items is a function of (seed, position): item number n is always the same one, and so is all that is drawn
for it, whatever was stopped and resumed in between. An epoch has every item once. It is laid out so that most batches
have pictures of one bucket; those that are left over of all buckets follow together. A batch is given to the network
bucket by bucket.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.errors import TrainerError
from trainer.job import log
from trainer.loading import Ahead
from trainer.lora import draws
from trainer.lora.conditions import Shard, Tensors, caption_digest
from trainer.lora.corpus import Picture, text_id
from trainer.shards import to_rebuild


@dataclass(frozen=True)
class Part:
    """Some items of a batch that are of one bucket.

    ids: of the pictures. files: their names in the user's folder, for messages. positions: of the items in the stream.
    latents: f32 [n, C, h, w], drawn from the VAE's posterior; of validation its mean.
    weights: of the items' losses, f32 [n].
    conditions: of the caption of each, or of the empty one.
    time_ids: int32 [n, 6]; None of families that take none.
    mask: how much each place counts, f32 [n, h, w]; None where none of the pictures has a mask.
    """

    ids: tuple[str, ...]
    files: tuple[str, ...]
    positions: tuple[int, ...]
    latents: Tensor
    weights: Tensor
    conditions: tuple[Tensors, ...]
    time_ids: Tensor | None = None
    mask: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> "Part":
        """A copy on a device, without waiting for it where memory is pinned."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> "Part":
        """A copy in pinned memory."""
        return self._each(Tensor.pin_memory)

    def split(self, count: int) -> Iterator["Part"]:
        """Parts of at most so many items."""
        for first in range(0, len(self), count):
            yield replace(
                self,
                **{name: it[first : first + count] for name, it in vars(self).items() if it is not None},
            )

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Part":
        changed = {name: change(it) for name, it in vars(self).items() if isinstance(it, Tensor)}
        conditions = tuple({name: change(it) for name, it in own.items()} for own in self.conditions)
        return replace(self, **changed, conditions=conditions)


@dataclass(frozen=True)
class Batch:
    """Some items, by bucket."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def largest(self) -> int:
        """Places of the latents of the item that has most of them; 0 of a batch without items."""
        return max((part.latents.shape[2:].numel() for part in self.parts), default=0)

    def split(self, limit: int) -> Iterator[Part]:
        """Parts of one bucket whose items have at most so many places (h times w) of latents, or of one item."""
        for part in self.parts:
            yield from part.split(max(1, limit // part.latents.shape[2:].numel()))

    def to(self, device: torch.device) -> "Batch":
        """A copy on a device, without waiting for it where memory is pinned."""
        return Batch(tuple(part.to(device) for part in self.parts))

    def pin(self) -> "Batch":
        """A copy in pinned memory."""
        return Batch(tuple(part.pin() for part in self.parts))


class Order:
    """Which item comes at which position of the stream."""

    def __init__(self, buckets: Sequence[Any], seed: int, size: int) -> None:
        """`buckets` are those of all items, `size` is that of a batch."""
        self.count, self.seed, self.size = len(buckets), seed, size
        self._members: dict[Any, list[int]] = defaultdict(list)
        for number, bucket in enumerate(buckets):
            self._members[bucket].append(number)
        self._epoch: tuple[int, list[int]] = (-1, [])

    def __getitem__(self, position: int) -> int:
        """The number of the item at a position."""
        epoch, place = divmod(position, self.count)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, self._drawn(epoch))
        return self._epoch[1][place]

    def _drawn(self, epoch: int) -> list[int]:
        """All items in the order of an epoch.

        The first of them fill up the last batch of the epoch before, and the last ones begin one that the next epoch
        fills up: both are of what the buckets leave over when batches have been made of each.
        """
        random, size = draws.at(self.seed, "order", epoch), self.size
        whole, rest = [], []
        buckets = list(self._members.values())
        for bucket in random.permutation(len(buckets)):
            members = random.permutation(buckets[bucket]).tolist()
            ends = range(size, len(members) + 1, size)
            whole += [members[end - size : end] for end in ends]
            rest.append(members[len(ends) * size :])
        before = min(-epoch * self.count % size, self.count)
        after = (self.count - before) % size
        if sum(map(len, rest)) < before + after:
            rest.append(whole.pop())
        left = [number for members in rest for number in members]
        whole += [left[end - size : end] for end in range(before + size, len(left) - after + 1, size)]
        batches = [whole[number] for number in random.permutation(len(whole))]
        return [*left[:before], *(number for batch in batches for number in batch), *left[len(left) - after :]]


@dataclass(frozen=True)
class _Drawn:
    """An item as a batch has it: the number of its picture, its place in the stream, and what was drawn for it.

    noise: of the posterior, None for its mean. empty: whether the caption is dropped.
    """

    number: int
    position: int
    variant: int = 0
    noise: np.random.Generator | None = None
    empty: bool = False


class Items:
    """The pictures of a split and their captions: rows of the corpus, with the shards of what is made of them.

    rows: of the pictures that there are; those that were skipped when they were encoded are not among them.
    """

    def __init__(self, rows: Sequence[Picture], pictures: Sequence[Path], captions: Sequence[Path]) -> None:
        """`pictures` are the shards of the split, `captions` those of the captions of all splits.

        Raises:
            TrainerError: a shard is damaged (it was set aside), or rows and shards do not belong together.
        """
        opened = [[_opened(path) for path in paths] for paths in (pictures, captions)]
        self._shards = [shard for shards in opened for shard in shards]
        self._pictures, self._captions = ({id: shard for shard in shards for id in shard.items} for shards in opened)
        skipped = {it["id"] for shard in self._shards for it in shard.header["skipped"]}
        self.rows = [row for row in rows if not {row.id, row.text_id} & skipped]
        for row in self.rows:
            self._check(row)
        if len(self.rows) < len(rows):
            log.info("%d of %d pictures are left out: they were skipped earlier", len(rows) - len(self.rows), len(rows))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the files."""
        return sum(shard.bytes_read for shard in self._shards)

    @property
    def has_empty(self) -> bool:
        """Whether there is the empty caption."""
        return text_id("") in self._captions

    def trained(self, places: Sequence[tuple[int, int]], seed: int, dropout: float) -> Batch:
        """Items as they are trained on.

        Args:
            places: the number of each item's picture, and its position in the stream.
            seed: of what is drawn: the variant, one sample of the VAE's posterior, whether the caption is dropped.
            dropout: the probability of that.

        Raises:
            TrainerError: a shard is damaged; it was set aside.
        """
        drawn = []
        for number, at in places:
            variants = self._told(number)["variants"]
            variant = int(draws.at(seed, "variant", at).integers(variants))
            empty = draws.at(seed, "text_dropout", at).random() < dropout
            drawn.append(_Drawn(number, at, variant, draws.at(seed, "posterior", at), empty))
        return self._batch(drawn)

    def validated(self, numbers: Sequence[int]) -> Batch:
        """Items with nothing drawn: means of the first variant, with their captions; positions are the numbers."""
        return self._batch([_Drawn(number, number) for number in numbers])

    def largest(self, count: int) -> Batch:
        """A batch of one bucket than which none needs more memory."""

        def needs(number: int) -> tuple[int, bool, int]:
            row = self.rows[number]
            return (
                row.bucket[0] * row.bucket[1],
                row.mask is not None,
                self._captions[row.text_id].items[row.text_id]["tokens"],
            )

        return self._batch([_Drawn(max(range(len(self)), key=needs), 0)] * count)

    def _told(self, number: int) -> dict[str, Any]:
        id = self.rows[number].id
        return self._pictures[id].items[id]

    def _check(self, row: Picture) -> None:
        """Refuse a picture whose latents or caption are not what the row says, whatever mixed them up."""
        pictures, captions = self._pictures.get(row.id), self._captions.get(row.text_id)
        fits = pictures and tuple(pictures.items[row.id]["bucket"]) == row.bucket
        paired = captions and captions.items[row.text_id]["caption"] == caption_digest(row.text)
        if not (fits and paired):
            wrong = "latents" if not fits else "caption"
            folder = self._shards[0].path.parents[1]
            raise TrainerError(
                f"the {wrong} of {row.file} in {folder} are not those of the corpus: delete that folder and run the "
                "same command again"
            )

    def _batch(self, drawn: Sequence[_Drawn]) -> Batch:
        """Items in parts of one bucket each, in the order that buckets come in."""
        by_bucket = defaultdict(list)
        for item in drawn:
            by_bucket[self.rows[item.number].bucket].append(item)
        ids = {text_id("") if item.empty else self.rows[item.number].text_id for item in drawn}
        conditions = {id: _read(self._captions[id], id) for id in ids}
        return Batch(tuple(self._part(items, conditions) for items in by_bucket.values()))

    def _part(self, drawn: Sequence[_Drawn], conditions: dict[str, Tensors]) -> Part:
        rows = [self.rows[item.number] for item in drawn]
        held = [
            _read(self._pictures[row.id], row.id, f"{item.variant}/") for item, row in zip(drawn, rows, strict=True)
        ]
        masks = [it.get("mask", torch.ones(it["mean"].shape[1:])) for it in held]
        return Part(
            ids=tuple(row.id for row in rows),
            files=tuple(row.file for row in rows),
            positions=tuple(item.position for item in drawn),
            latents=torch.stack([_sample(it, item.noise) for it, item in zip(held, drawn, strict=True)]),
            weights=torch.tensor([row.weight for row in rows]),
            conditions=tuple(
                conditions[text_id("") if item.empty else row.text_id] for item, row in zip(drawn, rows, strict=True)
            ),
            time_ids=torch.stack([it["time_ids"] for it in held]) if "time_ids" in held[0] else None,
            mask=torch.stack(masks) if any("mask" in it for it in held) else None,
        )


class Loader(Ahead[Batch]):
    """Batches of the stream from a position on; what they count is their items.

    Where several processes train together, each reads and has its share of every batch.
    """

    def __init__(
        self,
        items: Items,
        *,
        seed: int,
        dropout: float,
        position: int,
        size: int,
        pin: bool,
        rank: int = 0,
        processes: int = 1,
    ) -> None:
        """`dropout` is the share of items that are trained with the empty caption.

        Raises:
            TrainerError: there are no items, or the empty caption is wanted and there is none.
        """
        if not len(items):
            raise TrainerError("no picture is left to train on; see corpus.json and the logs of the shards")
        if dropout and not items.has_empty:
            raise TrainerError("the empty caption could not be encoded; set lora.text_dropout to 0")
        self.items = items
        self._seed, self._dropout, self._size, self._rank, self._processes = seed, dropout, size, rank, processes
        super().__init__(self._batches(position), pin)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from the files."""
        return self.items.bytes_read

    def _batches(self, position: int) -> Iterator[tuple[Batch, int]]:
        order = Order([row.bucket for row in self.items.rows], self._seed, self._size)
        while True:
            places = [(order[at], at) for at in range(position, position + self._size)]
            # Pictures of one bucket to one process, as far as all have equally many.
            places.sort(key=lambda place: self.items.rows[place[0]].bucket)
            first, end = (share * self._size // self._processes for share in (self._rank, self._rank + 1))
            yield self.items.trained(places[first:end], self._seed, self._dropout), self._size
            position += self._size


def _opened(path: Path) -> Shard:
    try:
        return Shard(path)
    except ValueError:
        raise to_rebuild(path, "damaged" if path.exists() else "missing") from None


def _read(shard: Shard, id: str, prefix: str = "") -> Tensors:
    try:
        return shard.read(id, prefix)
    except ValueError:
        raise to_rebuild(shard.path, "damaged" if shard.path.exists() else "missing") from None


def _sample(held: Tensors, noise: np.random.Generator | None) -> Tensor:
    """Latents [C, h, w] from the posterior, or its mean."""
    mean, std = held["mean"], held.get("std")
    if noise is None or std is None:
        return mean
    return mean + std * torch.from_numpy(noise.standard_normal(tuple(mean.shape), dtype=np.float32))
