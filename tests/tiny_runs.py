"""Run folders with small shards of learnable random rows, for tests of what comes after precompute."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from trainer import checkpoints, config, packs, seed_table, shards
from trainer.adapter_task import AdapterTask, Inputs
from trainer.batches import Batch
from trainer.config import Settings
from trainer.files import write_json
from trainer.samples import Samples
from trainer.training import Trainer

STUDENT, TEACHER, QUERIES, VOCABULARY, VISION = 32, 48, 12, 50, 40
# Of each kind of adapter.
PACKS = ["pixart", "llada_image", "mageflow", "qwen_image"]


def settings(tmp_path: Path, pack: str = "pixart", **train) -> Settings:
    train = {"steps": 20, "batch_size": 8, "warmup": 3, "val_every": 5, "save_every": 5, "log_every": 5} | train
    made = packs.get(pack)
    small = {"student_dim": STUDENT, "teacher_dim": TEACHER, "queries": QUERIES, "vocabulary": VOCABULARY}
    small["vision_dim"] = VISION
    shape = {name: size for name, size in small.items() if getattr(made, name)}
    pictures = {"corpus": {"image_presets": ["flickr30k"], "n_image": 9, "n_val_image": 9}} if made.vision_dim else {}
    return config.load(
        pictures
        | {
            "pack": pack,
            "run": "tiny",
            "runs_dir": str(tmp_path / "runs"),
            "adapter": {"width": 64, "depth": 1} | shape,
            "train": train,
        }
    )


def rows(count: int, seed: int, dim_scale: float = 1.0) -> list[shards.Rows]:
    """Samples whose teacher rows follow from slots and student states."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    table = torch.randn(VOCABULARY, TEACHER, generator=fixed)
    mix = torch.randn(STUDENT, TEACHER, generator=fixed) / STUDENT**0.5
    samples = []
    for number in range(count):
        length, count_slots = torch.randint(1, 9, (2,), generator=generator).tolist()
        student = torch.randn(length, STUDENT, generator=generator) * 3 + 1
        slots = torch.randint(2, VOCABULARY, (count_slots,), generator=generator)
        target = table[slots] + student.mean(0) @ mix * dim_scale
        samples.append(shards.Rows(f"{seed:08x}{number:08x}", slots.tolist(), student.bfloat16(), target.bfloat16()))
    return samples


def seedless_rows(count: int, seed: int) -> list[shards.Rows]:
    """Samples like LLaDA-Image's: a row for every query, and an offset far larger than what tells rows apart."""
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    mix = torch.randn(QUERIES, STUDENT, TEACHER, generator=fixed) * 100 / STUDENT**0.5
    offset = 2000 * torch.randn(TEACHER, generator=fixed)
    samples = []
    for number in range(count):
        length = int(torch.randint(1, 9, (), generator=generator))
        student = torch.randn(length, STUDENT, generator=generator) * 3 + 1
        target = offset + student.mean(0) @ mix
        samples.append(shards.Rows(f"{seed:08x}{number:08x}", [], student.bfloat16(), target.bfloat16()))
    return samples


def token_rows(count: int, seed: int, pack: str = "mageflow") -> list[shards.Rows]:
    """Samples of token-aligned packs, every second with a picture or two; a row follows from its own token.

    The DiT reads from row 2 on. As in the real packs, Qwen-Image learns neither the rows before nor those of pictures.
    """
    generator = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(0)
    mix = torch.randn(STUDENT, TEACHER, generator=fixed) / STUDENT**0.5
    seen = torch.randn(VISION, TEACHER, generator=fixed) / VISION**0.5
    offset = torch.randn(TEACHER, generator=fixed)
    samples = []
    for number in range(count):
        text, first, second = torch.randint(1, 6, (3,), generator=generator).tolist()
        pictures = [first, second] if number % 4 == 1 else [first] if number % 2 and pack != "plain" else []
        places, length = [], 3
        for size in pictures:
            places += range(length, length + size)
            length += size + 1
        length += text
        student = torch.randn(length, STUDENT, generator=generator) * 3 + 1
        vision = torch.randn(len(places), VISION, generator=generator) * 2 + 0.5
        target = offset + student @ mix
        target[places] += vision @ seen
        wanted = [at for at in range(length) if pack != "qwen_image" or (at >= 2 and at not in places)]
        samples.append(
            shards.Rows(
                *(f"{seed:08x}{number:08x}", [], student.bfloat16(), target[wanted].bfloat16()),
                *(vision.bfloat16() if pack != "plain" else None, places, wanted, 2),
            )
        )
    return samples


def sample_rows(pack: str, count: int, seed: int) -> list[shards.Rows]:
    """Samples like those of a pack."""
    if pack in ("pixart", "llada_image"):
        return (rows if pack == "pixart" else seedless_rows)(count, seed)
    return token_rows(count, seed, pack)


def batch(shard: shards.Shard, numbers: Iterable[int], queries: int | None) -> Batch:
    """These samples of a shard."""
    held = Samples.read([(shard, chunk) for chunk in range(len(shard.chunks) - 1)])
    return held.take(np.array(list(numbers))).batch(queries)


def read(shard: shards.Shard) -> list[shards.Rows]:
    """All samples of a shard as they were written."""
    held = Samples.read([(shard, chunk) for chunk in range(len(shard.chunks) - 1)])
    found = []
    for number, id in enumerate(shard.header["ids"]):
        one = held.take(np.array([number]))
        columns = {name: values.tolist() for name, values in one.columns.items()}
        columns |= {"start": columns["start"][0]} if "start" in columns else {}
        found.append(shards.Rows(id, columns.pop("slots", []), **one.rows, **columns))
    return found


def write_shard(path: Path, samples: list[shards.Rows], inputs: str = "inputs") -> dict:
    dims = STUDENT, TEACHER, VISION if samples and samples[0].vision is not None else None
    shards.write(path, samples, {"inputs": inputs, "contract": "t5xxl_pixart/1", "skipped": []}, dims)
    header = shards.Shard(path).header
    return {"file": path.name, "bytes": path.stat().st_size} | {
        key: header[key] for key in ("samples", "rows", "student_rows", "checksum")
    }


def make(settings: Settings, shards_count: int = 3, per_shard: int = 20) -> Inputs:
    """Shards, their index and the weights that an adapter starts from, in the run's folder."""
    run = Path(settings.folder)
    splits = {}
    for split, count, seed in (("train", shards_count, 10), ("val", 1, 90)):
        files = [run / "shards" / split / f"0000-{number:02d}.safetensors" for number in range(count)]
        entries = [
            write_shard(file, sample_rows(settings.pack, per_shard, seed + number)) for number, file in enumerate(files)
        ]
        splits[split] = (
            files,
            {
                "shards": entries,
                **{key: sum(entry[key] for entry in entries) for key in ("samples", "rows", "student_rows", "bytes")},
            },
        )
    index = {
        "pack": settings.pack,
        "synthetic": settings.precompute.teacher == "synthetic",
        **{split: entry for split, (_, entry) in splits.items()},
    }
    write_json(run / "shards.json", index)
    generator = torch.Generator().manual_seed(1)
    if settings.adapter.vocabulary:
        table = seed_table.compress(torch.randn(VOCABULARY, TEACHER, generator=generator), 64)
        checkpoints.save(run / "shards" / "seed_table.safetensors", {"table": table}, {"width": 64})
    if settings.adapter.vision_dim:
        weight = torch.randn(STUDENT, VISION, generator=generator)
        checkpoints.save(run / "shards" / "vision_proj.safetensors", {"weight": weight}, {"ridge": 0.1})
    return Inputs.read(settings)


def trainer(settings: Settings) -> Trainer:
    """What trains the adapter of a run that was made, to the planned step."""
    return Trainer(settings, AdapterTask, lambda steps: steps)


RECORDS = [
    {"id": "teacher", "role": "teacher", "repository": "example/t5", "revision": "a" * 40, "digest": "d1"},
    {"id": "student", "role": "student", "digest": "d2"},
]
