"""Starts training in several processes, as the rule's script does; the task is on standard input."""

import json
import sys

from trainer import config, processes
from trainer.job import job

task = json.load(sys.stdin)
options = config.load(task["settings"]).train
with job(task["log"]):
    processes.check(options)
    processes.launch(options.processes, task, threads=2)
