"""Run folders with a tiny base and small shards of made-up latents and embeddings, for tests of training LoRAs."""

import json
from dataclasses import asdict
from pathlib import Path

import tiny_pipelines
import torch
from trainer import config
from trainer.files import digest, sha256, write_json
from trainer.lora import conditions, corpus, families
from trainer.lora.conditions import Item
from trainer.lora.task import LoraTask
from trainer.materials import Record
from trainer.training import Trainer

BUCKETS = ((64, 64), (64, 128))
FAMILIES = families.names()


def base(folder: Path, family: str) -> Path:
    """A tiny pipeline, made once in a folder that tests share."""
    place = folder / family
    return place if place.exists() else tiny_pipelines.save(family, place)


def settings(tmp_path: Path, family: str = "sdxl", lora: dict | None = None, **train) -> config.Settings:
    train = {
        "steps": 8,
        "batch_size": 2,
        "lr": 2e-3,
        "warmup": 2,
        "val_every": 4,
        "save_every": 4,
        "log_every": 1,
    } | train
    return config.load(
        {
            "pack": f"{family}_lora",
            "run": "tiny",
            "runs_dir": str(tmp_path / "runs"),
            "pictures": {"folder": str(tmp_path)},
            "lora": {"rank": 4, "text_dropout": 0.2} | (lora or {}),
            "train": {"device": "cpu", "decay_fraction": 0} | train,
        }
    )


def make(settings: config.Settings, base: Path, pictures: int = 5, masks: bool = False) -> Path:
    """Corpus, shards and the record of the base in the run's folder, which it gives."""
    run, family = Path(settings.folder), settings.pack.removesuffix("_lora")
    random = torch.Generator().manual_seed(3)
    captions = {corpus.text_id(text): text for text in ("", *(f"picture {n}" for n in range(pictures)))}
    index = {"pack": settings.pack}
    for split, count in (("train", pictures), ("val", 1)):
        rows = [_picture(split, number) for number in range(count)]
        (run / "corpus").mkdir(parents=True, exist_ok=True)
        (run / "corpus" / f"{split}.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        told = {"variants": 2}
        items = {it.id: Item(it.id, _latents(it, family, random, masks), told | {"bucket": it.bucket}) for it in rows}
        index[split] = _shard(run, split, items)
    items = {
        id: Item(id, embeddings(family, random), {"caption": conditions.caption_digest(text), "tokens": 7})
        for id, text in captions.items()
    }
    index["text"] = _shard(run, "text", items)
    write_json(run / "shards.json", index)
    write_json(run / "materials" / "base.json", asdict(_record(base)))
    return run


def trainer(settings: config.Settings) -> Trainer:
    """What trains the LoRA of a run that was made, to the planned step."""
    return Trainer(settings, LoraTask, lambda steps: steps)


def _picture(split: str, number: int) -> corpus.Picture:
    caption = f"picture {number}"
    size = BUCKETS[number % 3 == 2]
    return corpus.Picture(
        id=digest([split, number])[:16],
        file=f"{split}{number}.png",
        text=caption,
        text_id=corpus.text_id(caption),
        image="",
        width=size[0],
        height=size[1],
        bucket=size,
        mask=None,
        weight=1.0,
        source="pictures",
    )


def _latents(row: corpus.Picture, family: str, random: torch.Generator, masks: bool) -> conditions.Tensors:
    """Two variants; the mean of a picture has a colour of its own, and its posterior is narrow."""
    channels, (width, height) = families.get(family).latent_channels, row.bucket
    shape, tensors = (channels, height // 8, width // 8), {}
    colour = torch.randn(channels, 1, 1, generator=random)
    for variant in range(2):
        tensors[f"{variant}/mean"] = colour + 0.3 * torch.randn(shape, generator=random)
        tensors[f"{variant}/std"] = torch.full(shape, 0.05)
        if family == "sdxl":
            tensors[f"{variant}/time_ids"] = torch.tensor([height, width, 0, variant, height, width], dtype=torch.int32)
        if masks:
            mask = torch.zeros(shape[1:])
            mask[:2] = 1
            tensors[f"{variant}/mask"] = mask
    return tensors


def embeddings(family: str, random: torch.Generator) -> conditions.Tensors:
    """What a text encoder of a family gives of a caption, for its tiny base."""
    length = {"sdxl": 77, "flux": 16}.get(family) or int(torch.randint(4, 12, (), generator=random))
    tensors = {"embeds": torch.randn(length, 64 if family == "sdxl" else 32, generator=random)}
    pooled = {"pooled": torch.randn(32, generator=random)} if family in ("sdxl", "flux") else {}
    return tensors | pooled


def _shard(run: Path, split: str, items: dict[str, Item]) -> dict:
    path = run / "shards" / split / "0000-00.safetensors"
    conditions.write(path, items, {"skipped": []})
    return {"shards": [{"file": path.name, "samples": len(items)}]}


def _record(folder: Path) -> Record:
    files = [
        {"name": path.relative_to(folder).as_posix(), "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    found = {"path": str(folder), "found": "path", "repository": None, "revision": None, "package": None}
    what = {"id": "base", "kind": "hub", "title": "tiny", "role": "base", "version": None}
    return Record(**what, **found, files=files, digest=digest([it["sha256"] for it in files]))
