"""A real browser for tests: Chromium without a window, driven through chromedriver's HTTP interface."""

import base64
import contextlib
import json
import pathlib
import re
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from typing import Any

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "chromium and chromedriver are not installed (Debian: apt-get install chromium chromium-driver)"
_FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]


class Browser:
    """A window of the browser.

    Args:
        address: Of the driver's session.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._page = ""

    def open(self, page: pathlib.Path | str) -> None:
        """Load a page from a file or an address, with logs that begin again."""
        self._page = page if isinstance(page, str) else page.as_uri()
        self.messages()
        self.requests()
        self._post("/url", {"url": self._page})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function's body in JavaScript returns."""
        return self._post("/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self._post("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def size(self, width: int, height: int) -> None:
        """Be a screen of that many dots."""
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def scheme(self, scheme: str) -> None:
        """Prefer "dark" or "light" pages."""
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        """Press a key."""
        typed = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key, **typed)

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, pointerType="mouse")

    def click(self, x: float, y: float, *, count: int = 1) -> None:
        """Press and release the mouse, twice for a double click."""
        for number in range(1, count + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=number)

    def drag(self, start: float, stop: float, y: float) -> None:
        """Move the mouse from left to right, or back, with its button pressed."""
        self.move(start, y)
        self.command("Input.dispatchMouseEvent", type="mousePressed", x=start, y=y, button="left", clickCount=1)
        for x in ((start + stop) / 2, stop):
            self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, button="left", buttons=1)
        self.command("Input.dispatchMouseEvent", type="mouseReleased", x=stop, y=y, button="left", clickCount=1)

    def swipe(self, start: float, stop: float, y: float) -> None:
        """Drag a finger."""
        self.command("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": start, "y": y}])
        for part in (0.25, 0.5, 0.75, 1.0):
            points = [{"x": start + part * (stop - start), "y": y}]
            self.command("Input.dispatchTouchEvent", type="touchMove", touchPoints=points)
        self.command("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def messages(self) -> list[str]:
        """Errors and warnings on the console since the last time."""
        return [entry["message"] for entry in self._post("/se/log", {"type": "browser"})]

    def requests(self) -> list[str]:
        """Addresses that the page has asked for since the last time, its own included."""
        events = [json.loads(entry["message"])["message"] for entry in self._post("/se/log", {"type": "performance"})]
        sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent if each["documentURL"] == self._page]

    def elements(self) -> list[dict[str, str]]:
        """The attributes of all elements of the page, asked for at once: numbers of nodes do not last."""
        found, nodes = [], [self.command("DOM.getDocument", depth=-1)["root"]]
        for node in nodes:
            names = node.get("attributes", [])
            found.append(dict(zip(names[::2], names[1::2], strict=True)))
            nodes += node.get("children", [])
        return found

    def screenshot(self) -> bytes:
        """The window as a PNG."""
        return base64.b64decode(self.command("Page.captureScreenshot")["data"])

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _ask(self._address + path, body)


def _ask(address: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=180) as answer:
        return json.load(answer)["value"]


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone afterwards, as its processes are."""
    assert CHROMIUM is not None and DRIVER is not None, MISSING
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        driver = subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert driver.stdout is not None
        with driver, driver.stdout as lines:
            try:
                port = next(found[1] for line in lines if (found := re.search(r"on port (\d+)\.", line)))
                options = {"binary": CHROMIUM, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
                wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
                root = f"http://127.0.0.1:{port}/session"
                session = _ask(root, {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
                try:
                    yield Browser(f"{root}/{session}")
                finally:
                    _ask(f"{root}/{session}", None, "DELETE")
            finally:
                driver.terminate()
