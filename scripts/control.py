"""Stop what runs in a run folder: `python scripts/control.py runs/demo stop`. It saves first and resumes later."""

import argparse
import sys
from pathlib import Path

from trainer import control
from trainer.errors import TrainerError


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/demo")
    parser.add_argument("action", choices=["stop", "running"], help="stop: save and stop; running: what runs now")
    arguments = parser.parse_args()
    if not arguments.run.is_dir():
        print(f"{arguments.run} is not a run folder", file=sys.stderr)
        return 2
    try:
        if arguments.action == "running":
            print("\n".join(control.running(arguments.run)) or "nothing runs")
            return 0
        stopped = control.request_stop(arguments.run)
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"stopped: {', '.join(stopped)}" if stopped else f"nothing runs in {arguments.run}")
    return 0 if stopped else 1


if __name__ == "__main__":
    sys.exit(main())
