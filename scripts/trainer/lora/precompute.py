"""A block of shards: latents of pictures (splits train and val), or embeddings of captions (split text).

Every item goes through its model alone: it is the same whatever else is computed with it, and nothing is padded. (One
picture, or the hundreds of tokens that a caption is made to, keep a GPU busy.) So an item that any shard of the run
has, made from the same, is taken from there. Only what is new is computed, and if nothing is, no model is loaded.
"""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from trainer import devices, packs, pictures
from trainer.config import Settings
from trainer.control import Requests
from trainer.errors import StoppedError, TrainerError
from trainer.files import digest
from trainer.job import Progress, log
from trainer.lora import conditions, families, geometry, models
from trainer.lora.conditions import Item, Pool, Shard, Tensors
from trainer.lora.families import Family
from trainer.materials import Record, parts_digest
from trainer.picture_store import in_order

Row = dict[str, Any]
Made = tuple[Tensors, dict[str, Any]]

_UNREADABLE = "a picture that cannot be read"
_NOT_FINITE = "values that are not finite"
_DECODERS = 4  # threads that make pixels of pictures while a GPU encodes others
_NAMED = 5  # files or captions that one message names at most


def made_from(settings: Settings, records: dict[str, Record]) -> dict[str, Any]:
    """What the items of the run's shards depend on, the pictures and captions themselves aside."""
    family, base = _family(settings), _base(records)
    text = (*family.text_encoders, *(it.replace("text_encoder", "tokenizer") for it in family.text_encoders))
    return {
        "format": conditions.FORMAT,
        "family": family.name,
        "vae": parts_digest(base, ("vae",)),
        "encoders": parts_digest(base, (*text, "model_index.json")),  # it says what the empty caption is
        "text_dtype": settings.precompute.teacher_dtype,
    }


def _family(settings: Settings) -> Family:
    return families.get(packs.get(settings.pack).family)


def _base(records: dict[str, Record]) -> Record:
    return next(record for record in records.values() if record.role == "base")


class Work(Protocol):
    """What is made of the rows of a split.

    unit, model: what the rows are, and what they go through, for people.
    made_from: what all items depend on.
    """

    unit: str
    model: str
    made_from: dict[str, Any]

    def parts(self, row: Row) -> Any:
        """What else the item of a row depends on, JSON-able."""

    def name(self, row: Row) -> str:
        """A row in messages."""

    def order(self, row: Row) -> Any:
        """What rows are sorted by, so that those of one size are computed one after another."""

    def load(self, device: torch.device) -> None:
        """Load the model."""

    def prepare(self, row: Row) -> Any:
        """What is done ahead, in threads.

        Raises:
            TrainerError: the row's files cannot be read.
        """

    def make(self, row: Row, prepared: Any) -> Made:
        """The tensors of the item of a row, and what its shard tells of it."""

    def told(self, rows: list[Row], shard: Shard) -> dict[str, Any]:
        """What the block's list tells of a shard besides, with the rows of its items."""


class Latents:
    """Of all variants of pictures."""

    unit = "pictures"
    model = "VAE"

    def __init__(self, settings: Settings, folder: Path, made_from: dict[str, Any], images: Path) -> None:
        """By the VAE of a pipeline's folder, of pictures in the folder `images`."""
        self.family, self.options, self.folder, self.images = _family(settings), settings.pictures, folder, images
        self.made_from = {name: made_from[name] for name in ("format", "family", "vae")}

    def parts(self, row: Row) -> Any:
        """What the picture and its mask show, and where each variant is in it; no name of a file."""
        shown = [row[name] and Path(row[name]).stem for name in ("image", "mask")]
        return [*shown, [list(it) for it in self._placements(row)]]

    def name(self, row: Row) -> str:
        """The picture's file in the user's folder."""
        return row["file"]

    def order(self, row: Row) -> Any:
        """The bucket."""
        return row["bucket"], row["id"]

    def load(self, device: torch.device) -> None:
        """Load the VAE."""
        self.vae = models.get(self.family.name)(self.folder).vae(device)

    def prepare(self, row: Row) -> list[tuple[geometry.Placement, torch.Tensor, torch.Tensor | None]]:
        """Of each variant: where it is, its pixels [3, H, W], and the mask [h, w] of its latents if there is one."""
        image = pictures.open_rgb(self.images / row["image"])
        mask = pictures.open_rgb(self.images / row["mask"]) if row["mask"] else None
        return [
            (it, geometry.pixels(image, it), None if mask is None else geometry.mask(mask, it))
            for it in self._placements(row)
        ]

    def make(self, row: Row, prepared: Any) -> Made:
        """Tensors as in `conditions`."""
        tensors = {}
        for variant, (placement, pixels, mask) in enumerate(prepared):
            mean, std = (it[0].cpu() for it in self.vae.encode(pixels[None]))
            tensors[f"{variant}/mean"] = mean
            if self.family.posterior == "sample":
                tensors[f"{variant}/std"] = std
            if self.family.time_ids:
                tensors[f"{variant}/time_ids"] = torch.tensor(placement.time_ids, dtype=torch.int32)
            if mask is not None:
                tensors[f"{variant}/mask"] = mask
        return tensors, {"bucket": row["bucket"], "variants": len(prepared)}

    def told(self, rows: list[Row], shard: Shard) -> dict[str, Any]:
        """Which caption is whose, which the shard itself does not depend on."""
        return {"pairs": digest([[row["id"], row["text_id"], row["weight"]] for row in rows])}

    def _placements(self, row: Row) -> list[geometry.Placement]:
        size, bucket = (row["width"], row["height"]), tuple(row["bucket"])
        numbers = geometry.variants(self.options)
        return [geometry.place(row["id"], size, bucket, self.options, number) for number in numbers]


class Embeddings:
    """Of captions."""

    unit = "captions"
    model = "text encoders"

    def __init__(self, settings: Settings, folder: Path, made_from: dict[str, Any]) -> None:
        """By the text encoders of a pipeline's folder."""
        self.family, self.dtype, self.folder = _family(settings), settings.precompute.teacher_dtype, folder
        self.made_from = {name: made_from[name] for name in ("format", "family", "encoders", "text_dtype")}

    def parts(self, row: Row) -> Any:
        """The caption."""
        return row["text"]

    def name(self, row: Row) -> str:
        """The beginning of the caption."""
        return json.dumps(row["text"] if len(row["text"]) <= 60 else row["text"][:59] + "…", ensure_ascii=False)

    def order(self, row: Row) -> Any:
        """The length."""
        return len(row["text"]), row["id"]

    def load(self, device: torch.device) -> None:
        """Load the text encoders."""
        loaded = models.get(self.family.name)(self.folder)
        self.encoder = loaded.text_encoder(devices.dtype(self.dtype, device), device)

    def prepare(self, row: Row) -> None:
        """Nothing can be done ahead."""

    def make(self, row: Row, prepared: Any) -> Made:
        """Tensors as the encoder gives them; which caption they are of, its tokens, and how many of them were cut."""
        wanted, taken = self.encoder.length(row["text"])
        [tensors] = self.encoder.encode([row["text"]])
        return tensors, {
            "caption": conditions.caption_digest(row["text"]),
            "tokens": taken,
            "truncated": wanted - taken,
        }

    def told(self, rows: list[Row], shard: Shard) -> dict[str, Any]:
        """How many captions are cut off."""
        return {"truncated": sum(bool(it["truncated"]) for it in shard.items.values())}


@dataclass
class _Split:
    """The items of a split and the shards that they belong to.

    folder: of the shards. rows: by id. keys: of the items of these. blocks, each: how many there are of blocks, and of
    shards in each.
    """

    folder: Path
    rows: dict[str, Row]
    keys: dict[str, str]
    blocks: int
    each: int

    def file(self, number: int) -> Path:
        """A shard."""
        return self.folder / f"{number // self.each:04d}-{number % self.each:02d}.safetensors"

    def home(self, id: str) -> Path:
        """The shard that an item belongs to."""
        return self.file(int(id, 16) % (self.blocks * self.each))

    @cached_property
    def members(self) -> dict[Path, list[str]]:
        """Ids of the items of each shard, sorted."""
        found: dict[Path, list[str]] = {self.file(number): [] for number in range(self.blocks * self.each)}
        for id in sorted(self.rows):
            found[self.home(id)].append(id)
        return found

    def missed(self, shard: Shard, pool: Pool) -> list[str]:
        """Ids of the items of a file that their own shards do not have yet."""
        mine = [id for id in shard.items if id in self.keys and shard.has(id, self.keys[id])]
        return [id for id in mine if self.home(id) != shard.path and not pool.holds(self.home(id), id, self.keys[id])]


@dataclass
class _Stale:
    """A shard to be made: its file, the ids of its items, the digest of what it is made from, those to be skipped."""

    file: Path
    ids: list[str]
    inputs: str
    skipped: list[dict[str, str]] = field(default_factory=list)


class Block:
    """The shards of one job; the model is loaded when the first item has to be computed."""

    def __init__(self, settings: Settings, records: dict[str, Record], requests: Requests, granted: int) -> None:
        """`granted` is how many bytes of main memory the job may use at most."""
        self.settings, self.options, self.requests, self.granted = settings, settings.precompute, requests, granted
        self.folder = Path(_base(records).path)
        self.made_from = made_from(settings, records)

    def fill(self, output: Path, block: int, blocks: int, corpus: Path) -> dict[str, Any]:
        """Make the shards of a block right; they lie beside `output`.

        Args:
            output: the file for the block's list, such as shards/train/0003.json.
            block: its number.
            blocks: how many there are in the split.
            corpus: the rows of the split, such as corpus/train.jsonl.

        Returns:
            The list: what the shards are made from, of how many in the split they are some, and what each holds.

        Raises:
            TrainerError: asked to stop (what was computed is kept), too many bad items, a model that does not fit.
        """
        self.work: Work = (
            Embeddings(self.settings, self.folder, self.made_from)
            if corpus.stem == "text"
            else Latents(self.settings, self.folder, self.made_from, corpus.parent / "images")
        )
        self.split = self._read(output.parent, blocks, corpus)
        # A picture may have gone from one split to the other, or be in both.
        splits = ("text",) if corpus.stem == "text" else ("train", "val")
        self.pool = Pool(*(output.parent.with_name(split) for split in splits))
        each = self.options.block_shards
        files = [self.split.file(number) for number in range(block * each, (block + 1) * each)]
        stale = [shard for file in files if (shard := self._stale(file))]
        self.rows = sum(len(self.split.members[file]) for file in files)
        self.bad: list[tuple[str, str]] = []
        if not stale:
            log.info("all %d shards are there and right", each)
        self._make(stale)
        self._clean(files)
        entries = [self._entry(file) for file in files]
        self._tell(files)
        return self.made_from | {"of": blocks * each, "shards": entries}

    def _read(self, folder: Path, blocks: int, corpus: Path) -> _Split:
        if not corpus.exists():
            raise TrainerError(f"{corpus} is missing; run the stage that writes it (`corpus`)")
        with open(corpus, encoding="utf-8") as lines:
            rows = {row["id"]: row for row in map(json.loads, lines)}
        keys = {id: digest([self.work.made_from, self.work.parts(row)]) for id, row in rows.items()}
        return _Split(folder, rows, keys, blocks, self.options.block_shards)

    def _stale(self, file: Path) -> _Stale | None:
        """A shard of the block, unless it is right."""
        ids = self.split.members[file]
        inputs = digest([self.work.made_from, [[id, self.split.keys[id]] for id in ids]])
        shard = self.pool.get(file)
        skipped = shard.header["skipped"] if shard else []
        if shard is None:
            reason = "damaged" if file.exists() else "missing"
        elif shard.header["inputs"] != inputs:
            reason = "other inputs"
        elif any(it["reason"] == _UNREADABLE for it in skipped):
            reason = "pictures of it could not be read"  # they may be there again
        elif not shard.whole():
            reason = "damaged"
        else:
            return None
        if reason != "missing":
            log.info("%s is made anew: %s", file, reason)
        # What is not finite would come out the same.
        known = [it for it in skipped if it["reason"] == _NOT_FINITE and self.split.keys.get(it["id"]) == it["key"]]
        return _Stale(file, ids, inputs, known)

    def _make(self, stale: list[_Stale]) -> None:
        here = {(id, item["key"]) for shard in self.pool.shards().values() for id, item in shard.items.items()}
        skipped = {it["id"] for shard in stale for it in shard.skipped}
        new = [id for shard in stale for id in shard.ids if (id, self.split.keys[id]) not in here and id not in skipped]
        self.new = len(new)
        self.device: torch.device | None = None
        for shard in stale:
            self._fill(shard)

    def _fill(self, shard: _Stale) -> None:
        """Make one shard; what was computed for it is kept if that does not come to an end."""
        skipped = {it["id"] for it in shard.skipped}
        items = self.pool.take({id: self.split.keys[id] for id in shard.ids if id not in skipped})
        computed: dict[str, Item] = {}
        try:
            for entry in shard.skipped:
                self._count(entry["id"], entry["reason"])
            rows = [self.split.rows[id] for id in shard.ids if id not in items and id not in skipped]
            for id, made in self._computed(sorted(rows, key=self.work.order)):
                key = self.split.keys[id]
                if isinstance(made, str):
                    shard.skipped.append({"id": id, "key": key, "reason": made})
                    self._count(id, made)
                else:
                    computed[id] = Item(key, *made)
        except TrainerError:
            if computed:
                conditions.write(shard.file.with_suffix(".partial"), items | computed, {})
            raise
        self._write(shard, items | computed)

    def _computed(self, rows: list[Row]) -> Iterator[tuple[str, Made | str]]:
        """What is made of each row, or why nothing is."""
        if not rows:
            return
        self._refuse_stopped()
        if self.device is None:
            self.device = devices.pick(self.options.device)
            devices.budget(self.device, self.options.gpu_gib, self.options.ram_gib, self.granted)
            with self._memory("the model was loaded"):
                self.work.load(self.device)
            self.progress = Progress(f"{self.work.model} on {self.device}", self.new, self.work.unit)
        threads = _DECODERS if self.device.type == "cuda" else 1
        with ThreadPoolExecutor(threads) as pool:
            for row, prepared in in_order(pool, self._prepared, rows, threads + 1):
                self._refuse_stopped()
                yield row["id"], self._made(row, prepared)
                self.progress.update(1)

    def _prepared(self, row: Row) -> Any:
        try:
            return self.work.prepare(row)
        except TrainerError as error:
            return error

    def _made(self, row: Row, prepared: Any) -> Made | str:
        if isinstance(prepared, TrainerError):
            log.warning("%s", prepared)
            return _UNREADABLE
        with self._memory(f"{self.work.name(row)} was encoded"):
            tensors, info = self.work.make(row, prepared)
        return (tensors, info) if conditions.finite(tensors.values()) else _NOT_FINITE

    @contextmanager
    def _memory(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise TrainerError(
                f"out of memory on {self.device} while {what}: free some of its memory, raise precompute.gpu_gib, "
                "lower pictures.resolution, or set precompute.device to another one"
            ) from None

    def _refuse_stopped(self) -> None:
        if self.requests.stop():
            raise StoppedError("stopped as asked; the same command goes on from here")

    def _count(self, id: str, reason: str) -> None:
        """Note an item that is skipped.

        Raises:
            TrainerError: they are too many.
        """
        self.bad.append((self.work.name(self.split.rows[id]), reason))
        if len(self.bad) > max(1, self.settings.pictures.max_bad_fraction * self.rows):
            reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(it for _, it in self.bad).items())
            raise TrainerError(
                f"{len(self.bad)} of {self.rows} {self.work.unit} cannot be used ({reasons}), such as "
                f"{_some([name for name, _ in self.bad])}: look at them, or raise pictures.max_bad_fraction"
            )

    def _write(self, shard: _Stale, items: dict[str, Item]) -> None:
        file, moved = shard.file, {}
        for path in (file, file.with_suffix(".moved")):
            if old := self.pool.get(path):
                for id in self.split.missed(old, self.pool):
                    with suppress(ValueError):  # it will be computed
                        moved[id] = old.item(id)
        if moved:
            conditions.write(file.with_suffix(".moved"), moved, {})
        skipped = sorted(shard.skipped, key=lambda it: it["id"])
        conditions.write(file, items, {"made_from": self.work.made_from, "inputs": shard.inputs, "skipped": skipped})
        file.with_suffix(".partial").unlink(missing_ok=True)

    def _clean(self, files: list[Path]) -> None:
        """Remove what is of no more use: here what was damaged, anywhere files that no item is missed of."""
        for file in files:
            for suffix in (".damaged", ".partial"):
                file.with_suffix(suffix).unlink(missing_ok=True)
        for path, shard in self.pool.shards(".safetensors", ".partial", ".moved").items():
            used = path.suffix != ".moved" and path.with_suffix(".safetensors") in self.split.members
            if path.parent == self.split.folder and not used and not self.split.missed(shard, self.pool):
                path.unlink(missing_ok=True)

    def _entry(self, file: Path) -> dict[str, Any]:
        """A shard in the block's list."""
        shard = Shard(file)
        return {
            "file": file.name,
            "samples": len(shard),
            "bytes": file.stat().st_size,
            "skipped": dict(Counter(it["reason"] for it in shard.header["skipped"])),
            "checksum": shard.header["checksum"],
        } | self.work.told([self.split.rows[id] for id in sorted(shard.items)], shard)

    def _tell(self, files: list[Path]) -> None:
        """Say which items are skipped or cut off, also where that happened in an earlier job."""
        cut = []
        for shard in map(Shard, files):
            for it in shard.header["skipped"]:
                log.warning("skipped %s: %s", self.work.name(self.split.rows[it["id"]]), it["reason"])
            cut += [
                f"{self.work.name(self.split.rows[id])} ({it['truncated']} of {it['tokens'] + it['truncated']} tokens)"
                for id, it in shard.items.items()
                if it.get("truncated")
            ]
        if cut:
            log.warning("the text encoder cuts off the end of %d captions: %s", len(cut), _some(cut))


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
