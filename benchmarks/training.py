"""Steps a second of training against a plain implementation of the reference recipe, at equal work.

    python benchmarks/training.py                    # PixArt's dimensions at width 128 and depth 2, minutes on 2 cores
    python benchmarks/training.py --slots 40

The plain one does what the reference does: padded batches put together row by row in the training thread, f32, the
output head and the loss on all slots, AdamW on all parameters. Both train the same network on the same prompts, in
turn, some steps each; the ratio is that of their medians.
"""

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import torch
from safetensors.torch import load_file
from torch.nn.functional import cosine_similarity
from trainer import checkpoints, config, shards
from trainer.adapter_task import AdapterTask, Inputs
from trainer.adapters.resampler import Resampler
from trainer.batches import Batch
from trainer.config import Settings
from trainer.files import write_json
from trainer.loading import Loader
from trainer.training import Trainer


def make_run(folder: Path, options: argparse.Namespace) -> tuple[Settings, Inputs]:
    """A run with shards of random rows."""
    settings = config.load(
        {
            "pack": "pixart",
            "run": "bench",
            "runs_dir": str(folder),
            "adapter": {"width": options.width, "depth": options.depth},
            "train": {"batch_size": options.batch, "device": "cpu", "log_every": 10**6},
        }
    )
    run, shape = Path(settings.folder), settings.adapter
    random = torch.Generator().manual_seed(0)
    index = {"pack": "pixart", "synthetic": False}
    for split, files in (("train", 4), ("val", 1)):
        entries = []
        for number in range(files):
            path = run / "shards" / split / f"0000-{number:02d}.safetensors"
            samples = [
                make_sample(f"{number:08x}{n:08x}", options.slots, shape, random) for n in range(options.prompts)
            ]
            shards.write(path, samples, {"inputs": "", "skipped": []}, (shape.student_dim, shape.teacher_dim))
            header = shards.Shard(path).header
            kept = {key: header[key] for key in ("samples", "rows", "student_rows")}
            entries.append({"file": path.name, "bytes": path.stat().st_size, **kept})
        totals = {key: sum(entry[key] for entry in entries) for key in ("samples", "rows", "student_rows", "bytes")}
        index[split] = {"shards": entries, **totals}
    write_json(run / "shards.json", index)
    table = torch.randn(shape.vocabulary, shape.width, generator=random)
    checkpoints.save(run / "shards" / "seed_table.safetensors", {"table": table}, {"width": shape.width})
    return settings, Inputs.read(settings)


def make_sample(id: str, slots: int, shape: config.Adapter, random: torch.Generator) -> shards.Rows:
    """A prompt with about `slots` slots and three quarters as many student tokens."""
    count = int(torch.randint(slots // 2, slots + slots // 2 + 1, (), generator=random))
    student = torch.randn(max(1, count * 3 // 4), shape.student_dim, generator=random)
    target = torch.randn(count, shape.teacher_dim, generator=random)
    ids = torch.randint(2, shape.vocabulary, (count,), generator=random).tolist()
    return shards.Rows(id, ids, student.bfloat16(), target.bfloat16())


def ours(settings: Settings) -> tuple[Callable[[], None], Loader]:
    """A step of this project, and what gives it batches."""
    trainer = Trainer(settings, AdapterTask, lambda steps: steps)
    loader = trainer.loader()

    def step() -> None:
        trainer._step(*next(loader))
        trainer.step += 1

    return step, loader


def plain(settings: Settings, inputs: Inputs) -> Callable[[], None]:
    """A step of the reference recipe."""
    shape, train = settings.adapter, settings.train
    dims = shape.student_dim, shape.teacher_dim, shape.width, shape.depth, shape.queries, shape.vocabulary
    adapter = Resampler(*dims)
    optimizer = torch.optim.AdamW(adapter.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01, foreach=False)
    rows = [row for path in inputs.train for row in read(shards.Shard(path))]
    random = torch.Generator().manual_seed(train.seed)
    sigma = torch.ones(shape.teacher_dim)

    def step() -> None:
        picks = [rows[n] for n in torch.randint(len(rows), (train.batch_size,), generator=random)]
        longest = max(len(sample["student"]) for sample in picks)
        student = torch.zeros(len(picks), longest, shape.student_dim)
        keep = torch.zeros(len(picks), longest, dtype=torch.bool)
        slots = torch.zeros(len(picks), shape.queries, dtype=torch.int64)
        target = torch.zeros(len(picks), shape.queries, shape.teacher_dim)
        real = torch.zeros(len(picks), shape.queries)
        for number, sample in enumerate(picks):
            student[number, : len(sample["student"])] = sample["student"]
            keep[number, : len(sample["student"])] = True
            slots[number, : len(sample["slots"])] = sample["slots"]
            target[number, : len(sample["target"])] = sample["target"]
            real[number, : len(sample["target"])] = 1
        lengths = tuple(len(sample["student"]) for sample in picks)
        counts, seen = (shape.queries,) * len(picks), (0,) * len(picks)
        predicted = adapter(Batch(lengths, counts, seen, student[keep], target.flatten(0, 1), slots=slots))
        predicted = predicted.view_as(target)
        squared = (((predicted - target) / sigma).square().mean(-1) * real).sum() / real.sum()
        cosine = (cosine_similarity(predicted, target, dim=-1) * real).sum() / real.sum()
        loss = squared + 0.5 * (1 - cosine)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(adapter.parameters(), 1.0)
        optimizer.step()

    return step


def read(shard: shards.Shard) -> list[dict[str, torch.Tensor]]:
    """The samples of a shard, each by itself."""
    held = load_file(shard.path)
    parts = {"student": "student_offsets", "target": "offsets", "slots": "offsets"}
    counts = {name: held[offsets].diff().tolist() for name, offsets in parts.items()}
    split = {name: held[name].split(counts[name]) for name in parts}
    return [{name: split[name][number] for name in parts} for number in range(len(shard))]


def main() -> None:
    """Time both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--slots", type=int, default=20, help="real ones of 120, on average")
    parser.add_argument("--prompts", type=int, default=160, help="a shard; there are four")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="of each, a round")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        settings, inputs = make_run(Path(folder), options)
        our_step, loader = ours(settings)
        ways = {"ours": our_step, "plain": plain(settings, inputs)}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):
            for name, step in ways.items():
                start = time.perf_counter()
                for _ in range(options.steps):
                    step()
                if number:  # the first round warms up
                    seconds[name].append((time.perf_counter() - start) / options.steps)
            if not number:
                before = loader.waited
        waited = (loader.waited - before) / (sum(seconds["ours"]) * options.steps)
        loader.close()
    print(f"width {options.width}, depth {options.depth}, batch {options.batch}, {options.slots} of 120 slots real\n")
    print("| way | ms a step (median) | fastest | slowest | ratio |\n|---|---|---|---|---|")
    base = statistics.median(seconds["plain"])
    for name, times in seconds.items():
        middle = statistics.median(times)
        figures = [f"{1000 * value:.1f}" for value in (middle, min(times), max(times))]
        print(f"| {name} | {' | '.join(figures)} | {base / middle:.2f} |")
    print(f"\nours waited for batches {waited:.2%} of its time")


if __name__ == "__main__":
    main()
