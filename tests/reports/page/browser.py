"""Drive headless Chromium through its DevTools protocol over pipes, without further packages."""

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 60.0


class Chromium:
    """A browser process, for many pages: it takes a second of the processor to start."""

    def __init__(self, folder: Path) -> None:
        to_browser, from_browser = os.pipe(), os.pipe()
        reads, writes = to_browser[0], from_browser[1]
        self.writes, self.reads = to_browser[1], from_browser[0]
        self.number = 0
        self.unread = b""
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]

        def connect() -> None:
            # the browser reads from descriptor 3 and writes to 4
            high = [fcntl.fcntl(each, fcntl.F_DUPFD, 100) for each in (reads, writes)]
            for descriptor, number in zip(high, (3, 4), strict=True):
                os.dup2(descriptor, number)

        self.process = subprocess.Popen(
            [str(BROWSER), *options, f"--user-data-dir={folder / 'profile'}"],
            preexec_fn=connect,  # noqa: PLW1509 - numbers of descriptors cannot be chosen otherwise
            pass_fds=(3, 4),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)

    def close(self) -> None:
        os.write(self.writes, b'{"id": 0, "method": "Browser.close"}\0')
        self.process.wait(timeout=20)
        os.close(self.writes)
        os.close(self.reads)


class Browser:
    """A page in a profile of its own; `evaluate` runs script in it, and events are those of a user.

    Args:
        kept: use the browser's own profile, whose cache later pages find.
    """

    def __init__(self, chromium: Chromium, *, width: int = 1280, dark: bool = False, kept: bool = False) -> None:
        self._chromium = chromium
        self._session: str | None = None
        self.problems: list[str] = []
        self._context = {} if kept else self.call("Target.createBrowserContext")
        target = self.call("Target.createTarget", url="about:blank", **self._context)["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        mobile = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=mobile)
        self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        if self._context:
            self.call("Target.disposeBrowserContext", **self._context)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        chromium = self._chromium
        chromium.number += 1
        message = {"id": chromium.number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(chromium.writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == chromium.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        chromium = self._chromium
        while b"\0" not in chromium.unread:
            ready, _, _ = select.select([chromium.reads], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            read = os.read(chromium.reads, 1 << 20)
            assert read, "the browser ended"
            chromium.unread += read
        text, _, chromium.unread = chromium.unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("sessionId") != self._session:
            # of a page that was closed
            return message
        if message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(message["params"]["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.problems.append(str(message["params"]["entry"]))
        elif message.get("method") == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:")):
                self.problems.append(f"requests {url}")
        return message

    def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, condition: str, *, seconds: float = _SECONDS) -> None:
        """Wait until a condition holds in the page."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"never true: {condition}; {self.problems}"
            time.sleep(0.05)

    def settle(self) -> None:
        """Wait until what was scheduled has been drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def open(self, path: Path) -> None:
        """Load a page and wait until its scripts have drawn it."""
        url = path.resolve().as_uri()
        self.call("Page.navigate", url=url)
        state = "document.documentElement?.dataset"
        self.wait_for(f"location.href === {json.dumps(url)} && Boolean({state}?.ready || {state}?.failed)")
        self.settle()

    def place_of(self, selector: str, x: float = 0.5, y: float = 0.5) -> tuple[float, float]:
        """A point of an element in the window, after it was scrolled into view."""
        box = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'center', behavior: 'instant'}); const box = found.getBoundingClientRect();"
            " return [box.left, box.top, box.width, box.height]; })()"
        )
        return box[0] + x * box[2], box[1] + y * box[3]

    def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        """A mouse event: mouseMoved, mousePressed or mouseReleased."""
        button = "left" if pressed or kind != "mouseMoved" else "none"
        count = int(kind != "mouseMoved")
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=1, clickCount=count)

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        x, y = self.place_of(selector)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, pressed=True)
        self.mouse("mouseReleased", x, y, pressed=True)
        self.settle()

    def drag(self, start: tuple[float, float], end: tuple[float, float], steps: int = 8) -> None:
        """Press at one point, move to another, and release."""
        self.mouse("mouseMoved", *start)
        self.mouse("mousePressed", *start, pressed=True)
        for step in range(1, steps + 1):
            share = step / steps
            x, y = start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])
            self.mouse("mouseMoved", x, y, pressed=True)
        self.mouse("mouseReleased", *end, pressed=True)
        self.settle()

    def tap(self, x: float, y: float) -> None:
        """Touch a point briefly."""
        self.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=[{"x": x, "y": y}])
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        self.settle()

    def key(self, name: str) -> None:
        """Press a key on the focused element."""
        text = {"text": name} if len(name) == 1 else {}
        extra: dict[str, Any] = {"windowsVirtualKeyCode": 13, "text": "\r"} if name == "Enter" else text
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, **extra)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.settle()

    def type(self, selector: str, text: str) -> None:
        """Focus a field and type into it."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.call("Input.insertText", text=text)
        self.settle()
