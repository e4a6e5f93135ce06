"""Starts training in several processes, as the rule's script does; the task is on standard input."""

import json
import sys

from trainer import train_process

train_process.start(json.load(sys.stdin), threads=2)
