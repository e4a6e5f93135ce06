"""How a running job is found, stopped and asked for a snapshot: files in the run's `control` folder.

A job holds a lock for as long as its process lives, however it dies. Requests are files; what is older than the job
that finds it is left over from an earlier one and ignored.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from trainer.errors import TrainerError
from trainer.files import write_json


def folder(run: Path | str) -> Path:
    """The control folder of a run."""
    return Path(run) / "control"


@contextmanager
def only_one(run: Path | str, name: str) -> Iterator[None]:
    """Hold the lock of a job of a run.

    Raises:
        TrainerError: another process holds it.
    """
    place = folder(run)
    place.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(place / f"{name}.lock"), place / f"{name}.json"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise TrainerError(
            f"{name} of {run} is already running ({_who(owner)}); wait for it, or stop it with "
            f"`python scripts/control.py {run} stop`"
        ) from None
    try:
        write_json(owner, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        owner.unlink(missing_ok=True)
        lock.release()


def _who(owner: Path) -> str:
    try:
        values = json.loads(owner.read_text())
        return f"process {values['pid']} on {values['host']}"
    except (OSError, ValueError, KeyError):
        return "another process"


def running(run: Path | str) -> list[str]:
    """Names of the jobs of a run that hold their lock now."""
    found = []
    for file in sorted(folder(run).glob("*.lock")):
        lock = FileLock(file)
        try:
            with lock.acquire(timeout=0):
                pass
        except Timeout:
            found.append(file.stem)
    return found


class Requests:
    """What is asked of this job: to stop (SIGINT, SIGTERM or `control.py stop`), or for a snapshot."""

    def __init__(self, run: Path | str) -> None:
        self._folder = folder(run)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._started = time.time()
        self._signalled = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def stop(self) -> bool:
        """Whether to save and stop now."""
        return self._signalled or self._fresh("stop")

    def snapshot(self) -> bool:
        """Whether a snapshot of the current step is wanted."""
        return self._fresh("snapshot")

    def answer_snapshot(self) -> None:
        """Tell who wants a snapshot that it is there."""
        (self._folder / "snapshot").unlink(missing_ok=True)

    def _fresh(self, name: str) -> bool:
        try:
            return (self._folder / name).stat().st_mtime >= self._started
        except FileNotFoundError:
            return False


def request_stop(run: Path | str, wait: float = 3600.0) -> list[str]:
    """Ask the running jobs of a run to save and stop; return when they have. Gives their names; [] if none ran."""
    names = running(run)
    if names:
        request = folder(run) / "stop"
        request.touch()
        _wait_until(lambda: not running(run), wait, f"the jobs of {run} have not stopped")
        request.unlink(missing_ok=True)
    return names


def request_snapshot(run: Path | str, wait: float = 1800.0) -> None:
    """Ask the running training for a kept checkpoint of its current step; return when it is written."""
    request = folder(run) / "snapshot"
    request.touch()
    _wait_until(
        lambda: not request.exists() or "train" not in running(run), wait, "training has not answered the request"
    )
    request.unlink(missing_ok=True)


def _wait_until(done, wait: float, complaint: str) -> None:  # noqa: ANN001
    deadline = time.monotonic() + wait
    while not done():
        if time.monotonic() > deadline:
            raise TrainerError(f"{complaint} after {wait:.0f} s; look at its log")
        time.sleep(0.2)
