"""Run folders with small shards of learnable random rows, for tests of what comes after precompute."""

from pathlib import Path

import torch
from trainer import checkpoints, config, seed_table, shards
from trainer.config import Settings
from trainer.files import write_json
from trainer.training import Inputs

STUDENT, TEACHER, QUERIES, VOCABULARY = 32, 48, 12, 50


def settings(tmp_path: Path, pack: str = "pixart", **train) -> Settings:
    train = {"steps": 20, "batch_size": 8, "warmup": 3, "val_every": 5, "save_every": 5, "log_every": 5} | train
    shape = {"student_dim": STUDENT, "teacher_dim": TEACHER, "queries": QUERIES}
    shape |= {"vocabulary": VOCABULARY} if pack == "pixart" else {}
    return config.load(
        {
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


def write_shard(path: Path, samples: list[shards.Rows], inputs: str = "inputs") -> dict:
    shards.write(path, samples, {"inputs": inputs, "contract": "t5xxl_pixart/1", "skipped": []}, (STUDENT, TEACHER))
    header = shards.Shard(path).header
    return {"file": path.name, "bytes": path.stat().st_size} | {
        key: header[key] for key in ("samples", "rows", "student_rows", "checksum")
    }


def make(settings: Settings, shards_count: int = 3, per_shard: int = 20) -> Inputs:
    """Shards, their index and, for seeded slots, a seed table in the run's folder."""
    run = Path(settings.folder)
    seeded = settings.adapter.vocabulary is not None
    make_rows = rows if seeded else seedless_rows
    splits = {}
    for split, count, seed in (("train", shards_count, 10), ("val", 1, 90)):
        files = [run / "shards" / split / f"0000-{number:02d}.safetensors" for number in range(count)]
        entries = [write_shard(file, make_rows(per_shard, seed + number)) for number, file in enumerate(files)]
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
    if seeded:
        table = seed_table.compress(torch.randn(VOCABULARY, TEACHER, generator=torch.Generator().manual_seed(1)), 64)
        checkpoints.save(run / "shards" / "seed_table.safetensors", {"table": table}, {"width": 64})
    return Inputs.read(run, seeded)


RECORDS = [
    {"id": "teacher", "role": "teacher", "repository": "example/t5", "revision": "a" * 40, "digest": "d1"},
    {"id": "student", "role": "student", "digest": "d2"},
]
