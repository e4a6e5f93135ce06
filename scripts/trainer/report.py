"""The report of a run: one HTML file that needs no network, no scripts and no other file.

Everything in it is read from the run's folder, so the same run gives the same bytes.
"""

import csv
import importlib.metadata
import io
import json
import math
import platform
import re
import shlex
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from safetensors import SafetensorError, safe_open

from trainer import __version__, contact_sheet, results
from trainer.config import Settings
from trainer.files import read_json, sha256, write_text
from trainer.packs.base import LoraPack, Metric

# Charts are drawn in these colours, which the page's style sheet then owns: one SVG for light and dark.
COLOURS = {
    "ink": "#010101",
    "line": "#020202",
    "train": "#030303",
    "val": "#040404",
    "base": "#050505",
}
STAGES = ("material", "materials", "corpus", "seed_table", "precompute", "train", "export", "companion", "evaluate")


def write_report(run_folder: Path, settings: Settings, out: Path) -> None:
    """Write the report of a finished run.

    Args:
        run_folder: the run's folder, with materials.json, corpus.json, shards.json, metrics.csv and eval.json.
            snapshots.json, kept checkpoints and benchmarks are shown if they are there.
        settings: the run's settings.
        out: the HTML file.

    Raises:
        TrainerError: a file that the report needs is missing or damaged.
    """
    run_folder = Path(run_folder)
    result = results.read(run_folder, settings)
    metrics = read_metrics(run_folder / "metrics.csv")
    snakemake = f"snakemake --profile packs/{settings.pack}"
    run_option = "" if settings.run == settings.pack else f"run={shlex.quote(str(settings.run))}"
    template, more = (_of_lora if isinstance(result.pack, LoraPack) else _of_adapter)(run_folder, result, metrics)
    page = results.environment(autoescape=True).get_template(template)
    text = page.render(
        settings=settings,
        pack=result.pack,
        evaluation=result.evaluation,
        files=[_file(Path(file)) for file in settings.exports],
        materials=result.materials,
        corpus=result.corpus,
        shards=result.shards,
        splits=[split for split in result.pack.splits if split in result.shards],
        when=_when(metrics["time"]),
        stages=stage_costs(run_folder / "benchmarks"),
        options=_options(settings),
        versions=_versions(),
        resume=" ".join([snakemake, *(["--config", run_option] if run_option else [])]),
        snapshot=" ".join(
            [snakemake, "--nolock snapshot --config", *filter(None, [run_option]), "'snapshot={at: STEP}'"]
        ),
        **more,
    )
    write_text(out, text)


def _file(path: Path) -> dict[str, Any]:
    """An exported file; its size and digest are null where it is gone."""
    there = path.exists()
    return {
        "path": str(path.resolve()),
        "python": repr(str(path.resolve())),
        "bytes": path.stat().st_size if there else None,
        "sha256": sha256(path) if there else None,
    }


def _of_adapter(run_folder: Path, result: results.Result, metrics: dict[str, np.ndarray]) -> tuple[str, dict[str, Any]]:
    evaluation, metric = result.evaluation, result.pack.metric
    return "report.html.j2", {
        "figure": result.figure,
        "probes": result.probes,
        "gains": result.figures,
        "gguf": _file(result.exported),
        "command": result.command(absolute=True),
        "reference": result.reference(absolute=True),
        "charts": charts(metrics, evaluation["metrics"].get("baseline_cos"), metric),
        "sheet": contact_sheet.samples(run_folder / "corpus"),
        "worst": [
            row | {"images": contact_sheet.thumbnails(run_folder / "corpus", row.get("images", []))}
            for row in evaluation["worst"]
        ],
        "histogram": length_histogram(result.corpus.get("length_histogram") or {}),
        "quality": steps_and_quality(run_folder, evaluation, result.exported, metric),
    }


def _of_lora(run_folder: Path, result: results.Result, metrics: dict[str, np.ndarray]) -> tuple[str, dict[str, Any]]:
    shots = result.evaluation["pictures"]["shots"]
    return "lora_report.html.j2", {
        "charts": charts(metrics, None, None),
        "bands": [name.rpartition("_")[2] for name in result.evaluation["metrics"] if name.startswith("val_loss_")],
        "grid": contact_sheet.thumbnail(run_folder / "eval" / result.evaluation["pictures"]["grid"], side=2048),
        "shots": [
            shot
            | {"images": [contact_sheet.thumbnail(run_folder / "eval" / shot[it]) for it in ("base", "lora", "diff")]}
            for shot in shots
        ],
    }


# --- what the run's files say ---------------------------------------------------------------------------------------


def number(text: str | None) -> float:
    """A cell of a table as a float; NaN where nothing was measured (an empty cell, `-`, `NA`)."""
    try:
        return float(text or "nan")
    except ValueError:
        return math.nan


def read_metrics(path: Path) -> dict[str, np.ndarray]:
    """Columns of metrics.csv by name, f64, in order of steps; of a step that is there twice the later row counts."""
    with open(path, encoding="utf-8", newline="") as file:
        rows = {number(row["step"]): row for row in csv.DictReader(file)}
    steps = sorted(step for step in rows if math.isfinite(step))
    names = ("step", "time", "loss", "mse", "cos", "lr", "prompts_per_s", "val_cos", "val_rel_mse")
    names += ("val_loss", "pictures_per_s")
    return {name: np.array([number(rows[step].get(name)) for step in steps]) for name in names}


def steps_and_quality(run_folder: Path, evaluation: dict[str, Any], gguf: Path, metric: Metric) -> list[dict[str, Any]]:
    """What can be had at which step, in order of steps: kept checkpoints, snapshots, and the run's own file.

    Files of the same step hold the same weights: they share a row. Empty where only the run's own file is there.
    """
    rows: dict[int, dict[str, Any]] = {}

    def row(step: int) -> dict[str, Any]:
        return rows.setdefault(step, dict.fromkeys(("val_cos", "name", "size", "eval")) | {"step": step, "tags": []})

    for file in sorted((run_folder / "checkpoints").glob("step-*.safetensors")):
        if kept := _checkpoint(file):
            row(kept["step"]).update(val_cos=(kept.get("val") or {}).get(metric), tags=["kept"])
    path = run_folder / "snapshots.json"
    for snapshot in read_json(path)["snapshots"] if path.exists() else []:
        found = row(snapshot["step"])
        if found["val_cos"] is None:
            found["val_cos"] = snapshot.get("val_cos")
        found.update(name=snapshot["name"], size=snapshot["size"], eval=snapshot.get("eval"))
        found["tags"] += ["while training"] if snapshot.get("while_training") else []
    if rows:
        found = row(evaluation["trained_steps"])
        found.update(name=gguf.name, size=gguf.stat().st_size if gguf.exists() else None, eval=evaluation["metrics"])
        found["tags"] = ["the run's file"]
    return [rows[step] for step in sorted(rows)]


def _checkpoint(file: Path) -> dict[str, Any] | None:
    """The metadata of a kept checkpoint; None if the file is damaged or not ours."""
    try:
        with safe_open(file, framework="numpy") as tensors:
            metadata = (tensors.metadata() or {}).get("trainer")
    except (SafetensorError, OSError):
        return None
    try:
        values = json.loads(metadata or "{}")
    except ValueError:
        return None
    return values if "step" in values else None


def stage_costs(folder: Path) -> list[dict[str, Any]]:
    """Time and memory by stage, of the jobs that ran last: seconds are summed, memory (MB) is the largest."""
    stages: dict[str, dict[str, Any]] = defaultdict(lambda: {"jobs": 0, "seconds": 0.0, "max_rss": math.nan})
    for file in sorted(folder.glob("*.tsv")):
        # `material-teacher` and `precompute-train-0003` are jobs of a stage; the report's own cost is not known yet.
        name = re.sub(r"-\d{4}$", "", file.stem)
        if name == "report":
            continue
        with open(file, encoding="utf-8", newline="") as table:
            for row in csv.DictReader(table, delimiter="\t"):
                stage, memory = stages[name], number(row.get("max_rss"))
                stage["jobs"] += 1
                stage["seconds"] += np.nan_to_num(number(row.get("s")))
                stage["max_rss"] = np.fmax(stage["max_rss"], memory)

    def place(name: str) -> tuple[int, str]:
        stage = name.split("-")[0]
        return (STAGES.index(stage) if stage in STAGES else len(STAGES), name)

    longest = max((stage["seconds"] for stage in stages.values()), default=0) or 1
    return [
        {"name": name.replace("-", " · "), "share": stages[name]["seconds"] / longest, **stages[name]}
        for name in sorted(stages, key=place)
    ]


def _options(settings: Settings) -> list[dict[str, Any]]:
    """Settings in groups, each with its description and whether it is other than the pack's default."""
    groups: dict[str, list[dict[str, Any]]] = {"run": []}
    defaults = Settings(pack=settings.pack)
    for name, field in Settings.model_fields.items():
        value, default = getattr(settings, name), getattr(defaults, name)
        if hasattr(value, "model_fields"):
            groups[name] = [
                _option(f"{name}.{key}", getattr(value, key), getattr(default, key), inner.description)
                for key, inner in type(value).model_fields.items()
            ]
        else:
            groups["run"].append(_option(name, value, default, field.description))
    return [{"name": name, "options": options} for name, options in groups.items()]


def _option(name: str, value: Any, default: Any, description: str | None) -> dict[str, Any]:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return {"name": name, "value": shown, "changed": value != default, "description": description}


def _versions() -> dict[str, str]:
    found = {"gguf-trainer": __version__, "Python": platform.python_version()}
    for package in ("torch", "transformers", "snakemake"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"system": f"{platform.system()} {platform.machine()}"}


def _when(times: np.ndarray) -> tuple[str, str] | None:
    times = times[np.isfinite(times)]
    if not len(times):
        return None
    first, last = (
        datetime.fromtimestamp(float(time), UTC).strftime("%Y-%m-%d %H:%M") for time in (times[0], times[-1])
    )
    return first, last


# --- charts ---------------------------------------------------------------------------------------------------------


def charts(metrics: dict[str, np.ndarray], baseline: float | None, metric: Metric | None) -> list[dict[str, Any]]:
    """The curves of a training, as inline SVG; a curve with no measured value is left out. `metric`: of an adapter."""
    drawn = []
    step, smooth = metrics["step"], _binned(metrics)

    def add(name: str, title: str, note: str, figure: Figure) -> None:
        drawn.append({"title": title, "note": note, "svg": to_svg(figure, name, title)})

    if np.isfinite(smooth["loss"]).any():
        figure, axes = _axes()
        second = "mse" if metric else "val_loss"
        for column, colour in (("loss", "train"), (second, "val")):
            _line(axes, smooth["step"], smooth[column], colour, column)
        positive = np.concatenate([smooth["loss"], smooth[second]])
        positive = positive[np.isfinite(positive)]
        if positive.min() > 0 and positive.max() > 8 * positive.min():
            axes.set_yscale("log")
        _legend(axes)
        note = "on training prompts; mse is its squared-error part"
        add("loss", "Loss", note if metric else "at drawn levels of noise; val_loss at fixed ones", figure)
    if np.isfinite(smooth["cos"]).any() or np.isfinite(metrics["val_cos"]).any():
        figure, axes = _axes()
        _line(axes, smooth["step"], smooth["cos"], "train", "train")
        known = np.isfinite(metrics["val_cos"])
        _line(axes, step[known], metrics["val_cos"][known], "val", "val", marker="o" if known.sum() <= 60 else None)
        if baseline is not None:
            axes.axhline(baseline, color=COLOURS["base"], linestyle=(0, (5, 4)), linewidth=1.1, label="mean baseline")
        _legend(axes, "center right")
        title = "Centred cosine to the teacher" if metric == "cos_centered" else "Cosine to the teacher"
        add("cosine", title, "1 is the teacher itself; the dashed line is the mean row", figure)
    if np.isfinite(metrics["lr"]).any():
        figure, axes = _axes()
        _line(axes, step, metrics["lr"], "train", "learning rate")
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 3), useMathText=True)
        add("lr", "Learning rate", "linear warm-up, then constant, then down to 0", figure)
    unit = "prompts" if metric else "pictures"
    if np.isfinite(smooth[f"{unit}_per_s"]).any():
        figure, axes = _axes()
        _line(axes, smooth["step"], smooth[f"{unit}_per_s"], "train", f"{unit}/s")
        axes.set_ylim(bottom=0)
        add("speed", "Speed", f"training {unit} a second", figure)
    return drawn


def length_histogram(histogram: dict[str, list[float]]) -> Markup | None:
    """Shares of prompt lengths in characters, train and val over each other; None without prompts."""
    edges = list(histogram.get("edges") or [])
    figure, axes = _axes(height=2.1)
    for split in ("train", "val"):
        counts = np.asarray(histogram.get(split) or [], dtype=float)
        if not counts.sum():
            continue
        while len(edges) <= len(counts):  # the last bin is open
            edges.append(edges[-1] * 1.2 + 1 if edges else 1)
        shares = 100 * counts / counts.sum()
        fill = split == "train"
        axes.stairs(
            shares,
            edges[: len(counts) + 1],
            fill=fill,
            color=COLOURS[split],
            alpha=0.45 if fill else 1,
            linewidth=1.4,
            label=split,
        )
    if not axes.patches:
        return None
    axes.set_xlabel("characters")
    axes.set_ylabel("% of prompts")
    _legend(axes)
    return to_svg(figure, "lengths", "Lengths of prompts")


def _binned(metrics: dict[str, np.ndarray], points: int = 300) -> dict[str, np.ndarray]:
    """Means over equal stretches of the log, so that a long run draws as a line and not as a cloud."""
    length = max(1, -(-len(metrics["step"]) // points))
    bins = np.arange(0, len(metrics["step"]), length)

    def means(values: np.ndarray) -> np.ndarray:
        if not len(values):
            return values
        known = np.isfinite(values)
        counts = np.add.reduceat(known.astype(float), bins)
        return np.add.reduceat(np.where(known, values, 0), bins) / np.where(counts > 0, counts, np.nan)

    return {name: means(values) for name, values in metrics.items()}


def _axes(height: float = 2.5) -> tuple[Figure, Axes]:
    # Small figures: text stays readable where a phone shows them at their own size.
    figure = Figure(figsize=(4.7, height), layout="constrained")
    axes = figure.add_subplot()
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["line"])
    axes.grid(axis="y", color=COLOURS["line"], linewidth=0.7)
    axes.tick_params(colors=COLOURS["ink"], labelsize=8.5, length=0, which="both")
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(COLOURS["ink"])
        axis.label.set_size(8.5)
        axis.offsetText.set_color(COLOURS["ink"])
    axes.set_xlabel("step")
    return figure, axes


def _line(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str, label: str, marker: str | None = None) -> None:
    known = np.isfinite(y)
    if known.any():
        axes.plot(x[known], y[known], color=COLOURS[colour], label=label, linewidth=1.6, marker=marker, markersize=3.5)


def _legend(axes: Axes, place: str = "upper right") -> None:
    axes.legend(loc=place, frameon=False, fontsize=8.5, labelcolor=COLOURS["ink"], handlelength=1.6)


def to_svg(figure: Figure, name: str, title: str) -> Markup:
    """A figure as an SVG element for an HTML page: scalable, in the page's colours, the same bytes every time."""
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    svg = buffer.getvalue()
    box = re.search(r'viewBox="[^"]+"', svg).group()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    # Several figures share a page: their ids must not meet.
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for role, colour in COLOURS.items():
        body = body.replace(colour, f"var(--{role})")
    return Markup(f'<svg class="chart" {box} role="img" aria-label="{title}">{body}')
