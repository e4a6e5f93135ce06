"""Runs of the real snakemake command line on the checkout, in a folder of their own, with tiny models."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from trainer import export

CHECKOUT = Path(__file__).resolve().parent.parent
SUBJECTS = ["fox", "heron", "kettle", "lighthouse", "tractor", "violin", "orchard", "comet", "glacier", "lantern"]
PLACES = ["harbour", "meadow", "attic", "canyon", "market", "library", "ferry", "greenhouse", "quarry", "tunnel"]
LOOKS = [
    "watercolor",
    "charcoal",
    "mosaic",
    "linocut",
    "pastel",
    "fresco",
    "etching",
    "gouache",
    "collage",
    "engraving",
]


def prompts(count: int, start: int = 0) -> list[str]:
    """Distinct short prompts that are no near-duplicates of each other."""
    return [
        f"{SUBJECTS[n % 10]} {n} near the {PLACES[n // 10 % 10]} {n * 7} as {LOOKS[(n // 3) % 10]} number {n * 13}"
        for n in range(start, start + count)
    ]


class Workflow(subprocess.Popen):
    """A workflow in a process group of its own. What it prints goes to a file: a pipe that nobody reads would fill."""

    def __init__(self, command: list[str], folder: Path, **variables: str) -> None:
        self.printed = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it lives as long as the process)
        super().__init__(
            command,
            cwd=folder,
            env=os.environ | variables,
            stdout=self.printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self, seconds: float = 120) -> str:
        """Wait until it has ended; gives what it printed."""
        self.wait(seconds)
        self.printed.seek(0)
        return self.printed.read()


_started: list[Workflow] = []


def end_all() -> None:
    """Kill what tests have started and, failing, not ended: it would train on for hours."""
    for process in _started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.printed.close()
    _started.clear()


@dataclass
class Project:
    """A folder with settings, prompts and models, in which workflows run."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    pack: str = "pixart"
    options: tuple[str, ...] = ("--cores", "2")
    settings_file: str = "pack.yaml"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write()

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "runs" / self.settings["run"]

    def write(self, **groups: dict[str, Any]) -> None:
        """Change groups of settings and write the settings file."""
        for group, values in groups.items():
            self.settings.setdefault(group, {}).update(values)
        (self.folder / self.settings_file).write_text(yaml.safe_dump(self.settings))

    def command(self, *arguments: str) -> list[str]:
        """The snakemake command line."""
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile")),
            *("--profile", str(CHECKOUT / "packs" / self.pack), "--configfile", str(self.folder / self.settings_file)),
            *self.options,
            *arguments,
        ]

    def start(self, *arguments: str, online: bool = False) -> Workflow:
        """Start a workflow; only `online` may it ask a hub."""
        process = Workflow(
            self.command(*arguments), self.folder, HF_HUB_OFFLINE=str(int(not online)), GGUF_TRAINER_MATERIALS=""
        )
        _started.append(process)
        return process

    def snakemake(self, *arguments: str, fails: bool = False, online: bool = False) -> str:
        """Run a workflow to its end; gives what it printed."""
        process = self.start(*arguments, online=online)
        output = process.output(600)
        assert (process.returncode != 0) == fails, output[-6000:]
        return output

    def planned(self, *arguments: str) -> dict[str, int]:
        """Jobs by rule that a dry run lists."""
        output = self.snakemake("--dry-run", *arguments)
        if "Nothing to be done" in output:
            return {}
        table = output.rsplit("Job stats:", 1)[1].splitlines()[3:]
        rows = [line.split() for line in table]
        return {row[0]: int(row[1]) for row in rows[: [len(r) for r in rows].index(0)] if row[0] != "total"}

    def kill(self, process: Workflow) -> None:
        """kill -9 of everything the workflow started."""
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run(self.command("--unlock"), cwd=self.folder, capture_output=True, check=False)

    def control(self, action: str) -> str:
        """Call scripts/control.py on the run; gives what it printed."""
        command = [sys.executable, str(CHECKOUT / "scripts" / "control.py"), str(self.run), action]
        return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False).stdout

    def json(self, name: str) -> Any:
        """A JSON file of the run."""
        return json.loads((self.run / name).read_text())


def project(folder: Path, models: dict[str, str], **train: Any) -> Project:
    """A PixArt run on tiny models: 4 train shards in 2 jobs, 40 steps."""
    files = {"one.txt": prompts(120), "two.txt": prompts(120, 200)}
    folder.mkdir(parents=True)
    for name, lines in files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    train = {"steps": 40, "batch_size": 8, "warmup": 4, "val_every": 10, "save_every": 10, "log_every": 2} | train
    return Project(
        folder,
        {
            "pack": "pixart",
            "run": "tiny",
            "materials": {"paths": models},
            "corpus": {
                "presets": [],
                "files": sorted(files),
                "n_train": 200,
                "n_val": 40,
                "val_fraction": 0.2,
            },
            "precompute": {"shard_size": 50, "block_shards": 2, "device": "cpu"},
            "adapter": {"width": 64, "depth": 2, "student_dim": 64, "teacher_dim": 64, "queries": 40},
            "train": {"lr": 2e-3, "keep_every": 20, "device": "cpu"} | train,
        },
    )


GGUF = "runs/pig_t5_adapter-f16.gguf"


def adapter(made: Project, path: Path | None = None) -> dict[str, bytes]:
    """Bytes of the adapter's tensors."""
    return {name: array.tobytes() for name, array in export.read_arrays(path or made.folder / GGUF).items()}
