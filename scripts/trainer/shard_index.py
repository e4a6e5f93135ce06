"""shards.json: what the shards of a run are made from, and what each holds. Light to import."""

from collections import Counter
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError

FORMAT = 2  # of the shard file; raise it when older shards must not be read


def index(train: list[dict[str, Any]], val: list[dict[str, Any]], pack: str) -> dict[str, Any]:
    """The content of shards.json, from the lists of all blocks: what the shards are made from and what each holds.

    Raises:
        TrainerError: blocks are made from different models or settings, or are parts of different numbers of shards.
    """
    common = [{key: value for key, value in block.items() if key not in ("of", "shards")} for block in train + val]
    if any(other != common[0] for other in common):
        raise TrainerError("the blocks of shards are made from different models; run the precompute stage again")
    for split in (train, val):
        if any(block["of"] != sum(len(other["shards"]) for other in split) for block in split):
            raise TrainerError(
                "the number of shards was changed while they were computed; run the same command again, which rebuilds "
                "those that differ"
            )
    return {**common[0], "pack": pack, "train": _split(train), "val": _split(val)}


def _split(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    entries = [entry for block in blocks for entry in block["shards"]]
    skipped = sum((Counter(entry["skipped"]) for entry in entries), Counter())
    totals = {key: sum(entry[key] for entry in entries) for key in ("samples", "rows", "student_rows", "bytes")}
    return {"shards": entries, **totals, "skipped": dict(skipped)}


def listed(run: Path, index: dict[str, Any], split: str) -> list[Path]:
    """The shards of a split that shards.json lists."""
    return [run / "shards" / split / entry["file"] for entry in index[split]["shards"]]
