"""A live page of all runs, on this machine only: `python scripts/dashboard.py`. It only looks, unless allowed more."""

import argparse
import secrets
import socket
import sys
from pathlib import Path

from trainer.dashboard import HOST


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="?", default=Path("runs"), help="the folder of runs (default: runs)")
    parser.add_argument("--port", type=int, default=8765, help="the port on 127.0.0.1 (default: 8765; 0: any)")
    parser.add_argument(
        "--allow-control",
        action="store_true",
        help="let whoever has the token, which is printed once, start, stop and change runs",
    )
    options = parser.parse_args()
    if not options.runs.is_dir():
        return _error(f"{options.runs} is not a folder: name the one that holds your runs")
    if options.allow_control and not sys.stdout.isatty():
        return _error("--allow-control shows its token in a terminal, and the output goes elsewhere")
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((HOST, options.port))
            port = probe.getsockname()[1]
    except (OSError, OverflowError) as error:
        return _error(f"port {options.port} cannot be used ({error}): choose another one with --port")
    try:
        from trainer.dashboard import server
    except ImportError as error:
        return _error(f"the dashboard needs {error.name}: pip install -r requirements.lock")
    token = secrets.token_urlsafe(24) if options.allow_control else None
    page = f"http://{HOST}:{port}/"
    # The part after # never leaves the browser.
    print(f"{page}#token={token}\n(whoever has this link can start and stop runs)" if token else page, flush=True)
    server.serve(options.runs, port, token)
    return 0


def _error(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
