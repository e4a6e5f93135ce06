"""How a run stands, from the files in its folder: nothing is written, no lock is taken and no heavy library loaded.

`read` gives JSON-able values under names that stay; what is not known is null, and no number is NaN.

    version    1; raised when a name below changes its meaning
    run        the folder, absolute
    pack       null where the settings cannot be read
    time       when this was read; all times are unix seconds
    state      running, finished, failed, stopped or waiting
    stages     in order: name; state (running, done, failed, stopped, waiting); done and total, in `unit`; rate in units
               a second and eta_s, the seconds left, while it runs; used_bytes; needed_bytes, what it has yet to write
    jobs       that run or were killed: name; stage; pid; host; alive (null on another host, false after an hour without
               progress there); started; updated; what, done, total, unit and rate as the job tells them; eta_s of what
               it is at
    metrics    train and val: the newest row of each in training, val with `best_cos` or, of a LoRA, `best_loss`;
               evaluation: of the exported file
    disk       used_bytes of the run and its exported files, needed_bytes, free_bytes where the run is
    problems   jobs whose last try did not succeed: job; stage; time; kind (error, bug, killed, stopped); message
    notes      what could not be read, in words

Whether a changed setting makes something stale is Snakemake's to say (`-n`); what is there counts as done here.
"""

import csv
import io
import json
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from trainer import config, control, materials, packs
from trainer.config import Settings
from trainer.errors import TrainerError
from trainer.estimates import GB, Estimate, Machine, estimate
from trainer.files import read_json
from trainer.job import duration
from trainer.packs.base import AdapterPack

STAGES = ("materials", "corpus", "precompute", "train", "export", "evaluate", "report")
STAGE_OF = {
    "material": "materials",
    "seed_table": "precompute",
    "vision_proj": "precompute",
    "precompute_block": "precompute",
    "companion": "export",
    "card": "report",
}
_SILENCE = 3600.0
_LINE = re.compile(r"^\d\d:\d\d:\d\d  (.*)$", re.MULTILINE)

Values = dict[str, Any]


def read(run: Path | str) -> Values:
    """How a run stands.

    Raises:
        TrainerError: there is no such folder.
    """
    folder = Path(run).absolute()
    if not folder.is_dir():
        raise TrainerError(f"{run} is not a run folder: name one such as runs/demo")
    return _Run(folder).status()


def training_rows(run: Path | str) -> list[Values]:
    """The rows of metrics.csv so far, as text or numbers; a step that was trained again is there twice, newest last."""
    return _Run(Path(run).absolute()).rows()


class _Run:
    """What is read of a run."""

    REPORT = ("report.html", "README.md")

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, time.time()
        self.notes: list[str] = []
        self.settings, self.project = self._settings()
        self.told = _told(folder)
        self.jobs = [_job(name, values) for name, values in sorted(self.told.items())]
        self.running = [job for job in self.jobs if job["alive"] is not False]
        self.problems = list(self._problems())

    def status(self) -> Values:
        stages = self.stages()
        done = {stage["name"] for stage in stages if stage["state"] == "done"}
        problems = [problem for problem in self.problems if problem["stage"] not in done]
        states = [stage["state"] for stage in stages]
        state = "running" if self.running else "finished" if len(done) == len(stages) else None
        return {
            "version": 1,
            "run": str(self.folder),
            "pack": self.settings and self.settings.pack,
            "time": self.now,
            "state": state or next((name for name in ("failed", "stopped") if name in states), "waiting"),
            "stages": stages,
            "jobs": self.jobs,
            "metrics": self.metrics(),
            "disk": {
                "used_bytes": _size([self.folder, *(it for it in self.exported() if self.folder not in it.parents)]),
                "needed_bytes": _sum(stage["needed_bytes"] for stage in stages),
                "free_bytes": shutil.disk_usage(self.folder).free,
            },
            "problems": problems,
            "notes": self.notes,
        }

    def _settings(self) -> tuple[Settings | None, Path]:
        file = self.folder / "settings" / "run.json"
        if not file.exists():
            self.notes.append(f"{file} is missing: no run was started here, or by an older version; totals are unknown")
            return None, self.folder
        try:
            value = read_json(file)
            return config.load(value["settings"]), Path(value["folder"])
        except (TrainerError, KeyError, TypeError) as error:
            self.notes.append(f"{file} is of another version ({error}); totals are unknown")
            return None, self.folder

    def _json(self, name: str) -> Values:
        """A JSON object of the run; {} where there is none."""
        try:
            value = read_json(self.folder / name)
        except TrainerError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def splits(self) -> tuple[str, ...]:
        """Of the corpus and the shards; those of adapters where the settings are unknown."""
        return packs.get(self.settings.pack).splits if self.settings else AdapterPack.splits

    def samples(self) -> dict[str, int]:
        """How many samples each split of the corpus has; {} while there is none."""
        counts = {split: dict(self._json("corpus.json").get(split) or {}).values() for split in self.splits}
        found = {split: sum(it for it in listed if type(it) is int) for split, listed in counts.items()}
        return found if any(found.values()) else {}

    # -- stages --------------------------------------------------------------------------------------------------------

    def stages(self) -> list[Values]:
        """All stages. From precompute on, one whose forerunners are not done is not done either."""
        expected = self.expected()
        found, earlier = [], True
        for name in STAGES:
            stage = {
                "name": name,
                "state": "waiting",
                **getattr(self, f"_{name}")(earlier),
                "rate": None,
                "eta_s": None,
            }
            complete = stage.pop("complete")
            jobs = [job for job in self.running if job["stage"] == name]
            kinds = {problem["kind"] for problem in self.problems if problem["stage"] == name}
            if jobs:
                stage["state"] = "running"
                stage["rate"], stage["eta_s"] = self._pace(name, jobs)
            elif complete:
                stage["state"] = "done"
            elif kinds:
                stage["state"] = "stopped" if kinds == {"stopped"} else "failed"
            stage["used_bytes"] = _size(self.files(name))
            stage["needed_bytes"] = 0 if complete else self._needed(name, stage["used_bytes"], expected)
            earlier = earlier and complete
            found.append(stage)
        return found

    def _materials(self, earlier: bool) -> Values:
        needed = self.needed_materials()
        there = [file for file in (self.folder / "materials").glob("*.json") if not file.name.endswith(".lock.json")]
        if needed is not None:
            there = [file for file in there if file.stem in needed]
        complete = (self.folder / "materials.json").exists() if needed is None else len(there) == len(needed)
        return {"done": len(there), "total": needed and len(needed), "unit": "materials", "complete": complete}

    def _corpus(self, earlier: bool) -> Values:
        done = sum(self.samples().values())
        total = done or (self.settings and int(estimate(self.settings, Machine("any", 1, 1)).samples))
        return {"done": done, "total": total, "unit": "samples", "complete": bool(done)}

    def _precompute(self, earlier: bool) -> Values:
        done = sum(len(shards) for _, shards in self.blocks)
        total = self.settings and self.settings.precompute.block_shards * len(self.blocks)
        complete = earlier and (self.folder / "shards.json").exists() and done == (total or done)
        return {"done": done, "total": total, "unit": "shards", "complete": complete}

    def _train(self, earlier: bool) -> Values:
        meta = _meta(self.folder / "checkpoints" / "state.safetensors")
        wanted, made_from = self._json("settings/train.json"), meta.get("made_from", {})
        # Other settings of training set the checkpoints aside when it starts.
        done = meta.get("step", 0) if all(made_from.get(key) == value for key, value in wanted.items()) else 0
        total = self._json("settings/plan.json").get("steps")
        for job in self.running:
            if job["name"] == "train" and job["total"] and job["done"] is not None:
                done, total = int(job["done"]), int(job["total"])
        ended = (self.folder / "trained.safetensors").exists() and done >= (total or 0)
        return {"done": done, "total": total, "unit": "steps", "complete": earlier and ended}

    def _export(self, earlier: bool) -> Values:
        if not self.settings:
            return {"done": 0, "total": None, "unit": "files", "complete": False}
        # The companion is made of a material, whatever is trained.
        files = {self.settings.exported: self._time("trained.safetensors"), self.settings.companion: 0.0}
        return _made(earlier, {self.place(file): since for file, since in files.items() if file})

    def _evaluate(self, earlier: bool) -> Values:
        return _made(earlier, {self.folder / "eval.json": self._time("trained.safetensors")})

    def _report(self, earlier: bool) -> Values:
        return _made(earlier, dict.fromkeys(map(self.folder.joinpath, self.REPORT), self._time("eval.json")))

    def _pace(self, name: str, jobs: list[Values]) -> tuple[float | None, float | None]:
        """Units a second, and seconds until the stage is done."""
        if name == "train":
            (job,) = jobs[:1]
            return job["rate"], job["eta_s"]
        if name != "precompute" or not self.settings:
            missing = sum(it["name"].startswith("material-") for it in jobs) < len(self.missing_materials() or ())
            left = [job["eta_s"] for job in jobs]
            return None, None if (name == "materials" and missing) or None in left else max(left)
        blocks = [job for job in jobs if job["name"].startswith("precompute-")]
        if not blocks:
            return None, None
        ran = [self.now - (job["started"] or self.now) for job in blocks]
        # The student's pass is the first: what is left of it says nothing of the block.
        left = [job["eta_s"] if str(job["what"]).startswith("teacher") else None for job in blocks]
        took = [seconds for ended, _ in self.blocks if ended and (seconds := self._took(ended)) is not None]
        took = took or [past + eta for past, eta in zip(ran, left, strict=True) if eta is not None]
        if not took:
            return None, None
        seconds = max(sum(took) / len(took), 1e-9)
        last = max(max(eta or 0, seconds - past) for past, eta in zip(ran, left, strict=True))
        waiting = sum(not ended for ended, _ in self.blocks) - len(blocks)
        rate = self.settings.precompute.block_shards * len(blocks) / seconds
        return rate, last + seconds * math.ceil(max(waiting, 0) / len(blocks))

    @cached_property
    def blocks(self) -> list[tuple[Path | None, list[Path]]]:
        """Every block of the plan, or else that is there: its list if it is done, and its shards."""
        found = []
        for split in self.splits:
            place = self.folder / "shards" / split
            shards = list(place.glob("[0-9][0-9][0-9][0-9]-[0-9][0-9].safetensors"))
            if self.settings:
                numbers = [f"{number:04d}" for number in range(self.settings.blocks(split))]
                each = self.settings.precompute.block_shards
                shards = [file for file in shards if int(file.stem[-2:]) < each]
            else:
                numbers = sorted({file.name[:4] for file in shards})
            for number in numbers:
                ended = place / f"{number}.json"
                mine = [file for file in shards if file.name[:4] == number]
                found.append((ended if ended.exists() else None, mine))
        return found

    def _took(self, ended: Path) -> float | None:
        """Seconds that the job of a block took."""
        try:
            file = self.folder / "benchmarks" / f"precompute-{ended.parent.name}-{ended.stem}.tsv"
            row = next(csv.DictReader(io.StringIO(file.read_text()), delimiter="\t"))
            return number(row.get("s"))
        except (OSError, StopIteration):
            return None

    def needed_materials(self) -> list[str] | None:
        """Ids of the materials that the run needs; None where its settings are unknown."""
        if not self.settings:
            return None
        companion = materials.ids(self.settings, role="companion") if self.settings.companion else []
        return [*materials.ids(self.settings), *companion]

    def missing_materials(self) -> list[str] | None:
        """Ids of those that are not recorded yet."""
        needed = self.needed_materials()
        return needed and [id for id in needed if not (self.folder / "materials" / f"{id}.json").exists()]

    # -- disk ----------------------------------------------------------------------------------------------------------

    def files(self, stage: str) -> list[Path]:
        """What a stage leaves."""
        if stage == "export":
            return self.exported()
        names = {
            "materials": ["materials", "materials.json"],
            "corpus": ["corpus", "corpus.json"],
            "precompute": ["shards", "shards.json"],
            "train": ["checkpoints*", "trained.safetensors", "metrics.csv", "tensorboard"],
            "evaluate": ["eval.json"],
            "report": self.REPORT,
        }
        return [file for name in names[stage] for file in self.folder.glob(name)]

    def place(self, path: str) -> Path:
        """A path of the settings, also when the run was moved."""
        assert self.settings
        beside = str(Path(path).parent) == str(Path(self.settings.runs_dir))
        return self.folder.parent / Path(path).name if beside else self.project / path

    def exported(self) -> list[Path]:
        """The exported files, snapshots among them."""
        if not self.settings:
            return []
        exported = self.place(self.settings.exported)
        companion = [self.place(self.settings.companion)] if self.settings.companion else []
        suffix = packs.get(self.settings.pack).suffix
        return [exported, *companion, *exported.parent.glob(f"{self.settings.export.name}-step*{suffix}")]

    def expected(self) -> Estimate | None:
        """Estimates for as many samples as the corpus has, of the size of those in the shards that are there."""
        if not self.settings:
            return None
        samples = self.samples() or {split: self.settings.samples(split) for split in self.splits}
        shards = [file for _, files in self.blocks for file in files]
        each = self.settings.precompute.block_shards
        # Those of a split have about equally many.
        held = sum(samples[file.parent.name] / (self.settings.blocks(file.parent.name) * each) for file in shards)
        size = _size(shards) / held if held else None
        return estimate(self.settings, Machine("any", 1, 1), sum(samples.values()), size)

    def _needed(self, stage: str, used: int, expected: Estimate | None) -> int | None:
        if not expected:
            return None
        if stage == "materials":
            missing = [materials.get(self.settings, id) for id in self.missing_materials() or ()]
            return round(GB * sum(it.gigabytes for it in missing if it.repository))
        return max(0, round(GB * expected.stages.get(stage, 0)) - used)

    # -- figures and problems ------------------------------------------------------------------------------------------

    def rows(self) -> list[Values]:
        """The rows of metrics.csv, and those of training that runs since it last saved."""
        rows: list[Values] = []
        file = self.folder / "metrics.csv"
        if file.exists():
            rows += csv.DictReader(io.StringIO(file.read_text(encoding="utf-8")))
        for job in self.running:
            rows += self.told[job["name"]].get("metrics", [])
        return rows

    def metrics(self) -> Values:
        """The newest figures."""
        rows = self.rows()
        names = [name for name in dict.fromkeys(it for row in rows for it in row) if name not in ("step", "time")]
        of_val = [name for name in names if name.startswith("val_")]
        val = _newest(rows, of_val)
        if val:
            best = of_val[0].replace("val_", "best_")
            known = number(_meta(self.folder / "checkpoints" / "state.safetensors").get(best))
            better = min if best == "best_loss" else max
            val[best] = better((it for it in (known, val[of_val[0]]) if it is not None), default=None)
        return {
            "train": _newest(rows, [name for name in names if name not in of_val]),
            "val": val,
            "evaluation": {k: number(v) for k, v in self._json("eval.json").get("metrics", {}).items()} or None,
        }

    def _problems(self) -> Iterator[Values]:
        alive = {job["name"] for job in self.running}
        killed = {job["name"]: job for job in self.jobs if job["alive"] is False}
        told = set()
        for log in sorted((self.folder / "logs").glob("*.log")):
            if log.stem in alive or _time(self.folder / "benchmarks" / f"{log.stem}.tsv") > _time(log):
                continue
            if ending := _ending(log):
                told.add(log.stem)
                yield self._problem(log.stem, _time(log), *ending)
        for name in sorted(killed.keys() - told):
            job = killed[name]
            gone = "is gone without a word" if job["host"] == socket.gethostname() else "has said nothing for an hour"
            message = f"process {job['pid']} on {job['host']} {gone}: it was killed, perhaps for want of memory"
            yield self._problem(name, job["updated"], "killed", message)

    def _problem(self, job: str, when: float | None, kind: str, message: str) -> Values:
        return {"job": job, "stage": _stage(job), "time": when, "kind": kind, "message": message}

    def _time(self, name: str) -> float:
        return _time(self.folder / name)


def _made(earlier: bool, files: dict[Path, float]) -> Values:
    """Files, which count when everything before is done and they are no older than what they are made from."""
    done = sum(earlier and file.exists() and _time(file) >= since for file, since in files.items())
    return {"done": done, "total": len(files), "unit": "files", "complete": earlier and done == len(files)}


def _stage(job: str) -> str | None:
    name = job.partition("-")[0]
    name = STAGE_OF.get(name, name)
    return name if name in STAGES else None


def _told(folder: Path) -> dict[str, Values]:
    """What jobs left in the control folder, by their names: they run, or were killed."""
    found: dict[str, Values] = {}
    for file in sorted(control.folder(folder).glob("*.json")):
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # it ended just now
        name = file.name.removesuffix(".json").removesuffix(".progress")
        if isinstance(values, dict):
            found[name] = found.get(name, {}) | values
    return found


def _job(name: str, values: Values) -> Values:
    known = {key: values.get(key) for key in ("pid", "host", "started", "updated", "what", "unit")}
    done, total, rate = (number(values.get(key)) for key in ("done", "total", "rate"))
    return {
        **{"name": name, "stage": _stage(name), **known, "alive": _alive(values)},
        **{"done": done, "total": total, "rate": rate},
        "eta_s": (total - done) / rate if rate and total is not None and done is not None else None,
    }


def _alive(values: Values) -> bool | None:
    """Whether a process lives; None where that cannot be seen."""
    if values.get("host") != socket.gethostname() or "pid" not in values:
        counts = "what" in values  # a job that has nothing to count is silent
        return False if counts and time.time() - values.get("updated", math.inf) > _SILENCE else None
    try:
        process = psutil.Process(values["pid"])
        # A process that was started after the job is another one with its number.
        later = process.create_time() > values.get("started", math.inf) + 60
        return process.status() != psutil.STATUS_ZOMBIE and not later
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _ending(log: Path) -> tuple[str, str] | None:
    """Kind and message of the error that a log ends with."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:  # its job was started again just now
        return None
    lines = _LINE.findall(text)
    last = lines[-1] if lines else ""
    if last.startswith("error: "):
        message = last.removeprefix("error: ")
        return ("stopped" if message.startswith("stopped ") else "error"), message
    if last.startswith("interrupted"):
        return "stopped", last
    if last.startswith("this is a bug"):
        return "bug", f"{text.strip().splitlines()[-1]} (a bug of gguf-trainer: please report it with {log})"
    return None


def _newest(rows: list[Values], columns: Iterable[str]) -> Values | None:
    """Step, time and these columns of the row with the largest step that has the first of them."""
    columns = tuple(columns)
    known = [row for row in rows if columns and row.get(columns[0]) and str(row.get("step", "")).isdigit()]
    if not known:
        return None
    row = max(known, key=lambda row: int(row["step"]))
    return {"step": int(row["step"]), **{name: number(row.get(name)) for name in ("time", *columns)}}


def _meta(checkpoint: Path) -> Values:
    """The metadata of a checkpoint, without torch; {} where there is none."""
    try:
        with open(checkpoint, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return json.loads(header["__metadata__"]["trainer"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return {}


def number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _time(path: Path) -> float:
    """When a file was written; 0 where there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _sum(values: Iterable[int | None]) -> int | None:
    values = list(values)
    return None if None in values else sum(values)


def _size(paths: Iterable[Path]) -> int:
    """Bytes of files and of what is in folders; links count nothing, nor does what goes away meanwhile."""
    total = 0
    for path in paths:
        try:
            if path.is_symlink():
                continue
            total += _size(map(Path, os.scandir(path))) if path.is_dir() else path.stat().st_size
        except OSError:
            continue
    return total


# --- for people -----------------------------------------------------------------------------------------------------


def text(status: Values) -> str:
    """A status in lines for a terminal."""
    rows = [(stage["name"], stage["state"], progress(stage), *pace_and_disk(stage)) for stage in status["stages"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{status['run']}  {status['pack'] or 'unknown pack'}  {status['state']}", ""]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += ["", *(f"{key:10}  {value}" for key, value in _details(status))]
    return "\n".join(lines)


def progress(values: Values) -> str:
    """How far a stage or a job is, such as `40/136 shards`."""
    total = "?" if values["total"] is None else f"{round(values['total']):,}"
    return f"{round(values['done']):,}/{total} {values['unit']}"


def pace_and_disk(stage: Values) -> tuple[str, str]:
    """Rate and time left of a stage, and its bytes; empty where there is nothing to say."""
    pace = [f"{stage['rate']:.3g}/s"] if stage["rate"] else []
    pace += [f"{duration(stage['eta_s'])} left"] if stage["eta_s"] is not None else []
    disk = [size_text(stage["used_bytes"])] if stage["used_bytes"] else []
    disk += [f"{size_text(stage['needed_bytes'])} to go"] if stage["needed_bytes"] else []
    return ", ".join(pace), ", ".join(disk)


def _details(status: Values) -> Iterator[tuple[str, str]]:
    for job in status["jobs"]:
        if job["alive"] is not False:
            yield "running", ", ".join(_of_job(job, status["time"]))
    metrics = status["metrics"]
    for name in ("train", "val", "evaluation"):
        if row := metrics[name]:
            step = f"step {row['step']}: " if "step" in row else ""
            shown = [
                f"{key} {value:.4g}" for key, value in row.items() if key not in ("step", "time") and value is not None
            ]
            yield name, step + ", ".join(shown)
    disk = status["disk"]
    needed = "" if disk["needed_bytes"] is None else f"{size_text(disk['needed_bytes'])} still needed, "
    yield "disk", f"{size_text(disk['used_bytes'])} used, {needed}{size_text(disk['free_bytes'])} free"
    for problem in status["problems"]:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(problem["time"])) if problem["time"] else "unknown time"
        yield problem["kind"], f"{problem['job']}, {when}: {problem['message']}"
    for note in status["notes"]:
        yield "note", note


def _of_job(job: Values, now: float) -> Iterator[str]:
    yield f"{job['name']} (process {job['pid']} on {job['host']})"
    if job["total"] and job["done"] is not None:
        yield f"{job['what']}: {progress(job)}"
    if job["rate"]:
        yield f"{job['rate']:.3g} {job['unit']}/s"
    if job["eta_s"] is not None:
        yield f"{duration(job['eta_s'])} left"
    if job["alive"] is None and job["updated"]:
        yield f"as of {duration(now - job['updated'])} ago"


def size_text(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"
