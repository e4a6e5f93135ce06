"""Samples of adapters as corpus/{train,val,probe}.jsonl hold them, and the names of splits."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainer.errors import TrainerError

# To train, to choose a checkpoint by, and, of adapters, neither (`trainer.probe`), of LoRAs the captions of both.
Split = Literal["train", "val", "probe", "text"]


@dataclass(frozen=True)
class Sample:
    """One prompt and the names of its pictures in corpus/images.

    `id` is 16 hex digits of a hash of both, which also say which shard it belongs to.
    """

    id: str
    text: str
    source: str
    images: tuple[str, ...] = ()

    def shard(self, count: int) -> int:
        """The number of its shard among `count`."""
        return int(self.id, 16) % count


def read(path: Path) -> Iterator[Sample]:
    """The samples of a split.

    Raises:
        TrainerError: there is no corpus yet.
    """
    if not path.exists():
        raise TrainerError(f"{path} is missing; run the stage that writes it (`corpus`)")
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Sample(row["id"], row["text"], row["source"], tuple(row.get("images", ())))
