"""shards.json: what the shards of a run are made from, and what each holds. Light to import."""

from collections import Counter
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.files import digest

FORMAT = 2  # of the shard file; raise it when older shards must not be read


def index(splits: dict[str, list[dict[str, Any]]], pack: str) -> dict[str, Any]:
    """The content of shards.json, from the lists of all blocks by split: what shards are made from and what each holds.

    Raises:
        TrainerError: blocks are made from different models or settings, or are parts of different numbers of shards.
    """
    blocks = [block for split in splits.values() for block in split]
    common = [{key: value for key, value in block.items() if key not in ("of", "shards")} for block in blocks]
    if any(other != common[0] for other in common):
        raise TrainerError("the blocks of shards are made from different models; run the precompute stage again")
    for split in splits.values():
        if any(block["of"] != sum(len(other["shards"]) for other in split) for block in split):
            raise TrainerError(
                "the number of shards was changed while they were computed; run the same command again, which rebuilds "
                "those that differ"
            )
    return {**common[0], "pack": pack, **{name: _split(split) for name, split in splits.items()}}


def _split(blocks: list[dict[str, Any]]) -> dict[str, Any]:
    entries = [entry for block in blocks for entry in block["shards"]]
    skipped = sum((Counter(entry["skipped"]) for entry in entries), Counter())
    counted = [key for key in ("samples", "rows", "student_rows", "bytes", "truncated") if key in entries[0]]
    totals = {key: sum(entry[key] for entry in entries) for key in counted}
    return {"shards": entries, **totals, "skipped": dict(skipped)}


def listed(run: Path, index: dict[str, Any], split: str) -> list[Path]:
    """The shards of a split that shards.json lists."""
    return [run / "shards" / split / entry["file"] for entry in index[split]["shards"]]


def trained_on(index: dict[str, Any]) -> str:
    """The digest of what training depends on: not of the probe shards, which it does not read."""
    return digest({key: value for key, value in index.items() if key != "probe"})
