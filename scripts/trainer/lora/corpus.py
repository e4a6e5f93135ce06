"""The pictures of a LoRA: each decoded once, with its caption and its bucket, split into train and val.

Everything follows from what pictures show, their captions and the settings, not from names or order. A picture's id is
the beginning of the digest of what it shows. Those with the lowest ranks (a hash of seed and id) are held out for val:
where there are enough of them, added pictures change the side of none. Pictures of the folder `regularization` are
trained on and never held out. What cannot be used stops the run with all of it in one message, before any model is
opened.
"""

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainer import pictures
from trainer.config import Pictures
from trainer.corpus import Tally, rank
from trainer.errors import TrainerError
from trainer.files import digest, write_json, written_whole
from trainer.job import Progress, log
from trainer.lora import captions, geometry
from trainer.lora.captions import Captioned, Captions
from trainer.lora.geometry import Size
from trainer.picture_sources import SUFFIXES, Found, shown
from trainer.picture_store import Store

FEW = 10  # pictures: of fewer none is held out, and as many are validated on where none is
_MAX_FAULTS = 20
_MAX_NAMED = 5

Source = Literal["pictures", "regularization"]


@dataclass(frozen=True)
class Picture:
    """A line of train.jsonl or val.jsonl.

    id: 16 hex digits of what it shows, which also say which shard it belongs to.
    file: its name in the folder, for messages. image, mask: names in corpus/images.
    text, text_id: its caption, and the id of that. width, height: of the picture when it is turned upright.
    bucket: width and height that it is cut to. weight: of its loss.
    """

    id: str
    file: str
    text: str
    text_id: str
    image: str
    width: int
    height: int
    bucket: Size
    mask: str | None
    weight: float
    source: Source

    @property
    def size(self) -> Size:
        """Width and height."""
        return self.width, self.height


class _Shown(NamedTuple):
    """A file that was decoded: its name in corpus/images, its size, whether all of it is black."""

    name: str
    size: Size
    black: bool


class _Report(Tally):
    """What is told in corpus.json besides the pictures themselves, and what has to be put right."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.disagreements: list[dict[str, str]] = []
        self.duplicates: list[dict[str, str]] = []
        self.origins: Counter[str] = Counter()

    def skip(self, source: Source, rows: Iterable[dict[str, str]]) -> None:
        """List what is not used of a folder: {"file", "reason"} each."""
        self.skipped += [row | {"source": source} for row in rows]


def build(settings: Pictures, resolution: int, outputs: Mapping[str, str | Path], threads: int = 1) -> None:
    """Write the pictures of each split, the captions of both, and what became of everything in the folders.

    Args:
        settings: the settings of the stage.
        resolution: pixels a side of a square: of the settings, or the family's.
        outputs: files by name: `train` and `val`, a `Picture` a line, sorted by id; `text`, every caption and the empty
            one, {"id", "text", "source"} a line, sorted by id; `summary`, corpus.json. The pictures themselves go to
            the folder `images` beside `train`, as the files that they came as.
        threads: pictures decoded at a time.

    Raises:
        TrainerError: a folder cannot be read, or something in it has to be put right: all of that, in one message.
    """
    if settings.folder is None:
        raise TrainerError("pictures.folder is not set; set it to the folder of the pictures to train on")
    store, report = Store(Path(outputs["train"]).parent / "images"), _Report()
    shapes = geometry.buckets(resolution, settings.ratios)
    rows = _gathered("pictures", settings.folder, settings, shapes, store, report, threads)
    others = {}
    if settings.regularization:
        told = len(report.faults)
        others = _gathered("regularization", settings.regularization, settings, shapes, store, report, threads)
        report.faults[told:] = [f"in {settings.regularization}: {fault}" for fault in report.faults[told:]]
    for key in sorted(rows.keys() & others.keys()):
        other = others.pop(key)
        row = {"file": other.file, "reason": f"{rows[key].file} of pictures.folder shows the same"}
        report.skip("regularization", [row])
        report.warn(f"{other.file} of pictures.regularization is also in pictures.folder and counts as one of that")
    splits = _split(rows, settings, report)
    _stop_for(report)
    splits["train"] |= others
    used = [*rows.values(), *others.values()]
    _warn(used, settings, report)
    for split, listed in splits.items():
        _write_lines(outputs[split], (asdict(row) for _, row in sorted(listed.items())))
    texts = {row.text for row in used} | {""}
    lines = ({"id": text_id(text), "text": text, "source": "caption"} for text in texts)
    _write_lines(outputs["text"], sorted(lines, key=lambda line: line["id"]))
    store.drop_others({name for row in used for name in (row.image, row.mask) if name})
    write_json(outputs["summary"], _summarized(splits, shapes, resolution, texts, report))
    log.info(
        "corpus: %d train and %d val pictures in %d buckets, %d captions",
        *(len(splits["train"]), len(splits["val"]), len({row.bucket for row in used}), len(texts - {""})),
    )


def read(path: str | Path) -> Iterator[Picture]:
    """The pictures of a split.

    Raises:
        TrainerError: there is no corpus yet.
    """
    if not Path(path).exists():
        raise TrainerError(f"{path} is missing; run the stage that writes it (`corpus`)")
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Picture(**row | {"bucket": tuple(row["bucket"])})


def text_id(text: str) -> str:
    """16 hex digits that identify a caption."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gathered(
    source: Source,
    folder: str,
    settings: Pictures,
    shapes: list[Size],
    store: Store,
    report: _Report,
    threads: int,
) -> dict[str, Picture]:
    """The pictures of a folder that are used, by id; all else is in the report."""
    setting = "pictures.folder" if source == "pictures" else "pictures.regularization"
    # The prompt of an instance is not said of other pictures of its class.
    prompt = settings.instance_prompt if source == "pictures" else None
    try:
        found = captions.discover(folder, setting, settings.caption_column, prompt, settings.masks)
    except TrainerError as error:
        report.faults.append(str(error))
        return {}
    report.faults += found.faults
    report.skip(source, found.skipped)
    report.disagreements += found.disagreements
    if found.disagreements:
        names = _named(f"{row['passed_over']} for {row['taken']}" for row in found.disagreements)
        report.warn(f"captions in {folder} that are passed over for others of the same pictures: {names}")
    if found.skipped:
        names = _named(f"{row['file']}: {row['reason']}" for row in found.skipped)
        report.warn(f"captions and files in {folder} that are not used: {names}")
    decoded = _decoded(source, folder, found, shapes, store, threads)
    _check_readable(source, folder, found, decoded, settings, report)
    rows: dict[str, list[Picture]] = defaultdict(list)
    for one in _captioned(source, folder, found, settings, report):
        picture = decoded[one.file]
        if isinstance(picture, str):
            continue
        text = one.text or ""
        row = Picture(
            id=picture.name[:16],
            file=shown(one.file),
            text=text,
            text_id=text_id(text),
            image=picture.name,
            width=picture.size[0],
            height=picture.size[1],
            bucket=geometry.bucket(picture.size, shapes),
            mask=_mask(one.mask, picture, decoded, report) if one.mask else None,
            weight=1.0 if source == "pictures" else settings.regularization_weight,
            source=source,
        )
        rows[row.id].append(row)
        report.origins[one.origin or "none"] += 1
    if not rows and not report.faults:
        why = next((f" ({row['file']}: {row['reason']})" for row in found.skipped), "")
        report.faults.append(
            f"the folder {folder} holds no {', '.join(SUFFIXES)} pictures to train on{why}; correct {setting}"
        )
    return {key: _one_of(alike, report) for key, alike in rows.items()}


def _decoded(
    source: Source, folder: str, found: Captions, shapes: list[Size], store: Store, threads: int
) -> dict[str, _Shown | str]:
    """What pictures and masks show, by their files, or why they cannot be used."""
    files = [file for one in found.pictures for file in (one.file, one.mask) if file]
    progress = Progress(f"corpus: {source}", len(files), "pictures")

    def read() -> Iterator[Found]:
        for file in files:
            try:
                data = Path(folder, file).read_bytes()
            except OSError as error:
                yield Found(file, b"", problem=error.strerror or type(error).__name__)
            else:
                yield Found(file, data, problem=pictures.unfit(data))

    decoded: dict[str, _Shown | str] = {}
    for one, stored in store.add(read(), threads):
        progress.update(1)
        if isinstance(stored, str):
            decoded[one.name] = stored
            continue
        height, width = pictures.size(store.folder / stored.name)
        if math.prod(geometry.scaled((width, height), geometry.bucket((width, height), shapes))) > pictures.MOST_PIXELS:
            decoded[one.name] = f"{width} x {height} is too narrow to be scaled"
        else:
            decoded[one.name] = _Shown(stored.name, (width, height), not any(stored.thumbnail))
    return decoded


def _check_readable(
    source: Source,
    folder: str,
    found: Captions,
    decoded: dict[str, _Shown | str],
    settings: Pictures,
    report: _Report,
) -> None:
    """List pictures that cannot be used: as faults if there are too many of them."""
    reasons = [(one.file, decoded[one.file]) for one in found.pictures]
    bad = found.unreadable + [
        {"file": shown(file), "reason": reason} for file, reason in reasons if isinstance(reason, str)
    ]
    read = len(found.pictures) + len(found.unreadable)
    report.read[source] += read
    report.skip(source, bad)
    if len(bad) > settings.max_bad_fraction * read:
        report.faults += [f"{row['file']} cannot be used ({row['reason']}); replace or remove it" for row in bad]
    elif bad:
        names = _named(row["file"] for row in bad)
        report.warn(f"pictures in {folder} that cannot be used and are left out: {names} of {read}")


def _captioned(source: Source, folder: str, found: Captions, settings: Pictures, report: _Report) -> list[Captioned]:
    """The pictures that are trained on, whether they have a caption or need none."""
    without = [one for one in found.pictures if one.text is None]
    if not without or settings.uncaptioned == "empty":
        return found.pictures
    prompt = ", or set pictures.instance_prompt" if source == "pictures" else ""
    if settings.uncaptioned == "skip":
        report.skip(source, [{"file": shown(one.file), "reason": "no caption"} for one in without])
        names = _named(shown(one.file) for one in without)
        report.warn(f"pictures in {folder} that have no caption and are left out: {names}")
    elif len(without) == len(found.pictures):
        table = next((f" ({row['file']}: {row['reason']})" for row in found.skipped if ".jsonl" in row["file"]), "")
        report.faults.append(
            f"no picture in {folder} has a caption{table}; write captions into 01.txt beside 01.jpg or into "
            f"metadata.jsonl{prompt}"
        )
    else:
        report.faults += [
            f"{shown(one.file)} has no caption; write one into {shown(Path(one.file).stem)}.txt{prompt}, or let "
            "pictures.uncaptioned be skip or empty"
            for one in without
        ]
    return [one for one in found.pictures if one.text is not None]


def _mask(file: str, picture: _Shown, decoded: dict[str, _Shown | str], report: _Report) -> str | None:
    """The name of a picture's mask in corpus/images; None if there is something wrong with it."""
    mask = decoded[file]
    if isinstance(mask, str):
        report.faults.append(f"{shown(file)} cannot be used ({mask}); replace or remove it")
    elif mask.size != picture.size:
        sizes = [f"{width} x {height}" for width, height in (mask.size, picture.size)]
        report.faults.append(
            f"the mask {shown(file)} has {sizes[0]} pixels and its picture {sizes[1]}; make them equal"
        )
    elif mask.black:
        report.faults.append(f"the mask {shown(file)} is black, so nothing of its picture counts; remove both")
    else:
        return mask.name
    return None


def _one_of(alike: list[Picture], report: _Report) -> Picture:
    """The one row of files that show the same."""
    first = min(alike, key=lambda row: row.file)
    for row in sorted(alike, key=lambda row: row.file):
        if row is first:
            continue
        report.duplicates.append({"file": row.file, "same_as": first.file})
        if row.text != first.text:
            report.faults.append(f"{first.file} and {row.file} show the same and have different captions; keep one")
        elif row.mask != first.mask:
            report.faults.append(f"{first.file} and {row.file} show the same and have different masks; keep one")
    return first


def _split(rows: dict[str, Picture], settings: Pictures, report: _Report) -> dict[str, dict[str, Picture]]:
    """The pictures of both splits, by id."""
    keys = sorted(rows, key=lambda key: rank(key, settings.seed))
    if len(keys) < FEW or not settings.holdout:
        return {"train": dict(rows), "val": {key: rows[key] for key in keys[:FEW]}}
    below = sum(rank(key, settings.seed) < settings.holdout * 2**64 for key in keys)
    held_out = set(keys[: max(1, below)])
    if len(held_out) == len(keys):
        report.faults.append("no picture is left to train on when some are held out; lower pictures.holdout")
    return {
        "train": {key: row for key, row in rows.items() if key not in held_out},
        "val": {key: row for key, row in rows.items() if key in held_out},
    }


def _stop_for(report: _Report) -> None:
    if not (faults := report.faults):
        return
    if len(faults) == 1:
        raise TrainerError(faults[0])
    listed = faults[:_MAX_FAULTS] + ([f"and {len(faults) - _MAX_FAULTS} more"] if len(faults) > _MAX_FAULTS else [])
    raise TrainerError("\n  ".join([f"{len(faults)} things in the folders of pictures have to be put right:", *listed]))


def _warn(used: list[Picture], settings: Pictures, report: _Report) -> None:
    if small := [row.file for row in used if min(row.size) < settings.min_side]:
        report.warn(f"pictures with a side below pictures.min_side ({settings.min_side}): {_named(small)}")
    long = [row.file for row in used if max(row.size) > geometry.WIDEST * min(row.size)]
    if long and settings.ratios > 1:
        report.warn(f"pictures longer than {geometry.WIDEST:g}:1, which are cut to about that: {_named(long)}")
    if report.duplicates:
        rows = [f"{row['file']} = {row['same_as']}" for row in report.duplicates]
        report.warn(f"files that show the same as another, which count once: {_named(rows)}")
    if settings.masks and not any(row.mask for row in used):
        report.warn("pictures.masks is on, and there is no mask; name the one of 01.jpg 01-mask.png")


def _named(names: Iterable[str]) -> str:
    """How many they are, and the first of them."""
    listed = sorted(names)
    return f"{len(listed)} ({', '.join(listed[:_MAX_NAMED])}{', ...' if len(listed) > _MAX_NAMED else ''})"


def _summarized(
    splits: dict[str, dict[str, Picture]], shapes: list[Size], resolution: int, texts: set[str], report: _Report
) -> dict[str, Any]:
    train, val = splits["train"], splits["val"]
    used = list((val | train).values())
    regularization = sum(row.source == "regularization" for row in used)
    return {
        "train": {"pictures": len(train) - regularization, "regularization": regularization},
        "val": {"pictures": len(val), "held_out": not val.keys() & train.keys()},
        "text": {"captions": len(texts)},
        "read": {source: report.read[source] for source in ("pictures", "regularization")},
        "captions": {"unique": len(texts - {""}), "empty": sum(not row.text for row in used)}
        | {"from": dict(sorted(report.origins.items())), "longest": max(map(len, texts))},
        "masks": sum(row.mask is not None for row in used),
        "resolution": resolution,
        "buckets": [
            _bucket(shape, rows, val) for shape in shapes if (rows := [row for row in used if row.bucket == shape])
        ],
        "skipped": sorted(report.skipped, key=lambda row: (row["source"], row["file"], row["reason"])),
        "duplicates": report.duplicates,
        "disagreements": report.disagreements,
        "warnings": report.warnings,
        "digest": digest([_content(split, row) for split, rows in splits.items() for _, row in sorted(rows.items())]),
    }


def _bucket(shape: Size, rows: list[Picture], val: Mapping[str, Picture]) -> dict[str, Any]:
    return {
        "size": shape,
        "pictures": len(rows),
        "val": sum(row.id in val for row in rows),
        "enlarged": sum(sum(geometry.scaled(row.size, shape)) > sum(row.size) for row in rows),
        "most_cut_off": round(max(geometry.cut_off(row.size, shape) for row in rows), 3),
    }


def _content(split: str, row: Picture) -> list[Any]:
    """What of a row training depends on: no name."""
    mask = row.mask and row.mask.partition(".")[0]
    return [split, row.id, row.text, row.bucket, mask, row.weight, row.source]


def _write_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    with written_whole(path) as aside, open(aside, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
