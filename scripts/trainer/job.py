"""What every script of a rule does around its work: a log, progress, and errors a person can read."""

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.errors import TrainerError
from trainer.files import disk_full, is_disk_full

log = logging.getLogger("trainer")


@contextmanager
def job(log_file: Path | str) -> Iterator[None]:
    """Log to `log_file` and to the terminal; turn a TrainerError into one line and exit status 1.

    Anything else is a bug: its traceback goes to the log and up.
    """
    path = Path(log_file)
    path.parent.mkdir(parents=True, exist_ok=True)
    log.setLevel(logging.INFO)
    log.propagate = False
    logging.raiseExceptions = False  # on a full disk a log line is lost, and the error must still be readable
    for handler in (logging.FileHandler(path, encoding="utf-8"), logging.StreamHandler(sys.stderr)):
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
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
        if now - self.last >= self.every or ended:
            self.last = now
            rate = (self.done - self.skipped) / max(now - self.start, 1e-9)
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
