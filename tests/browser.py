"""A real headless Chromium, driven over a pipe by its DevTools protocol: no driver, and nothing to install."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Browser:
    """One page of a browser; what it requests, complains about and is told over WebSockets is kept."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 1000) -> None:
        # Chromium reads commands from its descriptor 3 and answers on 4.
        (theirs_in, self._out), (self._in, theirs_out) = os.pipe(), os.pipe()
        command = [CHROMIUM, "--headless", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu"]
        command += ["--no-sandbox"] if os.getuid() == 0 else []
        command += ["--no-first-run", "--disable-dev-shm-usage", "--disable-component-update", "about:blank"]
        # Through high numbers, so that none is overwritten before it is moved.
        moves = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", moves, "bash", *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.frames: list[str] = []
        self.accept_dialogs = True
        pages = [it for it in self("Target.getTargets")["targetInfos"] if it["type"] == "page"]
        self._session = self("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")
        self.resize(width, height)

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give a command and wait for its answer."""
        number = self._send(method, parameters)
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(message["error"])
                return message["result"]
            self._event(message)

    def _send(self, method: str, parameters: dict[str, Any]) -> int:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        return self._number

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser is gone")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Network.webSocketCreated":
            self.requests.append(parameters["url"])
        elif method in ("Network.webSocketFrameReceived", "Network.webSocketFrameSent"):
            self.frames.append(parameters["response"]["payloadData"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Page.javascriptDialogOpening":
            self._send("Page.handleJavaScriptDialog", {"accept": self.accept_dialogs})

    def resize(self, width: int, height: int, phone: bool = False) -> None:
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def dark(self, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str, until: str = "document.readyState === 'complete'") -> None:
        self("Page.navigate", url=url)
        self.wait(until)

    def value(self, expression: str) -> Any:
        """What JavaScript gives."""
        given = self("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in given:
            raise RuntimeError(given["exceptionDetails"]["exception"].get("description"))
        return given["result"].get("value")

    def wait(self, expression: str, seconds: float = 20) -> None:
        """Wait until JavaScript gives something true."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.value(f"Boolean({expression})"):
                    return
            except RuntimeError:
                pass  # the page is being replaced
            assert time.monotonic() < deadline, f"{expression} within {seconds} s: {self.complaints}"
            time.sleep(0.05)

    def key(self, name: str, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self("Input.dispatchKeyEvent", type=kind, key=name, code=name, text=text, windowsVirtualKeyCode=_code(name))

    def type(self, text: str) -> None:
        self("Input.insertText", text=text)

    def screenshot(self, path: Path, whole: bool = True) -> None:
        taken = self("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(taken))

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait(timeout=120)


def _code(name: str) -> int:
    return {"Tab": 9, "Enter": 13, "ArrowDown": 40, " ": 32}.get(name, 0)
