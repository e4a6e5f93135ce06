"""One model over all samples of a block: length-sorted batches, what is kept of each sample, moments of all rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.files import digest
from trainer.job import Progress
from trainer.shards import Moments
from trainer.streaming import Activations, Executor, State

# Rows [rows, dim] bf16 of samples by id, None where one is not finite; and the moments of all of them.
Taken = tuple[dict[str, Tensor | None], Moments]


@dataclass(frozen=True)
class Item:
    """What a model reads of a sample.

    ids: token ids.
    rows: how many rows the model makes of it, from the first on.
    tokens: its share of a batch's budget.
    """

    id: str
    ids: list[int]
    rows: int
    tokens: int


class Pass:
    """The samples of some shards on their way through a model; a batch holds samples of one shard only."""

    def __init__(
        self, name: str, shards: Sequence[Sequence[Item]], inputs: Sequence[str], tokens: int, folder: Path
    ) -> None:
        """Make batches, and take up what an earlier job left of them.

        Args:
            name: of the model, for the log.
            shards: the samples of each shard.
            inputs: digest of everything a shard is made from, for each.
            tokens: of a batch at most, padding included.
            folder: for what does not fit into memory and what a stop leaves.
        """
        self.name, self.count = name, sum(map(len, shards))
        self.batches = [(n, batch) for n, items in enumerate(shards) for batch in batched(items, tokens)]
        states = [_padded(items) for _, items in self.batches]
        keys = [digest([inputs[shard], [item.id for item in items]]) for shard, items in self.batches]
        self.kept = Activations(states, keys, folder)

    def run(self, executor: Executor, stop: Callable[[], bool]) -> Iterator[int]:
        """Go through the model; gives the number of each shard whose samples are done, in order.

        Raises:
            TrainerError: asked to stop (what was computed is kept), or a sample does not fit into memory.
        """
        sizes = [len(items) / len(executor.parts) for _, items in self.batches]
        progress = Progress(f"{self.name} on {executor.device}", self.count, "prompts")
        progress.skip(sum(level * size for level, size in zip(self.kept.levels, sizes, strict=True)))
        done = executor.run(self.kept, self._finish, stop, lambda number: progress.update(sizes[number]))
        for number in done:
            shard = self.batches[number][0]
            if number + 1 == len(self.batches) or self.batches[number + 1][0] != shard:
                yield shard

    def take(self, shard: int) -> Taken:
        """What became of the samples of a shard; it can be taken once."""
        found, sums, squares = {}, [], []
        for number, (of, items) in enumerate(self.batches):
            if of == shard:
                state = self.kept.state(number)
                for item, rows, finite in zip(items, state["rows"], state["finite"].tolist(), strict=True):
                    found[item.id] = rows[: item.rows] if finite else None
                sums.append(state["sum"])
                squares.append(state["sumsq"])
                self.kept.drop(number)
        return found, (torch.stack(sums).sum(0), torch.stack(squares).sum(0))

    def _finish(self, number: int, state: State) -> State:
        """What is kept of a batch's last state; computed where it is, which is the GPU if there is one."""
        rows = state["rows"].to(torch.bfloat16)
        counts = torch.tensor([item.rows for item in self.batches[number][1]], device=rows.device)
        real = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        rows = rows.masked_fill(~real[..., None], 0)
        wide = rows.float()  # the square of a bf16 number is exact in f32
        kept = {
            "rows": rows,
            "finite": torch.isfinite(rows).flatten(1).all(1),
            "sum": wide.sum((0, 1), dtype=torch.float64),
            "sumsq": wide.square().sum((0, 1), dtype=torch.float64),
        }
        return {name: tensor.cpu() for name, tensor in kept.items()}


def batched(items: Sequence[Item], tokens: int) -> list[list[Item]]:
    """Length-sorted batches whose padded size stays within `tokens`; an item that is larger is a batch of its own."""
    batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: (item.tokens, item.id)):
        if batches and item.tokens * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(item)
        else:
            batches.append([item])
    return batches


def _padded(items: Sequence[Item]) -> State:
    """Ids [B, L] int64, right padded with 0, and lengths [B]."""
    rows = [torch.tensor(item.ids) for item in items]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"ids": padded, "lengths": torch.tensor([len(row) for row in rows])}
