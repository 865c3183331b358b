"""A real browser without a screen, for looking at pages: Chromium from the PATH, or the one in PyQt6-WebEngine.

Both are spoken to in the DevTools protocol: a page is opened at a width and in a colour scheme; then its console, the
requests it made, what a script says about it, and its picture can be asked for.
"""

import base64
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.support.socket_messages import Messages

NAMES = ("chrome-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_S = 60
NONE = "no browser: install chromium, or pip install PyQt6-WebEngine"

# A window that is never seen, with the engine's debugging port open.
_QT = """
import sys
from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication
app = QApplication(sys.argv)
view = QWebEngineView()
view.resize(1280, 1024)
view.load(QUrl("about:blank"))
view.show()
app.exec()
"""


def command() -> list[str] | None:
    """What starts a browser here, but for the port to speak to it."""
    for name in NAMES:
        if path := shutil.which(name):
            flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
            return [path, *flags, "about:blank"]
    return [sys.executable, "-c", _QT] if find_spec("PyQt6") and find_spec("PyQt6.QtWebEngineCore") else None


@contextmanager
def started() -> Iterator["Browser"]:
    words = command()
    assert words is not None, NONE
    port = _free_port()
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        flags = [f"--remote-debugging-port={port}", f"--user-data-dir={folder}"]
        settings = {
            "QT_QPA_PLATFORM": "offscreen",
            "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu --hide-scrollbars",
            "QTWEBENGINE_REMOTE_DEBUGGING": f"127.0.0.1:{port}",
            "HOME": folder,
        }
        words = [*words, *flags] if words[0] != sys.executable else words
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **settings}
        )
        try:
            messages = Messages(_page_url(port, process), TIMEOUT_S)
            try:
                yield Browser(messages)
            finally:
                messages.close()
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait()


class Browser:
    """One page at a time. `console` and `requests` are what the page in it has said and asked for."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._num = 0
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, file: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.console, self.requests = [], []
        self.call("Page.navigate", url=file.as_uri())
        while self.evaluate("document.readyState + location.href") != f"complete{file.as_uri()}":
            time.sleep(0.02)

    def evaluate(self, script: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """Of the whole page, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._num += 1
        self._messages.send(json.dumps({"id": self._num, "method": method, "params": params}))
        while True:
            message = json.loads(self._messages.receive())
            if message.get("id") == self._num:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, event: str | None, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"]["text"])
        elif event == "Runtime.consoleAPICalled":
            self.console.append(str(params["args"]))
        elif event == "Log.entryAdded":
            self.console.append(params["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _page_url(port: int, process: subprocess.Popen[bytes]) -> str:
    """Where the browser's first page listens, once it does."""
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=TIMEOUT_S) as answer:
                for target in json.load(answer):
                    if target["type"] == "page":
                        return str(target["webSocketDebuggerUrl"])
        except OSError:
            pass
        time.sleep(0.05)
    raise RuntimeError(f"the browser does not answer; it ended with {process.poll()}")
