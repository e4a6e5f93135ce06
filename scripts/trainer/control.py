"""How a running job is found, stopped and asked for a snapshot: files in the run's `control` folder.

A job holds a lock for as long as its process lives, however it dies. Requests are files. One to stop is in force until
a workflow is started again, so that it also reaches jobs that a cluster starts later; it says whether what is not
finished is saved or discarded, and the first one counts. One for a snapshot that is older than the job that finds it is
left over from an earlier one and ignored.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from trainer.errors import StoppedError, TrainerError
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
        lock.acquire(timeout=1)  # whoever looks for running jobs has it for a moment
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


# What SLURM is asked to send ahead of a job's time limit (`slurm_extra` of the rules). All processes of the job get it;
# those that do not listen never notice.
LIMIT_AHEAD = signal.SIGURG


# In the request to stop.
_DISCARD = "discard"


class Requests:
    """What is asked of this job: to stop (SIGINT, SIGTERM, LIMIT_AHEAD or `control.py stop`), or for a snapshot."""

    def __init__(self, run: Path | str) -> None:
        self._folder = folder(run)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._started = time.time()
        self.signals: set[int] = set()
        for number in (signal.SIGINT, signal.SIGTERM, LIMIT_AHEAD):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.add(number)

    def stop(self) -> bool:
        """Whether to save and stop now."""
        return bool(self.signals) or self.stopped_by_user()

    def stopped_by_user(self) -> bool:
        """Whether `control.py stop` was called since the workflow was started."""
        return (self._folder / "stop").exists()

    def discard(self) -> bool:
        """Whether what is not finished is to be thrown away. A signal asks to save, whatever else was asked."""
        try:
            return not self.signals and (self._folder / "stop").read_text() == _DISCARD
        except FileNotFoundError:
            return False

    def snapshot(self) -> bool:
        """Whether a snapshot of the current step is wanted."""
        try:
            return (self._folder / "snapshot").stat().st_mtime >= self._started
        except FileNotFoundError:
            return False

    def answer_snapshot(self) -> None:
        """Tell who wants a snapshot that it is there."""
        (self._folder / "snapshot").unlink(missing_ok=True)


@contextmanager
def discarding(requests: Requests, throw_away: Callable[[], None]) -> Iterator[None]:
    """Throw away what is not finished where the work inside was stopped with that request; it is saved until then."""
    try:
        yield
    except StoppedError:
        if not requests.discard():
            raise
        throw_away()
        raise StoppedError(
            "stopped as asked, and what was not finished is thrown away; the same command begins it anew"
        ) from None


def request_stop(run: Path | str, wait: float = 3600.0, discard: bool = False) -> list[str]:
    """Ask the jobs of a run to stop; return when those that run have. Gives their names; [] if none ran.

    They save what is not finished, or discard it. Those that wait in a cluster's queue stop when they are started.

    Raises:
        TrainerError: they have been asked to save before, or to discard; or they do not stop.
    """
    request, wanted = folder(run) / "stop", _DISCARD if discard else ""
    request.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError), open(request, "x") as file:
        file.write(wanted)
    if request.read_text() != wanted and running(run):
        what = "save" if discard else "discard what is not finished"
        raise TrainerError(f"the jobs of {run} have been asked to {what} and stop, which stands; wait for them")
    names = running(run)
    _wait_until(lambda: not running(run), wait, f"the jobs of {run} have not stopped")
    return names


def clear_stop(run: Path | str) -> None:
    """A workflow is started: an earlier request to stop is no longer in force."""
    (folder(run) / "stop").unlink(missing_ok=True)


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
