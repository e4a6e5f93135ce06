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
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast, reduce
from torch import Tensor

from trainer import devices
from trainer.errors import TrainerError

# Others wait for the leader while it validates.
_PATIENCE = timedelta(hours=2)


class Together:
    """The processes that train together; this one is number `rank` of `size`."""

    def __init__(self, device: str) -> None:
        """`device` is the setting. In a process that `launch` started, joins the others."""
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size == 1:
            self.device = devices.pick(device)
            return
        on_cpu = device == "cpu" or not torch.cuda.is_available()
        self.device = PartialState(cpu=on_cpu, timeout=_PATIENCE).device

    @property
    def leader(self) -> bool:
        """Whether this process is the one that decides and writes."""
        return self.rank == 0

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Make each tensor the sum of all processes' own."""
        if self.size > 1:
            with _neighbours():
                total = reduce(torch.cat([tensor.flatten() for tensor in tensors]), "sum")
            for tensor, part in zip(tensors, total.split([tensor.numel() for tensor in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def leaders(self, *values: int) -> list[int]:
        """What the leader has for these values."""
        if self.size == 1:
            return list(values)
        with _neighbours():
            return broadcast(torch.tensor(values, device=self.device)).tolist()


@contextmanager
def _neighbours() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TrainerError(f"another process of this training has ended ({error})") from None


def check(processes: int, device: str) -> None:
    """Raises TrainerError if so many processes cannot train on that device."""
    count = torch.cuda.device_count()
    if processes > 1 and device not in ("auto", "cpu", "cuda"):
        raise TrainerError(f"train.processes is {processes}, and train.device {device!r} is one device: set it to auto")
    if processes > 1 and device != "cpu" and 0 < count < processes:
        raise TrainerError(
            f"train.processes is {processes}, and {count} GPUs are here: lower it, or set train.device to cpu"
        )


def launch(count: int, task: dict[str, Any], threads: int) -> None:
    """Run `python -m trainer.train_process` in so many processes, each with `task` on its standard input.

    SIGINT and SIGTERM go to the leader. When one process fails, the others are ended.

    Raises:
        TrainerError: one was killed.
        SystemExit: one failed, and has said why.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"OMP_NUM_THREADS": max(1, threads // count), "PYTHONPATH": Path(__file__).parent.parent}
    started: list[subprocess.Popen] = []
    try:
        for rank in range(count):
            own = os.environ | {name: str(value) for name, value in shared.items()}
            own |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", "trainer.train_process"]
            # A session of its own: Ctrl-C, which a terminal sends to all, must come to the leader alone.
            process = subprocess.Popen(command, env=own, stdin=subprocess.PIPE, text=True, start_new_session=True)
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            started.append(process)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: started[0].send_signal(signal.SIGTERM))
        while any(process.poll() is None for process in started) and not any(process.poll() for process in started):
            time.sleep(0.1)
    finally:
        _end(started)
    if killed := [process.returncode for process in started if process.returncode not in (0, 1)]:
        raise TrainerError(f"a process of this training ended with status {killed[0]}; out of memory?")
    if any(process.returncode for process in started):
        sys.exit(1)  # it has said why


def _end(started: list[subprocess.Popen], patience: float = 10.0) -> None:
    """Let what still runs end of its own accord, which a failed neighbour leads to, or else by force."""
    deadline = time.monotonic() + patience
    for process in started:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
