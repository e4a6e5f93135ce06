"""Starts training in several processes, as the rule's script does; the task is on standard input."""

import json
import sys

from trainer import processes
from trainer.job import job

count, task = json.load(sys.stdin)
with job(task["log"]):
    processes.check(count, task["settings"]["train"]["device"])
    processes.launch(count, task, threads=2)
