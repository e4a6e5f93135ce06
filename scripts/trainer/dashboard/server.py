"""The server: pages, reports, and, if that was allowed, what may be asked of runs."""

import asyncio
import hmac
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from nicegui import ui

from trainer.dashboard import HOST, guard, pages
from trainer.dashboard.actions import Actions
from trainer.dashboard.readings import Runs
from trainer.errors import TrainerError


def build(folder: Path, port: int, token: str | None) -> guard.Guard:
    """The application.

    Args:
        folder: the folder of runs.
        port: where it will be served; requests for another one are refused.
        token: what whoever asks for something must know; None: nothing may be asked for.
    """
    runs = Runs(folder)
    actions = Actions(runs)
    app = FastAPI(openapi_url=None)

    @app.get("/run/{name}/report.html")
    def report(name: str) -> Response:
        path = runs.report(name)
        if not path:
            return PlainTextResponse("there is no report yet", 404)
        return FileResponse(path, media_type="text/html", headers={"content-security-policy": guard.REPORT})

    @app.post("/run/{name}/{action}")
    async def control(name: str, action: str, request: Request) -> JSONResponse:
        if token is None:
            return _refused(403, "this dashboard only looks: start it with --allow-control")
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            return _refused(401, "the token is missing or wrong: it is in the terminal where the dashboard was started")
        try:
            values = await request.json() if action == "steps" else {}
            values = {"steps": values["steps"]} if values else {}
            return JSONResponse({"done": await asyncio.to_thread(actions.do, action, name, values)})
        except TrainerError as error:
            return _refused(409, str(error))
        except (ValueError, TypeError, KeyError):
            return _refused(400, "the number of steps is missing")

    pages.define(runs, actions, control=token is not None)
    ui.run_with(
        app,
        title="gguf-trainer",
        dark=None,  # as the browser is
        language="en-US",
        favicon=pages.FAVICON,
        tailwind=False,
        binding_refresh_interval=None,
    )
    return guard.Guard(app, port)


def _refused(status: int, why: str) -> JSONResponse:
    return JSONResponse({"refused": why}, status)


class _Server(uvicorn.Server):
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End on Ctrl-C; the signal is not raised again, which would show as an error. A second one ends at once."""
        self.force_exit, self.should_exit = self.should_exit, True


def serve(folder: Path, port: int, token: str | None) -> None:
    """Serve until interrupted. Nothing is logged of requests."""
    config = uvicorn.Config(
        build(folder, port, token),
        host=HOST,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,  # open pages would hold up the end for as long as they are open
    )
    _Server(config).run()
