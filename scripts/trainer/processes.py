"""Several processes of this machine that train together, each on a GPU of its own (or on some of the CPU's cores).

The first one, the leader, decides and writes; all of them compute a share of every batch and add up their gradients.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, gather_object, reduce
from torch import Tensor

from trainer import devices
from trainer.config import Train
from trainer.errors import TrainerError

_Value = TypeVar("_Value")

# Others wait for the leader while it validates.
_PATIENCE = timedelta(hours=2)
# The exit status of a process that the others no longer answer: why, another one or `launch` says.
_LOST = 3


class Together:
    """The processes that train together; this one is number `rank` of `size`."""

    def __init__(self, device: str, size: int) -> None:
        """`device` and `size` are settings. Of several, in a process that `launch` started, joins the others."""
        self.size, self.rank = size, rank(size)
        if self.size == 1:
            self.device = devices.pick(device)
            return
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        # On GPUs, what is on the CPU goes between the CPUs: it must not wait for what a GPU is at.
        backend = None if on_cpu else "cuda:nccl,cpu:gloo"
        with _neighbours():
            self.device = PartialState(cpu=on_cpu, backend=backend, timeout=_PATIENCE).device

    @property
    def leader(self) -> bool:
        """Whether this process is the one that decides and writes."""
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of all processes' own; they are sent as one, and so have one type."""
        if self.size > 1:
            own = torch.cat([tensor.flatten() for tensor in tensors])
            with _neighbours():
                total = reduce(own, "sum")
            for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def leaders(self, *values: int) -> list[int]:
        """What the leader has for these values."""
        if self.size == 1:
            return list(values)
        with _neighbours():
            return broadcast(torch.tensor(values)).tolist()

    def gathered(self, values: list[_Value]) -> list[_Value]:
        """The values of all processes."""
        if self.size == 1:
            return values
        with _neighbours():
            return gather_object(values)


def rank(size: int) -> int:
    """The number of this process among so many that train; what else has set RANK means nothing to one alone."""
    return int(os.environ["RANK"]) if size > 1 else 0


@contextmanager
def _neighbours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        # Not to the log, where it would stand after what the others have said.
        print(f"process {os.environ['RANK']} of this training lost the others: {error}", file=sys.stderr)
        sys.exit(_LOST)


def check(options: Train) -> None:
    """Raises TrainerError if as many processes as are asked for cannot train."""
    device, here = options.device, torch.cuda.device_count()
    asked = f"train.processes is {options.processes}"
    if device not in ("auto", "cpu", "cuda"):
        raise TrainerError(f"{asked}, and train.device {device!r} is one device: set it to auto")
    if here < options.processes and (device == "cuda" or (device == "auto" and here)):
        raise TrainerError(f"{asked}, and {here} GPUs are here: lower it, or set train.device to cpu")
    if options.batch_size < options.processes:
        raise TrainerError(f"{asked}, and each needs a prompt of every batch: lower it to train.batch_size at most")


def launch(count: int, assignment: dict[str, Any], threads: int) -> None:
    """Run `python -m trainer.train_process` in so many processes, each with `assignment` on its standard input.

    SIGINT and SIGTERM go to the leader. When one process fails, the others are ended.

    Raises:
        TrainerError: one was killed, they cannot reach each other, or they were stopped before they began.
        SystemExit: one failed, and has said why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    places = [str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    shared |= {"OMP_NUM_THREADS": max(1, threads // count), "PYTHONPATH": os.pathsep.join(places)}
    started: list[subprocess.Popen] = []
    stopped = False

    def on_signal(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        for leader in started[:1]:
            leader.send_signal(signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    try:
        for number in range(count):
            own = os.environ | {name: str(value) for name, value in shared.items()}
            own |= {"RANK": str(number), "LOCAL_RANK": str(number)}
            command = [sys.executable, "-m", "trainer.train_process"]
            # A session of its own: Ctrl-C, which a terminal sends to all, must come to the leader alone.
            process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, text=True, start_new_session=True)
            with suppress(BrokenPipeError):  # it has ended, which is seen below
                process.stdin.write(json.dumps(assignment))
                process.stdin.close()
            started.append(process)
        if stopped:  # before there was a leader to tell
            on_signal()
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            time.sleep(0.1)
        failed = [process.returncode for process in started if process.returncode]
    finally:
        _end(started)
    killed = [status for status in failed if status < 0]
    if stopped and killed == [-signal.SIGTERM]:
        raise TrainerError("stopped before training began; the same command starts it again")
    if killed:
        raise TrainerError(f"a process of this training ended with status {killed[0]}; out of memory?")
    if failed and all(status == _LOST for status in failed):
        raise TrainerError(
            f"the {count} processes of this training cannot reach each other, and have said why on the terminal; run "
            "the same command again, or set train.processes to 1"
        )
    if failed:
        sys.exit(1)  # one has said why


def _end(started: list[subprocess.Popen], patience: float = 10.0) -> None:
    """Let what still runs end of its own accord, which a failed neighbour leads to, or else by force."""
    deadline = time.monotonic() + patience
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
