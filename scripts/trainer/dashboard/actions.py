"""What may be asked of a run from its page. Who may ask was decided before."""

import os
import signal
import subprocess
import threading
from pathlib import Path

from trainer import commands, control
from trainer.dashboard.readings import Runs
from trainer.errors import TrainerError


class Actions:
    """Start, stop, snapshot and a change of steps, each answered with a sentence."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._started: dict[tuple[str, str], subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self.known = {"start": self.start, "stop": self.stop, "snapshot": self.snapshot, "steps": self.steps}

    def do(self, name: str, run: str, values: dict[str, object]) -> str:
        """Do what is asked of a run.

        Raises:
            TrainerError: there is no such action or run, or it cannot be done now; it says why.
        """
        if name not in self.known:
            raise TrainerError(f"there is no action {name!r}: use {', '.join(self.known)}")
        folder = self._runs.run(run)
        with self._lock:
            return self.known[name](folder, **values)

    def start(self, run: Path) -> str:
        """Give the command again that the run was started with; it goes on from where it is."""
        command = commands.read(run)
        if self._runs.status(run.name)["state"] == "running" or control.running(run):
            raise TrainerError(f"{run.name} is running already")
        self._launch(run, "start", command)
        return f"started: {command.text()}"

    def stop(self, run: Path) -> str:
        """Ask the jobs of the run to save and stop; what was started here and has none that saves is interrupted."""
        names = control.running(run)
        started = self._started.get((run.name, "start"))
        if not names and started and started.poll() is None:
            os.killpg(started.pid, signal.SIGINT)  # Ctrl-C
            return f"{run.name} was interrupted"
        if not names:
            raise TrainerError("no job that saves runs now, and nothing that was started here: use Ctrl-C where it was")
        # The request stands until they have stopped, which may take minutes.
        threading.Thread(target=control.request_stop, args=(run,), daemon=True).start()
        return f"{', '.join(names)} was asked to save and stop"

    def snapshot(self, run: Path) -> str:
        """Export the newest state of the run."""
        command = commands.read(run)
        self._launch(run, "snapshot", command, "--nolock", "snapshot")
        return "the snapshot is being made: it appears in the table when it has been scored"

    def steps(self, run: Path, steps: object = None) -> str:
        """Change the planned steps, in the user's settings file."""
        if not isinstance(steps, int) or isinstance(steps, bool):
            raise TrainerError("the number of steps must be a whole number")
        file = commands.set_steps(commands.read(run), steps)
        return f"train.steps is {steps:,} in {file} now; training follows it while it runs, or with the next start"

    def _launch(self, run: Path, name: str, command: commands.Command, *more: str) -> None:
        """Run Snakemake on its own: it outlives this server."""
        earlier = self._started.get((run.name, name))
        if earlier and earlier.poll() is None:
            raise TrainerError(f"the {name} that was asked for before is not done yet")
        control.folder(run).mkdir(exist_ok=True)
        # Not a `.log` in `logs`: what stands there at the end is a job's error to `trainer.status`.
        with open(control.folder(run) / f"{name}.out", "wb") as output:
            self._started[run.name, name] = subprocess.Popen(
                command.process(*more),
                cwd=command.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def failed(self, run: str, state: str) -> list[str]:
        """What was started here and did not succeed; that a run was stopped is no failure of its start."""
        return [
            f"{name} ended with status {process.returncode}: its log says why"
            for (of, name), process in list(self._started.items())
            if of == run and process.poll() and (name != "start" or state in ("failed", "waiting"))
        ]
