"""A process of training: the job itself, or one of several that `trainer.processes` started (then as `python -m`)."""

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer import config, training
from trainer.control import Requests, only_one
from trainer.job import job
from trainer.slurm import put_back


def run(task: dict[str, Any]) -> None:
    """Train as a task says: settings, the files and overrides that steps are read from, log and output."""
    settings = config.load(task["settings"])
    run, leader = Path(settings.folder), os.environ.get("RANK", "0") == "0"
    with job(task["log"], quiet=not leader):
        requests = Requests(run)  # before the lock: whoever sees the lock can ask
        with ExitStack() as leading:
            if leader:
                leading.enter_context(put_back(requests))
                leading.enter_context(only_one(run, "train"))
            inputs = training.Inputs.read(settings)

            def plan(steps: int) -> int:
                """The planned steps as the user's files say now."""
                return config.read_steps(task["configfiles"], task["overrides"], steps)

            training.train(settings, inputs, plan, requests, Path(task["output"]))


if __name__ == "__main__":
    run(json.load(sys.stdin))
