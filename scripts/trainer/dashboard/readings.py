"""What the pages show of runs and of this machine; it only looks, and only inside the folder of runs."""

import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil

from trainer import control, status
from trainer.errors import TrainerError
from trainer.files import read_json

CURVES = ("loss", "mse", "cos", "lr", "prompts_per_s", "val_cos", "val_loss", "pictures_per_s")
POINTS = 300
LOG_BYTES = 48_000
_NVIDIA = ("index", "name", "utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw")

Value = TypeVar("Value")
Series = dict[str, list[tuple[int, float]]]


class Recent(Generic[Value]):
    """A reading by name that is made at most every so many seconds, however many pages ask for it."""

    def __init__(self, read: Callable[[str], Value], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._known: dict[str, tuple[float, Value]] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str = "") -> Value:
        """The newest reading of that name."""
        with self._lock:
            when, value = self._known.get(name, (-math.inf, None))
            if value is None or time.monotonic() - when >= self._seconds:
                value = self._read(name)
                self._known[name] = (time.monotonic(), value)
            return value


class Runs:
    """The runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.status = Recent(lambda name: status.read(self.run(name)), 2.5)
        self.curves = Recent(lambda name: curves(status.training_rows(self.run(name))), 2.5)

    def run(self, name: str) -> Path:
        """The folder of a run: a folder right in that of the runs, and no link out of it.

        Raises:
            TrainerError: there is none of that name.
        """
        return confined(self.folder, name, Path.is_dir)

    def names(self) -> list[str]:
        """All runs, the newest first."""
        found = []
        for file in self.folder.glob("*/settings/run.json"):
            try:
                found.append((file.stat().st_mtime, self.run(file.parents[1].name).name))
            except (OSError, TrainerError):
                continue
        return [name for _, name in sorted(found, reverse=True)]

    def report(self, name: str) -> Path | None:
        """The report of a run, if it has one."""
        try:
            return confined(self.run(name), "report.html", Path.is_file)
        except TrainerError:
            return None

    def logs(self, name: str) -> dict[str, Path]:
        """Logs of a run by the names of their jobs, the newest first; also what was started from here."""
        run = self.run(name)
        files = [*(run / "logs").glob("*.log"), *control.folder(run).glob("*.out")]
        files = [file for file in files if file.is_file() and file.resolve() == file]
        files.sort(key=lambda file: file.stat().st_mtime, reverse=True)
        return {file.stem if file.suffix == ".log" else f"{file.stem} (asked for here)": file for file in files}

    def snapshots(self, name: str) -> list[dict[str, Any]]:
        """The entries of snapshots.json, the newest step first."""
        try:
            entries = read_json(self.run(name) / "snapshots.json")["snapshots"]
            return sorted(entries, key=lambda entry: entry["step"], reverse=True)
        except (TrainerError, KeyError, TypeError):
            return []


def confined(folder: Path, name: str, kind: Callable[[Path], bool]) -> Path:
    """`folder / name`, if that is in the folder itself, of the kind, and neither a link nor hidden.

    Raises:
        TrainerError: it is not.
    """
    path = folder / name
    plain = name and not name.startswith(".") and "\0" not in name and Path(name).name == name
    if not plain or path.resolve() != path or not kind(path):
        raise TrainerError(f"there is no {name!r} in {folder}")
    return path


def tail(file: Path) -> str:
    """The end of a log, in whole lines."""
    try:
        with open(file, "rb") as log:
            start = max(0, os.fstat(log.fileno()).st_size - LOG_BYTES)
            log.seek(start)
            text = log.read(LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    return text.partition("\n")[2] if start else text


def curves(rows: Iterable[dict[str, Any]]) -> Series:
    """Points (step, value) of each curve, at most `POINTS`: means over equal stretches of a longer one."""
    by_step = {int(row["step"]): row for row in rows if str(row.get("step", "")).isdigit()}
    found: Series = {}
    for name in CURVES:
        points = [(step, status.number(by_step[step].get(name))) for step in sorted(by_step)]
        known = [(step, value) for step, value in points if value is not None]
        length = max(1, -(-len(known) // POINTS))
        stretches = [known[start : start + length] for start in range(0, len(known), length)]
        found[name] = [(each[-1][0], sum(value for _, value in each) / len(each)) for each in stretches]
    return found


class Hardware:
    """The machine that this server runs on."""

    def __init__(self) -> None:
        self._before = _cpu_seconds()

    def __call__(self, _: str = "") -> dict[str, Any]:
        """Cores, the share of them in use since the last call, load, RAM and GPUs; sizes in bytes."""
        memory, now = psutil.virtual_memory(), _cpu_seconds()
        busy, whole = (then - before for then, before in zip(now, self._before, strict=True))
        self._before = now
        return {
            "cores": psutil.cpu_count() or 1,
            "cpu": busy / whole if whole else 0.0,
            "load": psutil.getloadavg()[0],
            "ram_used": memory.total - memory.available,
            "ram_total": memory.total,
            "gpus": gpus(),
        }


def _cpu_seconds() -> tuple[float, float]:
    """Seconds all cores were busy, and all there were. Not `psutil.cpu_percent`, which knows them only by thread."""
    times = psutil.cpu_times()._asdict()
    whole = sum(value for name, value in times.items() if not name.startswith("guest"))  # counted as user
    return whole - times["idle"] - times.get("iowait", 0.0), whole


def gpus() -> list[dict[str, Any]]:
    """NVIDIA GPUs as `nvidia-smi` tells them, so that this process never holds one; [] where there is none."""
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", f"--query-gpu={','.join(_NVIDIA)}", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [_gpu(*row) for row in rows if len(row) == len(_NVIDIA)]


def _gpu(index: str, name: str, used: str, memory: str, total: str, celsius: str, watts: str) -> dict[str, Any]:
    share, taken, whole = (status.number(cell) for cell in (used, memory, total))  # `[N/A]` where it cannot tell
    mib = 1 << 20
    return {
        **{"name": f"GPU {index} {name}", "used": None if share is None else share / 100},
        **{"memory_used": taken and taken * mib, "memory_total": whole and whole * mib},
        **{"celsius": status.number(celsius), "watts": status.number(watts)},
    }
