"""How soon training reaches a quality, against the reference recipe: validation cosine over steps and seconds.

    python benchmarks/quality.py runs/demo              # after `make demo`; an hour on 2 cores
    python benchmarks/quality.py runs/demo --seeds 1 --steps 600

Both recipes train the same network on the run's shards from the same seeds; the reference at the rate, batch size, loss
and schedule that it has. Seconds are those of training steps, without validations. The reference's are what the plain
implementation of benchmarks/training.py takes for as many steps, measured in the same run.
"""

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import torch
from trainer import adapters, checkpoints, config, scoring
from trainer.adapter_task import AdapterTask, Inputs
from trainer.config import Settings
from trainer.files import read_json
from trainer.shard_index import listed
from trainer.shards import Shard
from trainer.training import Trainer
from training import plain

REFERENCE = {"recipe": "reference", "lr": 2e-4, "warmup": 1000, "cos_weight": 0.5, "batch_size": 32}
Curve = list[tuple[int, float, float]]


def train(settings: Settings, steps: int, every: int) -> tuple[Curve, Trainer]:
    """(step, seconds, validation cosine) while training, and what was trained."""
    trainer = Trainer(settings, AdapterTask, lambda planned: planned)
    loader, curve, seconds = trainer.loader(), [], 0.0
    while trainer.step < steps:
        start = time.perf_counter()
        trainer._step(*next(loader))
        trainer.step += 1
        seconds += time.perf_counter() - start
        if trainer.step % every == 0 or trainer.step in (25, 50, 75) or trainer.step == steps:
            curve.append((trainer.step, seconds, trainer.validate()[trainer.main_figure]))
            print(f"  step {curve[-1][0]}: {curve[-1][2]:.4f} after {seconds:.0f} s", file=sys.stderr, flush=True)
    loader.close()
    return curve, trainer


def others(trainer: Trainer, run: Path) -> dict[str, float]:
    """The cosine on prompts of other kinds than those trained on, by kind."""
    kinds = {row["id"]: row["source"] for row in map(json.loads, (run / "corpus" / "probe.jsonl").open())}
    shards = [Shard(path) for path in listed(run, read_json(run / "shards.json"), "probe")]
    task = trainer.task
    weights, scale = checkpoints.unpack(task.weights())
    predict = scoring.predictor(adapters.of(weights), scale)
    scores = scoring.score(predict, scoring.batches(shards, 32, task.queries), scale.mean, task.metric)
    found: dict[str, list[float]] = {}
    for id, cosine in scores.by_sample.items():
        found.setdefault(kinds[id], []).append(cosine)
    return {kind: statistics.mean(values) for kind, values in sorted(found.items())}


def main() -> None:
    """Train with both recipes from several seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a run whose shards are there")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--every", type=int, default=100, help="steps between validations")
    parser.add_argument("--plain", type=int, default=20, help="steps of the plain implementation to time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--set", nargs="*", default=[], help="settings of train to try, such as lr=1e-3")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("trainer").setLevel(logging.ERROR)
    stored: dict[str, Any] = read_json(options.run / "settings" / "run.json")["settings"]
    stored |= {"runs_dir": str(options.run.parent), "run": options.run.name}
    tried = dict(item.split("=") for item in options.set)

    def settings(seed: int, changed: dict[str, Any]) -> Settings:
        train = stored["train"] | {"steps": options.steps, "device": "cpu", "seed": seed} | changed
        return config.load(stored | {"train": train})

    results = []
    for seed in range(42, 42 + options.seeds):
        curves = {}
        for name, changed in (("reference", REFERENCE), ("ours", tried)):
            print(f"seed {seed}, {name}", file=sys.stderr)
            curves[name], trainer = train(settings(seed, changed), options.steps, options.every)
        results.append((seed, curves["reference"], curves["ours"], others(trainer, options.run)))
    seconds = time_of_plain(settings(42, REFERENCE), options.plain)
    shape = stored["adapter"]
    print(
        f"width {shape['width']}, depth {shape['depth']}, {options.steps} steps of {stored['train']['batch_size']}; ",
        end="",
    )
    print(f"a step of the plain implementation takes {1000 * seconds:.0f} ms\n")
    print("| seed | reference at the end | ours is above that at | share of steps | of seconds | ours at the end |")
    print("|---|---|---|---|---|---|")
    for seed, reference, ours, _ in results:
        goal = reference[-1][2]
        step, spent, cosine = next(point for point in ours if point[2] > goal)
        print(
            f"| {seed} | {goal:.4f} | step {step} ({cosine:.4f}) | 1/{options.steps / step:.0f} "
            f"| 1/{options.steps * seconds / spent:.0f} | {ours[-1][2]:.4f} |"
        )
    print("\n| step | " + " | ".join(f"ours, {seed} | reference, {seed}" for seed, *_ in results) + " |")
    print("|---" * (1 + 2 * len(results)) + "|")
    for number, (step, *_) in enumerate(results[0][1]):
        pairs = (f"{ours[number][2]:.4f} | {reference[number][2]:.4f}" for _, reference, ours, _ in results)
        print(f"| {step} | " + " | ".join(pairs) + " |")
    print(
        "\nOther kinds of prompts, ours at the end:\n\n| kind | " + " | ".join(str(seed) for seed, *_ in results) + " |"
    )
    print("|---" * (1 + len(results)) + "|")
    for kind in results[0][3]:
        print(f"| {kind} | " + " | ".join(f"{found[kind]:.4f}" for *_, found in results) + " |")


def time_of_plain(settings: Settings, steps: int) -> float:
    """Seconds of a step of the plain implementation, the median."""
    step, seconds = plain(settings, Inputs.read(settings)), []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
