"""What every script of a rule does around its work: a log, progress, and errors a person can read.

While it runs, a job leaves `control/<job>.progress.json` in the run's folder, which `trainer.status` reads:

    pid, host    the process
    started      when it began, in unix seconds
    updated      when the file was written
    what         what it is at, such as `teacher on cuda:0`; this and what follows only once it has something to count
    done, total  how far it is, in `unit`
    rate         units a second, in this job
    metrics      of training: the newest rows of metrics.csv, also of steps after the last save
"""

import json
import logging
import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.errors import TrainerError
from trainer.files import disk_full, is_disk_full

log = logging.getLogger("trainer")


class _Announcement:
    """The file that says how far a job is; written at most every `EVERY` seconds, and gone when the job ends."""

    EVERY = 2.0

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
        self.last = -math.inf
        self.tell({})
        self.last = -math.inf  # what it has to tell first is told at once

    def tell(self, values: dict[str, Any]) -> None:
        self.values |= values
        if time.monotonic() - self.last >= self.EVERY:
            self.last = time.monotonic()
            text = json.dumps(self.values | {"updated": time.time()}, indent=2, sort_keys=True)
            with suppress(OSError):  # no job fails for it
                self.path.parent.mkdir(exist_ok=True)
                # Not `files.write_json`, which syncs: on a busy disk a job would wait for that again and again.
                aside = self.path.with_name(f".{self.path.name}.part")
                aside.write_text(text, encoding="utf-8")
                os.replace(aside, self.path)

    def end(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


_announcement: _Announcement | None = None


def announce(**values: Any) -> None:
    """Tell whoever watches how far this job is; the names are in the module's description. Cheap to call often."""
    if _announcement:
        _announcement.tell(values)


@contextmanager
def job(log_file: Path | str, quiet: bool = False) -> Iterator[None]:
    """Log to `log_file` and to the terminal, announce the job, turn a TrainerError into one line and exit status 1.

    Anything else is a bug: its traceback goes to the log and up.

    Args:
        log_file: `<run>/logs/<job>.log`.
        quiet: log only warnings and errors, and announce nothing: another process of the same job does.
    """
    global _announcement
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.propagate = False
    logging.raiseExceptions = False  # on a full disk a log line is lost, and the error must still be readable
    handlers = logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler(sys.stderr)
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
    if not quiet:
        _announcement = _Announcement(path.parent.parent / "control" / f"{path.stem}.progress.json")
    try:
        yield
    except TrainerError as error:
        log.error("error: %s", error)
        sys.exit(1)
    except KeyboardInterrupt:
        log.error("interrupted; the same command starts this job again")
        sys.exit(130)
    except Exception as error:
        if is_disk_full(error):
            log.error("error: %s", disk_full(getattr(error, "filename", None) or path))
            sys.exit(1)
        log.exception("this is a bug of gguf-trainer; please report it with this log")
        raise
    finally:
        if _announcement:
            _announcement.end()
            _announcement = None
        for handler in handlers:
            log.removeHandler(handler)
            handler.close()


class Progress:
    """Log lines such as `train: 512/4096 prompts (12.5 %), 43.1 prompts/s, 0:01:23 left`, one every few seconds."""

    def __init__(self, title: str, total: int, unit: str, every: float = 10.0) -> None:
        self.title, self.total, self.unit, self.every = title, total, unit, every
        self.done = self.skipped = 0.0
        self.start = self.last = time.monotonic()

    def skip(self, count: float) -> None:
        """Count units that were done before; they are not part of the rate."""
        self.done += count
        self.skipped += count

    def update(self, count: float) -> None:
        """Add `count` finished units."""
        self.done += count
        now = time.monotonic()
        ended = self.done > self.total - 1e-6
        rate = (self.done - self.skipped) / max(now - self.start, 1e-9)
        announce(what=self.title, done=round(self.done, 3), total=self.total, unit=self.unit, rate=rate)
        if now - self.last >= self.every or ended:
            self.last = now
            left = duration((self.total - self.done) / rate) if rate else "unknown"
            log.info(
                "%s: %d/%d %s (%.1f %%), %.1f %s/s, %s left",
                *(self.title, round(self.done), self.total, self.unit),
                *(100 * self.done / max(self.total, 1), rate, self.unit, left),
            )


def duration(seconds: float) -> str:
    """`h:mm:ss`."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
