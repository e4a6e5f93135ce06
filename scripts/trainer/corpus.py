"""The prompts of a run: gathered, cleaned, without repetitions, split into train and val; and those of `probe`.

Everything follows from the set of prompts, the settings and the seed, never from the order of files or lines. A
prompt's id is a hash of its text. A hash of seed and id, the prompt's rank, decides the rest: the lowest `val_fraction`
of the ranks is held out for val, and lower ranks go first where prompts are dropped. So a prompt that is held out stays
so when the corpus grows: it can leave val for another one, but it never comes to train, nor does anything nearly the
same.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer import demo_prompts, near_duplicates, probe, prompt_sources
from trainer.config import Corpus
from trainer.errors import TrainerError
from trainer.files import read_json, write_json, written_whole
from trainer.job import log
from trainer.prompt_cleaning import collapse, for_engine
from trainer.prompt_sources import Row

MIN_VAL = 16
_MAX_BAD = 0.05
_MAX_LISTED = 100
_BINS = 30


class Prompt(NamedTuple):
    """A prompt, the name of its source, and its pictures; of equal prompts the smallest of these tuples is taken."""

    text: str
    source: str
    images: tuple[str, ...] = ()


Splits = dict[str, dict[str, Prompt]]  # by split and id


class Tally:
    """What is told in corpus.json about the prompts that were read."""

    def __init__(self) -> None:
        self.read: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.skipped: list[dict[str, Any]] = []
        self.warnings: list[str] = []

    def reasons(self) -> str:
        """Counts of what was dropped, in words."""
        return ", ".join(f"{count} {reason}" for reason, count in sorted(self.dropped.items()) if count) or "none"

    def warn(self, sentence: str) -> None:
        """Tell a warning now and in corpus.json."""
        self.warnings.append(sentence)
        log.warning("warning: %s", sentence)


def build(
    settings: Corpus, records: Iterable[str | Path], paths: Mapping[str, str | Path], summary: str | Path
) -> None:
    """Write the prompts of each split as JSON lines, and what became of everything that was read.

    Args:
        settings: the settings of the stage.
        records: the material records (JSON) of the presets that are files.
        paths: by split, the file for its prompts: one object {"id", "text", "source"} a line, sorted by id.
        summary: the file for counts, drops and the length histogram.

    Raises:
        TrainerError: a source cannot be read, or too few prompts are left.
    """
    tally = Tally()
    if settings.train_file and settings.val_file:
        splits = _ready_made(settings.train_file, settings.val_file, tally)
    else:
        splits = selected(settings, records, tally)
    prompts = _with_text(splits)
    _check_sizes(settings, prompts, tally)
    splits["probe"] = probes(splits["train"])
    write(splits, paths)
    write_json(summary, summarized(splits, tally))
    log.info(
        "corpus: %d train and %d val prompts of %d read; dropped: %s",
        *(len(prompts["train"]), len(prompts["val"]), tally.read.total()),
        tally.reasons(),
    )


def selected(settings: Corpus, records: Iterable[str | Path], tally: Tally) -> Splits:
    """At most n_train and n_val prompts of the presets and files, and the empty ones that go with them.

    Raises:
        TrainerError: a source cannot be read.
    """
    return _split(_gathered(settings, _sources(settings, records), tally), settings, tally)


def probes(train: dict[str, Prompt]) -> dict[str, Prompt]:
    """The prompts of the split `probe`, less those that are also trained on."""
    prompts = {prompt_id(text): Prompt(text, kind) for kind, text in probe.prompts()}
    return {key: prompt for key, prompt in prompts.items() if key not in train}


def write(splits: Splits, paths: Mapping[str, str | Path]) -> None:
    """Write each split as JSON lines {"id", "text", "source"}, and "images" where there are some, sorted by id."""
    for split, path in paths.items():
        with written_whole(path) as aside, open(aside, "w", encoding="utf-8", newline="\n") as file:
            for key, (text, source, images) in sorted(splits[split].items()):
                row = {"id": key, "text": text, "source": source} | ({"images": images} if images else {})
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def prompt_id(text: str) -> str:
    """16 hex digits that identify a text whatever its case (empty prompts have the id of `empty-<split>-<n>`)."""
    return hashlib.sha256(text.casefold().encode()).hexdigest()[:16]


def rank(key: str, seed: int) -> int:
    """The rank of a prompt of that id, in [0, 2^64): uniform, and independent of the id itself."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8])


def demo_count(settings: Corpus) -> int:
    """How many prompts the preset `demo` gives: 1.3 times what both splits need if none were dropped."""
    share = settings.val_fraction
    return math.ceil(1.3 * max(settings.n_train / (1 - share), settings.n_val / share))


def _sources(settings: Corpus, records: Iterable[str | Path]) -> Iterator[tuple[str, Iterable[Row]]]:
    """Name and rows of each source."""
    materials = {record["id"]: record for record in map(read_json, records)}
    for preset in settings.presets:
        if preset == "demo":
            texts = demo_prompts.prompts(demo_count(settings), settings.seed)
            yield preset, (Row(line, text) for line, text in enumerate(texts, 1))
        else:
            yield preset, prompt_sources.read(materials[f"prompts-{preset}"]["path"])
    for file in settings.files:
        yield file, prompt_sources.read(file)


def _texts(source: str, rows: Iterable[Row], tally: Tally) -> Iterator[str]:
    """The texts of one source; rows without one are counted and listed.

    Raises:
        TrainerError: there are too many of those.
    """
    read, bad = 0, []
    for row in rows:
        read += 1
        if row.text is None:
            bad.append(row)
        else:
            yield row.text
    tally.read[source] += read
    if len(bad) > _MAX_BAD * read:
        raise TrainerError(
            f"{len(bad)} of {read} prompts of {source} cannot be read (the first is line {bad[0].line}: "
            f"{bad[0].problem}), more than {_MAX_BAD:.0%}; repair the file or take it out of the settings of `corpus`"
        )
    if bad:
        tally.dropped["unreadable"] += len(bad)
        room = _MAX_LISTED - len(tally.skipped)
        tally.skipped += [{"source": source, "line": row.line, "reason": row.problem} for row in bad[:room]]
        tally.warn(f"{len(bad)} of {read} prompts of {source} cannot be read and are left out (listed in corpus.json)")
    log.info("corpus: %d prompts read from %s", read, source)


def _gathered(settings: Corpus, sources: Iterable[tuple[str, Iterable[Row]]], tally: Tally) -> dict[str, Prompt]:
    """Clean prompts of the right length by id, each once."""
    clean = for_engine if settings.clean == "engine" else collapse
    prompts: dict[str, Prompt] = {}
    for source, rows in sources:
        for raw in _texts(source, rows, tally):
            text = clean(raw)
            if len(text) < settings.min_chars:
                tally.dropped["too short"] += 1
            elif len(text) > settings.max_chars:
                tally.dropped["too long"] += 1
            else:
                _add(prompts, Prompt(text, source), tally)
    return prompts


def _add(prompts: dict[str, Prompt], prompt: Prompt, tally: Tally) -> None:
    key = prompt_id(prompt.text)
    if key in prompts:
        tally.dropped["exact duplicate"] += 1
        prompt = min(prompt, prompts[key])
    prompts[key] = prompt


def _split(prompts: dict[str, Prompt], settings: Corpus, tally: Tally) -> Splits:
    """The selected prompts of both splits, and their empties."""
    ranks = {key: rank(key, settings.seed) for key in prompts}
    keys = sorted(prompts, key=ranks.__getitem__)
    boundary = settings.val_fraction * 2**64
    held_out = sum(value < boundary for value in ranks.values())
    if settings.near_duplicates < 1:
        log.info("corpus: looking for near duplicates among %d prompts", len(keys))
        texts = [prompts[key].text for key in keys]
        kept = near_duplicates.kept(texts, held_out, settings.near_duplicates, settings.n_train)
    else:
        kept = [True] * len(keys)
    tally.dropped["near duplicate"] += kept.count(False)
    val = [key for key, keep in zip(keys[:held_out], kept, strict=False) if keep]
    train = [key for key, keep in zip(keys[held_out:], kept[held_out:], strict=False) if keep]
    tally.dropped["over n_val"] += len(val[settings.n_val :])
    # The search for near duplicates ends with the last prompt that is needed.
    tally.dropped["over n_train"] += len(train[settings.n_train :]) + len(keys) - len(kept)
    splits = {}
    for split, selected in (("train", train[: settings.n_train]), ("val", val[: settings.n_val])):
        empty = int(settings.empty_fraction * len(selected))
        if split == "val" and settings.empty_fraction > 0:
            empty = max(empty, 1)
        splits[split] = {key: prompts[key] for key in selected} | _empties(split, empty)
    return splits


def _empties(split: str, count: int) -> dict[str, Prompt]:
    return {prompt_id(f"empty-{split}-{number}"): Prompt("", "empty") for number in range(count)}


def _ready_made(train_file: str, val_file: str, tally: Tally) -> Splits:
    """Both splits as they are in files of the user: empty prompts are kept, nothing is cleaned, limited or added.

    Repetitions go (a prompt has one id), and so do train prompts that are also in val.
    """
    splits: Splits = {}
    for split, file in (("val", val_file), ("train", train_file)):
        prompts: dict[str, Prompt] = {}
        empty = 0
        for raw in _texts(file, prompt_sources.read(file), tally):
            text = collapse(raw)
            if not text:
                empty += 1
            elif split == "train" and prompt_id(text) in splits["val"]:
                tally.dropped["also in val"] += 1
            else:
                _add(prompts, Prompt(text, file), tally)
        splits[split] = prompts | _empties(split, empty)
    if tally.dropped["also in val"]:
        tally.warn(
            f"{tally.dropped['also in val']} prompts of {train_file} are also in {val_file} and are left out of train"
        )
    return splits


def _check_sizes(settings: Corpus, prompts: Splits, tally: Tally) -> None:
    sizes = {split: len(rows) for split, rows in prompts.items()}
    left = f"of {tally.read.total()} prompts that were read (dropped: {tally.reasons()})"
    if not sizes["train"]:
        what = "train_file" if settings.train_file else "corpus.presets or corpus.files"
        raise TrainerError(f"no train prompts are left {left}; add prompts to {what}")
    if sizes["val"] < MIN_VAL:
        if settings.val_file:
            change = "add prompts to val_file"
        elif settings.n_val < MIN_VAL:
            change = f"raise corpus.n_val, which is {settings.n_val}"
        else:
            change = "add prompts to corpus.presets or corpus.files, or raise corpus.val_fraction"
        raise TrainerError(
            f"only {sizes['val']} val prompts are left {left}, and a validation needs {MIN_VAL}; {change}"
        )
    for split, wanted in (("train", settings.n_train), ("val", settings.n_val)):
        if (have := sizes[split]) != wanted:
            compared, change = ("fewer", "lower") if have < wanted else ("more", "raise")
            tally.warn(
                f"{have} {split} prompts are {compared} than corpus.n_{split} ({wanted}), which sets the number of "
                f"shards; {change} corpus.n_{split} to {have} for shards of the size that is set"
            )


def summarized(splits: Splits, tally: Tally) -> dict[str, Any]:
    """What corpus.json says."""
    prompts = _with_text(splits)
    by_source = {split: Counter(prompt.source for prompt in rows.values()) for split, rows in prompts.items()}
    lengths = {split: [len(prompt.text) for prompt in prompts[split].values()] for split in ("train", "val")}
    edges = _edges(max(max(listed, default=0) for listed in lengths.values()))
    return {
        **{
            split: {"prompts": len(prompts[split]), "empty": len(splits[split]) - len(prompts[split])}
            for split in ("train", "val")
        },
        "probe": by_source["probe"],
        "sources": {
            source: {"read": read, "train": by_source["train"][source], "val": by_source["val"][source]}
            for source, read in tally.read.items()
        },
        "dropped": {reason: count for reason, count in tally.dropped.items() if count},
        "length_histogram": {
            "edges": edges,
            **{split: np.histogram(listed, edges)[0].tolist() for split, listed in lengths.items()},
        },
        "skipped": tally.skipped,
        "warnings": tally.warnings,
    }


def _with_text(splits: Splits) -> Splits:
    return {split: {key: prompt for key, prompt in rows.items() if prompt.text} for split, rows in splits.items()}


def _edges(longest: int) -> list[int]:
    """Edges of equal bins, in characters, that hold every length from 0 to `longest`."""
    width = longest // _BINS + 1
    return [width * number for number in range(_BINS + 1)]
