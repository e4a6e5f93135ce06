"""Run folders with a tiny base and small shards of made-up latents and embeddings, for tests of training LoRAs."""

from dataclasses import asdict
from pathlib import Path

import tiny_pipelines
import torch
from trainer import config, files
from trainer.files import digest, sha256, write_json
from trainer.lora import conditions, corpus, families, models
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
    train = {"steps": 8, "batch_size": 2, "lr": 2e-3, "warmup": 2, "val_every": 4, "save_every": 4, "log_every": 1} | train
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
    for split, count in (("train", pictures), ("val", 2)):
        rows = [_picture(split, number, count) for number in range(count)]
        (run / "corpus").mkdir(parents=True, exist_ok=True)
        text = "".join(files.digest(asdict(row)) and _line(row) for row in rows)
        (run / "corpus" / f"{split}.jsonl").write_text(text)
        items = {row.id: Item(row.id, _latents(row, family, random, masks), _told(row)) for row in rows}
        index[split] = _shard(run, split, items)
    tensors = _embeddings(base, family, list(captions.values()))
    told = {id: {"caption": conditions.caption_digest(text), "tokens": 7, "truncated": 0} for id, text in captions.items()}
    items = {id: Item(id, own, told[id]) for id, own in zip(captions, tensors, strict=True)}
    index["text"] = _shard(run, "text", items)
    write_json(run / "shards.json", index)
    write_json(run / "materials" / "base.json", asdict(_record(base)))
    return run


def trainer(settings: config.Settings) -> Trainer:
    """What trains the LoRA of a run that was made, to the planned step."""
    return Trainer(settings, LoraTask, lambda steps: steps)


def _picture(split: str, number: int, count: int) -> corpus.Picture:
    caption = f"picture {number}"
    size = BUCKETS[number % 3 == 2]
    return corpus.Picture(
        id=files.digest([split, number])[:16],
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
