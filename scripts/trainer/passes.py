"""One model over all samples of a block: length-sorted batches, what is kept of each sample, moments of all rows."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainer.files import digest
from trainer.job import Progress
from trainer.shards import Moments
from trainer.streaming import Activations, Executor, State

# Rows [rows, dim] bf16 of samples by id, None where one is not finite; and the moments of all of them.
Taken = tuple[dict[str, Tensor | None], Moments]


@dataclass(frozen=True)
class Item:
    """What a model reads, of a sample or of a picture.

    tokens: its share of a batch's budget.
    source: what its batch is made from.
    wanted: of a `RowsPass`, which of the first rows that the model makes of it are kept, bool [rows].
    """

    id: str
    tokens: int
    source: Any
    wanted: Tensor | None = None


class Pass:
    """The items of some shards on their way through a model; a batch holds items of one shard only."""

    unit = "pictures"
    alike = True  # whether the items of a batch have equally many tokens

    def __init__(
        self,
        name: str,
        shards: Sequence[Sequence[Item]],
        inputs: Sequence[str],
        tokens: int,
        folder: Path,
        make: Callable[[list[Any]], State],
    ) -> None:
        """Share out batches, and take up what an earlier job left of them.

        Args:
            name: of the model, for the log.
            shards: the items of each shard.
            inputs: digest of everything a shard is made from, for each.
            tokens: of a batch at most, padding included.
            folder: for what does not fit into memory and what a stop leaves.
            make: what the model reads, from the sources of a batch's items; called in threads.
        """
        self.name, self.count = name, sum(map(len, shards))
        self.batches = [(n, batch) for n, items in enumerate(shards) for batch in batched(items, tokens, self.alike)]
        keys = [digest([inputs[shard], [item.id for item in items]]) for shard, items in self.batches]
        self.kept = Activations(lambda number: make([item.source for item in self.batches[number][1]]), keys, folder)
        self._places = {
            (shard, item.id): (number, index)
            for number, (shard, items) in enumerate(self.batches)
            for index, item in enumerate(items)
        }

    def run(self, executor: Executor, stop: Callable[[], bool]) -> Iterator[int]:
        """Go through the model; gives the number of each shard whose items are done, in order.

        Raises:
            StoppedError: as asked.
            TrainerError: an item does not fit into memory.
        """
        sizes = [len(items) / len(executor.parts) for _, items in self.batches]
        progress = Progress(f"{self.name} on {executor.device}", self.count, self.unit)
        progress.skip(sum(level * size for level, size in zip(self.kept.levels, sizes, strict=True)))
        done = executor.run(self.kept, self._finish, stop, lambda number: progress.update(sizes[number]))
        for number in done:
            shard = self.batches[number][0]
            if number + 1 == len(self.batches) or self.batches[number + 1][0] != shard:
                yield shard

    def of(self, shard: int, id: str, names: Iterable[str]) -> State:
        """These tensors of what the model made of an item."""
        return self.kept.sample(*self._places[shard, id], names)

    def drop(self, shard: int) -> None:
        """Forget the items of a shard."""
        for number, (of, _) in enumerate(self.batches):
            if of == shard:
                self.kept.drop(number)

    def _finish(self, number: int, state: State) -> State:
        """What is kept of a batch's last state; computed where it is, which is the GPU if there is one."""
        return {name: tensor.cpu() for name, tensor in state.items()}


class RowsPass(Pass):
    """A pass of samples that keeps some of the rows that the model makes of each, with their moments."""

    unit = "prompts"
    alike = False

    def take(self, shard: int) -> Taken:
        """What became of the samples of a shard; it can be taken once."""
        found, sums, squares = {}, [], []
        for number, (of, items) in enumerate(self.batches):
            if of == shard:
                state = self.kept.state(number)
                rows = state["rows"].split(state["counts"].tolist())
                for item, own, finite in zip(items, rows, state["finite"].tolist(), strict=True):
                    found[item.id] = own if finite else None
                sums.append(state["sum"])
                squares.append(state["sumsq"])
        self.drop(shard)
        return found, (torch.stack(sums).sum(0), torch.stack(squares).sum(0))

    def _finish(self, number: int, state: State) -> State:
        rows = state["rows"].to(torch.bfloat16)
        masks = pad_sequence([item.wanted for item in self.batches[number][1]], batch_first=True)
        wanted = torch.zeros(rows.shape[:2], dtype=torch.bool)
        wanted[:, : masks.shape[1]] = masks
        wanted = wanted.to(rows.device)
        rows = rows.masked_fill(~wanted[..., None], 0)
        wide = rows.float()  # the square of a bf16 number is exact in f32
        return super()._finish(
            number,
            {
                "rows": rows[wanted],
                "counts": wanted.sum(1),
                "finite": torch.isfinite(rows).flatten(1).all(1),
                "sum": wide.sum((0, 1), dtype=torch.float64),
                "sumsq": wide.square().sum((0, 1), dtype=torch.float64),
            },
        )


def batched(items: Sequence[Item], tokens: int, alike: bool = False) -> list[list[Item]]:
    """Length-sorted batches whose padded size stays within `tokens`; an item that is larger is a batch of its own.

    Those of a batch are `alike` if they have equally many.
    """
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (item.tokens, item.id)):
        fits = batches and item.tokens * (len(batches[-1]) + 1) <= tokens
        if fits and (not alike or batches[-1][0].tokens == item.tokens):
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def padded(rows: Sequence[Sequence[int]]) -> State:
    """Ids [B, L] int64, right padded with 0, and lengths [B]."""
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return {"ids": ids, "lengths": torch.tensor([len(row) for row in rows])}
