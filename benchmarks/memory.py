"""Main memory that training and precompute take on a CPU, as estimated and as measured.

    python benchmarks/memory.py                               # all packs: about half an hour on 2 cores
    python benchmarks/memory.py --packs pixart --stages training

Training has the pack's rows, width and batches of 16, half of its blocks and a few steps, with a state written in
between; its shards hold random rows of the pack's average lengths, give or take half. Precompute fills a block of two
shards from a random teacher of the pack's width and a few layers, streamed where it is more than two of its parts, and
a random student. The demo runs as it is, but for fewer steps and prompts. Each is a process of its own;
measured is the largest resident set of it (VmHWM).
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests"))

import torch
from trainer import (
    checkpoints,
    config,
    devices,
    estimates,
    finding,
    packs,
    precompute,
    shards,
    students,
    teachers,
    training,
    vision_proj,
)
from trainer.adapter_task import AdapterTask
from trainer.config import Settings
from trainer.control import Requests
from trainer.devices import GIB
from trainer.estimates import GB
from trainer.files import write_json
from trainer.materials import Record
from trainer.precompute_pictures import PictureBlock

CPU = torch.device("cpu")
STAGES = ("training", "precompute")
ADAPTERS = [name for name in packs.names() if "adapters" in packs.get(name).kinds]
WORDS = ["a", "red", "fox", "in", "the", "snow", "near", "an", "old", "house", "with", "trees", "and", "lights"]
# What a child is given, and GB that it is estimated to take.
Case = tuple[dict[str, Any], float]


def of_pack(pack: str, folder: Path, **groups: Any) -> Settings:
    """Settings of a run in `folder`."""
    pictures = {"corpus": {"image_presets": ["flickr30k"], "n_image": 9, "n_val_image": 9}}
    pictures = pictures if packs.get(pack).vision_dim else {}
    return config.load(pictures | {"pack": pack, "run": "memory", "runs_dir": str(folder), **groups})


# -- training ----------------------------------------------------------------------------------------------------------


def training_case(pack: str, folder: Path, **options: int) -> Case:
    """Shards of random rows, and the estimate."""
    demo = {"width": 384, "depth": 4, "batch": 64, "samples": 2000}
    chosen = {"width": 1024, "depth": 3, "batch": 16, "samples": 96, "steps": 4} | (demo if pack == "demo" else {})
    chosen |= options
    every = {"val_every": chosen["steps"] // 2, "save_every": chosen["steps"] // 2}
    settings = of_pack(
        pack,
        folder,
        adapter={name: chosen[name] for name in ("width", "depth")},
        train={"steps": chosen["steps"], "batch_size": chosen["batch"], "device": "cpu"} | every,
    )
    size = make_shards(settings, {"train": chosen["samples"], "val": chosen["batch"]})
    estimate = estimates.training_memory(settings, chosen["samples"], size).cpu
    return {"settings": settings.model_dump(mode="json")}, estimate


def make_shards(settings: Settings, samples: dict[str, int]) -> float:
    """Shards of random rows, of lengths like the pack's; gives the bytes of a sample."""
    run, shape, work = Path(settings.folder), settings.adapter, packs.get(settings.pack).work
    generator = torch.Generator().manual_seed(0)
    used = int(estimates.used_rows(settings, samples["train"]))

    def rows(count: int, dim: int) -> torch.Tensor:
        return torch.randn(count, dim, generator=generator).bfloat16()

    def sample(number: int) -> shards.Rows:
        share = float(torch.rand((), generator=generator)) + 0.5
        length, count, seen = (max(1, round(share * n)) for n in (work.student_tokens, work.rows, work.vision_rows))
        if shape.queries and not shape.vocabulary:
            count = shape.queries
        student, target = rows(length, shape.student_dim), rows(count, shape.teacher_dim)
        slots = torch.randint(0, used, (count,), generator=generator).tolist() if used else []
        if not shape.vision_dim:
            return shards.Rows(f"{number:016x}", slots, student, target)
        vision, first = rows(seen, shape.vision_dim), length - count
        return shards.Rows(
            f"{number:016x}", [], student, target, vision, [*range(seen)], [*range(first, length)], first
        )

    index: dict[str, Any] = {"pack": settings.pack, "synthetic": False}
    for split, count in samples.items():
        file = run / "shards" / split / "0000-00.safetensors"
        dims = shape.student_dim, shape.teacher_dim, shape.vision_dim
        shards.write(file, [sample(number) for number in range(count)], {"inputs": "", "skipped": []}, dims)
        header = shards.Shard(file).header
        entry = {"file": file.name, "bytes": file.stat().st_size}
        entry |= {name: header[name] for name in ("samples", "rows", "student_rows", "checksum")}
        index[split] = {"shards": [entry]} | {key: entry[key] for key in ("samples", "rows", "student_rows", "bytes")}
    write_json(run / "shards.json", index)
    if shape.vocabulary:
        table = torch.randn(shape.vocabulary, shape.width, generator=generator)
        checkpoints.save(run / "shards" / "seed_table.safetensors", {"table": table}, {"width": shape.width})
    if shape.vision_dim:
        save_projection(settings)
    return index["train"]["bytes"] / index["train"]["samples"]


def save_projection(settings: Settings) -> None:
    """A projection of the tower's rows that means nothing."""
    weight = vision_proj.made_up(settings.adapter.student_dim, settings.adapter.vision_dim)
    file = Path(settings.folder) / "shards" / "vision_proj.safetensors"
    checkpoints.save(file, {"weight": weight}, {"fit": None})


# -- precompute --------------------------------------------------------------------------------------------------------


def t5(folder: Path, dim: int = 4096) -> Path:
    """PixArt's."""
    import tiny_models  # here, as the processes that are measured must not load more than a job does

    return tiny_models.t5_snapshot(folder, dim=dim, layers=4, heads=dim // 64, dtype=torch.bfloat16)


def llada(folder: Path) -> Path:
    """LLaDA-Image's."""
    import tiny_llada

    sizes = {"hidden": 2048, "experts": 64, "chosen": 4, "expert_width": 512, "queries": 256, "projection_dim": 2560}
    return tiny_llada.llada_snapshot(folder, **sizes, dtype=torch.bfloat16)


def qwen3_vl(folder: Path, hidden: int) -> Path:
    """MageFlow's and Qwen-Image's."""
    import tiny_models

    sizes = {"hidden": hidden, "vocabulary": 151674, "picture_id": 151655, "max_shard_size": "1GB"}
    return tiny_models.qwen3_vl_snapshot(folder, **sizes, dtype=torch.bfloat16)


TEACHERS = {
    "pixart": t5,
    "llada_image": llada,
    "mageflow": partial(qwen3_vl, hidden=2560),
    "qwen_image": partial(qwen3_vl, hidden=4096),
}


def precompute_case(pack: str, folder: Path, samples: int = 64, dim: int | None = None) -> Case:
    """A teacher, a student and a corpus, and the estimate; `dim` is the teacher's width where it is not the pack's."""
    made = packs.get(pack)
    options = {"device": "cpu", "shard_size": samples // 2, "block_shards": 2}
    settings = of_pack(pack, folder, precompute=options, adapter={"teacher_dim": dim} if dim else {})
    if pack == "demo":
        paths = {id: finding.locate(settings, id)[0] for id in ("teacher", "student")}
    else:
        import tiny_models

        pictured = 151674 if made.vision_dim else 2560
        model = tiny_models.qwen3(hidden=1024, layers=8, heads=8, intermediate=3072, vocabulary=pictured)
        paths = {
            "teacher": TEACHERS[pack](folder / "teacher", **({"dim": dim} if dim else {})),
            "tokenizer": tiny_models.qwen2_tokenizer(folder / "tokenizer", merges=None if made.vision_dim else 500),
            "student": tiny_models.student_gguf(folder / "student.gguf", model),
        }
    teacher = teachers.load(made.teacher, paths["teacher"], devices.dtype("auto", CPU))
    settings.adapter.vocabulary = settings.adapter.vocabulary and teacher.vocabulary
    sizes = [part.bytes / GB for part in teacher.parts]
    tensors = students.inspect(paths["student"]).tensors.values()
    student = devices.dtype("auto", CPU).itemsize * sum(int(tensor.n_elements) for tensor in tensors) / GB
    # The demo's is too small to be streamed.
    budget = 4.0 if pack == "demo" else max(2.2 * max(sizes), 0.6 * sum(sizes)) / estimates.WEIGHTS
    settings.precompute.ram_gib = budget * GB / GIB
    make_corpus(settings, samples)
    records = {
        id: {"id": id, "kind": "file", "title": id, "role": id, "path": str(path), "found": "path", "files": []}
        | dict.fromkeys(("repository", "revision", "package", "version"))
        | {"digest": id}
        for id, path in paths.items()
    }
    estimate = estimates.precompute_memory(
        settings,
        budget,
        teacher=sum(sizes),
        largest=max(sizes),
        student=student,
        file=paths["student"].stat().st_size / GB,
    )
    return {"settings": settings.model_dump(mode="json"), "records": records}, estimate


def make_corpus(settings: Settings, samples: int) -> None:
    """Prompts, and pictures where the pack has some, of about the pack's average numbers of tokens."""
    folder, work, chance = Path(settings.folder) / "corpus", packs.get(settings.pack).work, random.Random(0)
    images = Path(settings.folder) / "corpus" / "images"
    images.mkdir(parents=True)
    rows, side, share = [], 320, 0.0
    if settings.adapter.vision_dim:
        import tiny_pictures

        side, share = (320, work.vision_rows / 100) if settings.pack == "mageflow" else (608, work.vision_rows / 361)
        for number in range(16):
            (images / f"{number}.png").write_bytes(tiny_pictures.encoded(tiny_pictures.picture(number, (side, side))))
    template = {"mageflow": 64, "qwen_image": 30, "llada_image": 12}.get(settings.pack, 0)
    words = max(4, int((work.student_tokens - work.vision_rows - template) * 0.9))
    for number in range(samples):
        text = " ".join(chance.choices(WORDS, k=chance.randint(words // 2, words * 3 // 2)))
        shown = [f"{number % 16}.png"] if chance.random() < share else []
        rows.append({"id": f"{number:016x}", "text": text, "source": "s"} | ({"images": shown} if shown else {}))
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if settings.adapter.vision_dim:
        save_projection(settings)


# -- measuring ---------------------------------------------------------------------------------------------------------


def work(given: dict[str, Any]) -> None:
    """Train, or fill a block."""
    settings = config.load(given["settings"])
    run = Path(settings.folder)
    if "records" not in given:
        training.Trainer(settings, AdapterTask, lambda steps: steps).run(Requests(run))
        return
    records = {id: Record(**record) for id, record in given["records"].items()}
    common = settings, records, Requests(run), 1 << 40
    pictures = settings.adapter.vision_dim
    block = PictureBlock(*common, run / "shards" / "vision_proj.safetensors") if pictures else precompute.Block(*common)
    block.fill(run / "shards" / "train" / "0000.json", 0, 1, run / "corpus" / "train.jsonl")


def measured(given: dict[str, Any]) -> float:
    """GB that a process takes at most."""
    command = [sys.executable, __file__, "--one"]
    threads = os.environ | {"OMP_NUM_THREADS": "2"}  # libraries take memory for each
    done = subprocess.run(command, input=json.dumps(given), env=threads, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def ratio(stage: str, pack: str, folder: Path, **options: int) -> tuple[float, float]:
    """GB as estimated and as measured."""
    given, estimate = (training_case if stage == "training" else precompute_case)(pack, folder, **options)
    return estimate, measured(given)


def main() -> None:
    """Print the table, a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", nargs="+", choices=ADAPTERS, default=ADAPTERS)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        work(json.load(sys.stdin))
        # Not ru_maxrss, which begins with that of the process that started this one.
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        print(int(peak) * 1024 / GB)
        return
    print("| pack | stage | estimated | measured | ratio |\n|---|---|---|---|---|")
    for pack in options.packs:
        for stage in options.stages:
            with tempfile.TemporaryDirectory() as folder:
                estimate, peak = ratio(stage, pack, Path(folder))
            print(f"| {pack} | {stage} | {estimate:.2f} GB | {peak:.2f} GB | {estimate / peak:.2f} |", flush=True)


if __name__ == "__main__":
    main()
