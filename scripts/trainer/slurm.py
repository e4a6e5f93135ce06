"""Under SLURM: a job that must end before its work is done goes back into the queue, and goes on there later.

SLURM starts it again under its number, so that the workflow that waits for it sees one job that takes longer and counts
no failure. A job that a user stops (`control.py stop`, Ctrl-C, scancel) does not go back.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.control import LIMIT_AHEAD, Requests
from trainer.errors import StoppedError
from trainer.job import log


@contextmanager
def put_back(requests: Requests) -> Iterator[None]:
    """End the process when the work inside was stopped by SLURM and its job is in the queue again."""
    try:
        yield
    except StoppedError as stopped:
        job = os.environ.get("SLURM_JOB_ID")
        if job is None or requests.stopped_by_user() or not _must_yield(job, requests) or not _requeue(job):
            raise
        log.info("%s (SLURM did; its job %s is in the queue again)", stopped, job)
        sys.exit(1)


def _must_yield(job: str, requests: Requests) -> bool:
    """Whether a job that was stopped is near its limit or makes room for others, and was not cancelled.

    One that is given no time to make room (no GraceTime) is put back by SLURM itself. Neither that nor a cancelled one
    counts as running here.
    """
    state = _scontrol("show", "--oneliner", "job", job).stdout
    preempted = " PreemptTime=" in state and " PreemptTime=None" not in state
    return "JobState=RUNNING" in state.split() and (LIMIT_AHEAD in requests.signals or preempted)


def _requeue(job: str) -> bool:
    """Put a job back; where that is not allowed it ends here, and a retry of the workflow goes on."""
    done = _scontrol("requeue", job)
    if done.returncode:
        log.info("SLURM does not put job %s back into its queue: %s", job, done.stderr.strip())
    return done.returncode == 0


def _scontrol(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # a container without SLURM's commands
        return subprocess.CompletedProcess(command, 1, "", str(error))
