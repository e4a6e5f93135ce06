"""How a run stands: `python scripts/status.py runs/demo`. It only looks: nothing in the run changes."""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from trainer import status
from trainer.errors import TrainerError


def main() -> int:
    """Parse the command line and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the run's folder, such as runs/demo")
    parser.add_argument("--json", action="store_true", help="as JSON; with --watch an object a line")
    parser.add_argument(
        "--watch", type=float, nargs="?", const=5.0, metavar="SECONDS", help="again and again, every 5 seconds"
    )
    options = parser.parse_args()
    try:
        while True:
            found = status.read(options.run)
            if options.json:
                print(json.dumps(found, allow_nan=False, indent=None if options.watch else 2), flush=True)
            else:
                clear = "\x1b[H\x1b[J" if options.watch and sys.stdout.isatty() else ""
                print(f"{clear}{status.text(found)}", flush=True)
            if not options.watch:
                return 0
            time.sleep(max(0.2, options.watch))
    except TrainerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
