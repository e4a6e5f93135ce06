"""What every request and WebSocket must pass: addressed to this server, and asked for by its own pages."""

import re

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The pages compile templates in the browser (unsafe-eval) and hold their styles and data (unsafe-inline). All of it is
# of this server: nothing is loaded from, or sent to, anywhere else, and no other page can show them in a frame.
PAGES = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# A report is a file of the run: whatever is in it, it runs nothing and is of no origin.
REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; sandbox"


class Guard:
    """Refuses what is not addressed to this server by name (DNS rebinding), or comes from a page of another origin."""

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app = app
        self.hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or let it pass."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
        elif complaint := self.complaint(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008, "reason": complaint})
            else:
                await PlainTextResponse(complaint, 403)(scope, receive, send)
        else:
            await self.app(scope, receive, _with_headers(send))

    def complaint(self, scope: Scope) -> str | None:
        """What is wrong with a request; None if it may pass."""
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return "refused: this server is 127.0.0.1 or localhost, with its port"
        # Browsers name the origin of each WebSocket and of all that is no plain reading.
        reads = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        if origins != [f"http://{hosts[0]}"] and (origins or not reads):
            return "refused: the request does not come from a page of this server"
        return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("content-security-policy", PAGES)
            headers["x-content-type-options"] = "nosniff"
            headers["referrer-policy"] = "no-referrer"
            headers["cross-origin-resource-policy"] = "same-origin"
            headers["cross-origin-opener-policy"] = "same-origin"
            if not re.search("max-age", headers.get("cache-control", "")):  # which only the library's own files have
                headers["cache-control"] = "no-store"
        await send(message)

    return sending
