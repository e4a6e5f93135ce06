"""Runs of the real snakemake command line on the checkout, in a folder of their own, with tiny models."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

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


@dataclass
class Project:
    """A folder with settings, prompts and models, in which workflows run."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    pack: str = "pixart"

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
        (self.folder / "pack.yaml").write_text(yaml.safe_dump(self.settings))

    def command(self, *arguments: str) -> list[str]:
        """The snakemake command line."""
        return [
            *(sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile")),
            *("--profile", str(CHECKOUT / "packs" / self.pack), "--configfile", str(self.folder / "pack.yaml")),
            *("--cores", "2", *arguments),
        ]

    def start(self, *arguments: str, online: bool = False) -> subprocess.Popen:
        """Start a workflow in a process group of its own; only `online` may it ask a hub."""
        return subprocess.Popen(
            self.command(*arguments),
            cwd=self.folder,
            env=os.environ | {"HF_HUB_OFFLINE": str(int(not online)), "GGUF_TRAINER_MATERIALS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def snakemake(self, *arguments: str, fails: bool = False, online: bool = False) -> str:
        """Run a workflow to its end; gives what it printed."""
        process = self.start(*arguments, online=online)
        output, _ = process.communicate(timeout=600)
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

    def kill(self, process: subprocess.Popen) -> None:
        """kill -9 of everything the workflow started."""
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        subprocess.run(self.command("--unlock"), cwd=self.folder, capture_output=True, check=False)

    def control(self, action: str) -> str:
        """Call scripts/control.py on the run; gives what it printed."""
        command = [sys.executable, str(CHECKOUT / "scripts" / "control.py"), str(self.run), action]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout

    def json(self, name: str) -> Any:
        """A JSON file of the run."""
        return json.loads((self.run / name).read_text())
