"""The part of the seed table that training works on: the rows of token ids that occur.

No other row ever gets a gradient, so that leaving them out changes nothing but the time and memory that they and their
moments take: of the demo's 30,522 rows, fewer than 3,000 occur.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from trainer.batches import Batch
from trainer.shards import Shard


class Vocabulary:
    """Token ids that occur, and the whole table that their rows are part of."""

    def __init__(self, table: Tensor, shards: Iterable[Shard]) -> None:
        """Table [V, W] f32: what training starts from."""
        pad = torch.zeros(1, dtype=torch.int32)
        self._ids = torch.unique(torch.cat([pad, *(shard.columns["slots"] for shard in shards)])).long()
        self._table = table
        self._places = torch.full((len(table),), -1, dtype=torch.int64)  # an id that does not occur is an error
        self._places[self._ids] = torch.arange(len(self._ids))

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def start(self) -> Tensor:
        """The rows that training starts from."""
        return self.narrow(self._table)

    def narrow(self, table: Tensor) -> Tensor:
        """The rows of a whole table that occur."""
        return table[self._ids]

    def widen(self, rows: Tensor) -> Tensor:
        """The whole table with these rows, on the CPU."""
        return self._table.index_copy(0, self._ids, rows.detach().cpu())

    def numbered(self, batch: Batch) -> Batch:
        """The batch with the places of rows in the narrow table in its slots."""
        return replace(batch, slots=self._places[batch.slots])
