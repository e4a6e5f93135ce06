"""The samples of a pack that takes pictures: instructions for one or two pictures, and prompts without any.

As with prompts (trainer.corpus), everything follows from the pictures, the settings and the seed, not from names or
order. A picture is known by a digest of what it shows; files that show the same are one picture with the captions of
all. Pictures that are almost the same (trainer.near_pictures) are one group, and the rank of its lowest digest decides
whether all of it is held out for val: so of the pictures that are there, added ones can change the side of those only
that they are almost the same as. The ranks also say which pictures go first where fewer are wanted. The n-th sample of
a picture is a function of the picture, n and the seed, and so are its text and, among the pictures that are there, its
partner: added pictures take some places and change nothing else.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from trainer import corpus, instructions, near_pictures, picture_sources
from trainer.config import Corpus
from trainer.corpus import MIN_VAL, Prompt, Splits, Tally, rank
from trainer.errors import TrainerError
from trainer.files import read_json, write_json
from trainer.job import Progress, log
from trainer.picture_sources import Source
from trainer.picture_store import Store
from trainer.prompt_cleaning import collapse, for_engine

_MAX_LISTED = 100
_KINDS = ("text", "one", "two")  # by number of pictures


@dataclass
class Picture:
    """A picture of the run: its file's name in corpus/images, its digest, and what is known of it."""

    name: str
    digest: str
    thumbnail: bytes
    source: str
    captions: set[str] = field(default_factory=set)


class _Report:
    """What is told in corpus.json about pictures."""

    def __init__(self) -> None:
        self.read = 0
        self.skipped: list[dict[str, str]] = []
        self.unreadable = 0
        self.instructions: Counter[str] = Counter()


def build(
    settings: Corpus,
    records: Iterable[str | Path],
    paths: Mapping[str, str | Path],
    summary: str | Path,
    threads: int = 1,
) -> None:
    """Write the samples of each split, their pictures into the folder `images` beside them, and what became of all.

    Args:
        settings: the settings of the stage.
        records: the material records (JSON) of prompt and picture presets.
        paths: by split, the file for its samples: {"id", "text", "source", "images": names} a line, sorted by id;
            those of probe have no pictures.
        summary: the file for counts, drops and the length histogram.
        threads: pictures decoded at a time.

    Raises:
        TrainerError: a source cannot be read, too many of its pictures are broken, or too few samples are left.
    """
    records = list(records)
    store = Store(Path(paths["train"]).parent / "images")
    tally, report = Tally(), _Report()
    pictures = _gathered(settings, _sources(settings, records), store, threads, tally, report)
    pools = _split(pictures, settings)
    _check_pools(pools, settings, report)
    splits: Splits = {"train": {}, "val": {}}
    if settings.n_text:
        counts = {"n_train": settings.n_text, "n_val": settings.n_val_text}
        splits = corpus.selected(settings.model_copy(update=counts), records, tally)
        for name, here in (("n_train", "n_text"), ("n_val", "n_val_text")):
            tally.dropped[f"over {here}"] = tally.dropped.pop(f"over {name}")
    splits["train"] |= _singles(pools["train"], settings.n_image, settings, report)
    splits["train"] |= _pairs(pools["train"], settings.n_two, settings, report)
    splits["val"] |= _singles(pools["val"], min(settings.n_val_image, len(pools["val"])), settings, report)
    samples = {split: _counted(rows.values()) for split, rows in splits.items()}
    _check_counts(settings, samples, tally)
    splits["probe"] = corpus.probes(splits["train"])
    corpus.write(splits, paths)
    store.drop_others({picture.name for picture in pictures})
    shown = {
        "read": report.read,
        "unreadable": report.unreadable,
        "kept": len(pictures),
        "train": len(pools["train"]),
        "val": len(pools["val"]),
        "without captions": sum(not picture.captions for picture in pictures),
        "samples": samples,
        "instructions": dict(sorted(report.instructions.items())),
        "skipped": report.skipped,
    }
    write_json(summary, corpus.summarized(splits, tally) | {"pictures": shown})
    log.info(
        "corpus: %d train and %d val samples with %d and %d pictures, of %d read",
        *(len(splits["train"]), len(splits["val"]), len(pools["train"]), len(pools["val"]), report.read),
    )


def sample_id(text: str, digests: Iterable[str]) -> str:
    """16 hex digits that identify a sample with pictures."""
    return sha256("|".join([*digests, text]).encode()).hexdigest()[:16]


def _sources(settings: Corpus, records: list[str | Path]) -> Iterable[Source]:
    materials = {record["id"]: record for record in map(read_json, records)}
    for preset in settings.image_presets:
        yield picture_sources.preset(preset, materials[f"images-{preset}"]["path"])
    for folder in settings.image_folders:
        yield picture_sources.folder(folder)


def _gathered(
    settings: Corpus, sources: Iterable[Source], store: Store, threads: int, tally: Tally, report: _Report
) -> list[Picture]:
    """Every picture once, in order of rank, with its captions as they are trained."""
    clean = for_engine if settings.clean == "engine" else collapse
    pictures: dict[str, Picture] = {}
    for source in sources:
        progress = Progress(f"corpus: {source.name}", source.count, "pictures")
        bad = 0
        for found, stored in store.add(source.pictures, threads):
            progress.update(1)
            if isinstance(stored, str):
                bad += 1
                if len(report.skipped) < _MAX_LISTED:
                    report.skipped.append({"source": source.name, "name": found.name, "reason": stored})
                continue
            picture = pictures.setdefault(
                stored.digest, Picture(stored.name, stored.digest, stored.thumbnail, source.name)
            )
            picture.source = min(picture.source, source.name)
            captions = (instructions.tidy(clean(caption)) for caption in found.captions)
            said = (caption for caption in captions if any(map(str.isalnum, caption)))
            picture.captions.update(caption for caption in said if len(caption) <= settings.max_chars)
        read = round(progress.done)
        tally.read[source.name] += read
        report.read += read
        report.unreadable += bad
        if bad:
            _check_broken(settings, source.name, bad, read, report, tally)
    return sorted(pictures.values(), key=lambda picture: rank(picture.digest, settings.seed))


def _check_broken(settings: Corpus, source: str, bad: int, read: int, report: _Report, tally: Tally) -> None:
    if bad > settings.max_bad_pictures * read:
        first = next((row for row in report.skipped if row["source"] == source), None)
        example = f" (such as {first['name']}: {first['reason']})" if first else ""
        raise TrainerError(
            f"{bad} of {read} pictures of {source} cannot be read{example}, more than corpus.max_bad_pictures "
            f"({settings.max_bad_pictures:.0%}); repair them, take the source out, or raise that setting"
        )
    tally.warn(f"{bad} of {read} pictures of {source} cannot be read and are left out (listed in corpus.json)")


def _split(pictures: list[Picture], settings: Corpus) -> dict[str, list[Picture]]:
    """The pictures of both splits, in order of rank."""
    pools: dict[str, list[Picture]] = {"train": [], "val": []}
    if not pictures:
        return pools
    thumbnails = np.frombuffer(b"".join(picture.thumbnail for picture in pictures), np.uint8)
    groups = near_pictures.groups(thumbnails.reshape(len(pictures), -1)).tolist()
    lowest: dict[int, str] = {}
    for group, picture in zip(groups, pictures, strict=True):
        lowest[group] = min(picture.digest, lowest.get(group, picture.digest))
    boundary = settings.val_fraction * 2**64
    held_out = {group for group, digest in lowest.items() if rank(digest, settings.seed) < boundary}
    for group, picture in zip(groups, pictures, strict=True):
        pools["val" if group in held_out else "train"].append(picture)
    return pools


def _check_pools(pools: dict[str, list[Picture]], settings: Corpus, report: _Report) -> None:
    if all(pools.values()):
        return
    empty = "val" if pools["train"] else "train"
    change = "add pictures, or raise corpus.val_fraction" if empty == "val" else "add pictures"
    raise TrainerError(
        f"none of the {sum(map(len, pools.values()))} different pictures of {report.read} that were read is for "
        f"{empty} (corpus.val_fraction is {settings.val_fraction:g}, and near-identical ones stay together); {change}"
    )


def _singles(pictures: list[Picture], count: int, settings: Corpus, report: _Report) -> dict[str, Prompt]:
    """Samples with one picture each: the first of all pictures, then the second of all, and so on."""

    def write(picture: Picture, key: str) -> tuple[instructions.Instruction, list[Picture]]:
        return instructions.one(sorted(picture.captions), key, settings.empty_fraction), [picture]

    return _rounds(pictures, count, settings, report, write)


def _pairs(pictures: list[Picture], count: int, settings: Corpus, report: _Report) -> dict[str, Prompt]:
    """Samples with two pictures each.

    The pictures stand on a circle at their ranks; the partner of a picture is the first after a point that its key
    says. So of those that are there, added pictures change only the partners of those that they come to stand before.
    """
    ranks = [rank(picture.digest, settings.seed) for picture in pictures]

    def write(picture: Picture, key: str) -> tuple[instructions.Instruction, list[Picture]]:
        place = bisect_left(ranks, rank(key, settings.seed)) % len(pictures)
        partner = pictures[place]
        if partner is picture:
            partner = pictures[(place + 1) % len(pictures)]
        return instructions.two(sorted(picture.captions), sorted(partner.captions), f"two:{key}"), [picture, partner]

    return _rounds(pictures, count if len(pictures) > 1 else 0, settings, report, write)


def _rounds(pictures: list[Picture], count: int, settings: Corpus, report: _Report, write: Any) -> dict[str, Prompt]:
    """Rounds over all pictures until there are `count` different samples, or a round brings no new one."""
    samples: dict[str, Prompt] = {}
    number, before = 0, -1
    while len(samples) < count and len(samples) > before:
        before = len(samples)
        for picture in pictures:
            if len(samples) == count:
                break
            (kind, text), shown = write(picture, f"{settings.seed}:{picture.digest}:{number}")
            key = sample_id(text, [one.digest for one in shown])
            if key not in samples:
                samples[key] = Prompt(text, picture.source, tuple(one.name for one in shown))
                report.instructions[kind] += 1
        number += 1
    return samples


def _counted(samples: Iterable[Prompt]) -> dict[str, int]:
    """Samples with text alone, with one picture and with two."""
    found = Counter(_KINDS[len(sample.images)] for sample in samples if sample.text or sample.images)
    return {kind: found[kind] for kind in _KINDS}


def _check_counts(settings: Corpus, samples: dict[str, dict[str, int]], tally: Tally) -> None:
    train, val = samples["train"], samples["val"]
    for name, have in {
        "n_image": train["one"],
        "n_two": train["two"],
        "n_text": train["text"],
        "n_val_image": val["one"],
        "n_val_text": val["text"],
    }.items():
        if have < (wanted := getattr(settings, name)):
            change = "add to what they are made from" + (" or raise corpus.val_fraction" if "val" in name else "")
            tally.warn(
                f"{have} samples are fewer than corpus.{name} ({wanted}), which also sets the number of shards; lower "
                f"it to {have} for shards of the size that is set, or {change}"
            )
    if (have := sum(val.values())) < MIN_VAL:
        raise TrainerError(
            f"only {have} val samples are left, and a validation needs {MIN_VAL}; raise corpus.n_val_image or "
            "corpus.val_fraction, or add pictures or prompts"
        )
