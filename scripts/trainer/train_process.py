"""A process of training: the job itself, or one of several that `trainer.processes` started (then as `python -m`)."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from trainer import config, packs, processes, training
from trainer.adapter_task import AdapterTask
from trainer.config import Settings
from trainer.control import Requests, discarding, only_one
from trainer.errors import StoppedError
from trainer.job import job
from trainer.packs.base import LoraPack
from trainer.slurm import put_back
from trainer.task import Task


def start(assignment: dict[str, Any], threads: int) -> None:
    """Train as it says, in this process or in several; `threads` are those that a job may use."""
    options = config.load(assignment["settings"]).train
    if options.processes == 1:
        torch.set_num_threads(threads)
        run(assignment)
        return
    with job(assignment["log"]):
        processes.check(options)
        processes.launch(options.processes, assignment, threads)


def run(assignment: dict[str, Any]) -> None:
    """Train as it says: settings, the files and overrides that steps are read from, log, and output or `until`."""
    settings = config.load(assignment["settings"])
    run, leader = Path(settings.folder), processes.rank(settings.train.processes) == 0
    with job(assignment["log"], quiet=not leader):
        requests = Requests(run)  # before the lock: whoever sees the lock can ask
        with ExitStack() as leading:
            if leader:
                leading.enter_context(put_back(requests))
                leading.enter_context(only_one(run, "train"))
                leading.enter_context(discarding(requests, lambda: training.discard(run)))
                if requests.stop():  # before anything large is loaded
                    raise StoppedError("stopped as asked before training began; the same command starts it")

            def plan(steps: int) -> int:
                """The planned steps as the user's files say now."""
                return config.read_steps(assignment["configfiles"], assignment["overrides"], steps)

            output, until = assignment.get("output"), assignment.get("until")
            training.train(settings, _task(settings), plan, requests, output and Path(output), until)


def _task(settings: Settings) -> type[Task]:
    """What the pack of a run trains."""
    if isinstance(packs.get(settings.pack), LoraPack):
        from trainer.lora.task import LoraTask  # takes packages that adapters do without

        return LoraTask
    return AdapterTask


if __name__ == "__main__":
    run(json.load(sys.stdin))
