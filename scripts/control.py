"""Stop the training or the blocks of shards of a run: `python scripts/control.py runs/demo stop`.

They save first, and the same command resumes. With --discard, what is not finished is thrown away instead, also what
earlier jobs had saved of it: of a training its checkpoints (state, best, kept steps), metrics.csv and tensorboard; of a
block of shards what was computed of those that are not whole. Everything that is finished stays: materials, corpus,
whole shards, exported files, snapshots and logs, and a training that had come to its end.
"""

import argparse
import sys
from pathlib import Path

from trainer import control
from trainer.errors import TrainerError


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/demo")
    parser.add_argument("action", choices=["stop", "running"], help="stop: save and stop; running: what runs now")
    parser.add_argument("--discard", action="store_true", help="with stop: throw away what is not finished")
    arguments = parser.parse_args()
    if arguments.discard and arguments.action != "stop":
        parser.error("--discard goes with stop")
    if not arguments.run.is_dir():
        print(f"{arguments.run} is not a run folder", file=sys.stderr)
        return 2
    try:
        if arguments.action == "running":
            print("\n".join(control.running(arguments.run)) or "nothing runs")
            return 0
        stopped = control.request_stop(arguments.run, discard=arguments.discard)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"stopped: {', '.join(stopped)}" if stopped else f"nothing runs in {arguments.run}")
    return 0 if stopped else 1


if __name__ == "__main__":
    sys.exit(main())
