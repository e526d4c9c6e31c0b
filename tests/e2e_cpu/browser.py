"""A headless Chromium that a test drives over its debugging pipe: no driver and no package beside the browser."""

import base64
import contextlib
import json
import os
import select
import shutil
import struct
import subprocess
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # JSON

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 60.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
)
WIDTH, HEIGHT = 1280, 900
PNG, PNG_FILTERS = b"\x89PNG\r\n\x1a\n", 5
BYTES_PER_PIXEL = {2: 3, 6: 4}  # by color type, at 8 bits: RGB, RGBA


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    lines: frozenset[bytes]  # as the file has them: a byte that names a filter, then pixels

    @property
    def may_be_of_one_color(self) -> bool:
        """Of such a picture each filter makes at most two different lines: the first, and any other."""
        return len(self.lines) <= 2 * PNG_FILTERS


def read_picture(raw: bytes) -> Picture:
    """Of a PNG as Chromium makes them. Raises AssertionError where it is damaged, or another one."""
    assert raw.startswith(PNG)
    at, chunks = len(PNG), dict[bytes, bytes]()
    while at < len(raw):
        length, kind = struct.unpack_from(">I4s", raw, at)
        body = raw[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", raw, at + 8 + length) == (zlib.crc32(kind + body),)
        chunks[kind] = chunks.get(kind, b"") + body
        at += 12 + length
    width, height, depth, color, *_, interlace = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert (depth, interlace) == (8, 0)
    size, pixels = 1 + width * BYTES_PER_PIXEL[color], zlib.decompress(chunks[b"IDAT"])
    assert len(pixels) == size * height
    return Picture(width, height, frozenset(pixels[line : line + size] for line in range(0, len(pixels), size)))


class Page:
    """One tab. What it has asked for and complained of is in `requests` and `errors`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "DOM", "Log"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.eventually("document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """Its value, which JSON must be able to say."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def eventually(self, expression: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (found := self.run(expression)):
            assert time.monotonic() < until, f"{expression} did not come true; errors: {self.errors}"
            self._read(0.05)
        return found

    def choose_file(self, selector: str, path: Path) -> None:
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def screenshot(self, path: Path) -> Picture:
        """Of all of the page, however far it goes on below the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))
        return read_picture(path.read_bytes())

    def call(self, method: str, **params: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < until, f"{method} was not answered"
            for answer in self._read(1.0):
                if answer.get("id") == self._number:
                    assert "error" not in answer, answer
                    return answer["result"]

    def _read(self, seconds: float) -> list[Any]:
        """Messages that are here, after a look of so long for more."""
        if select.select([self._from], [], [], seconds)[0]:
            self._buffer += os.read(self._from, 1 << 20)
        *whole, self._buffer = self._buffer.split(b"\0")
        messages = [json.loads(one) for one in whole]
        for message in messages:
            self._note(message.get("method"), message.get("params", {}))
        return messages

    def _note(self, method: str | None, params: Any) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    assert CHROMIUM is not None
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    words = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", "--remote-debugging-pipe"]
    script = f'exec "$@" 3<&{read_there} 4>&{write_there}'  # where it looks for them
    process = subprocess.Popen(
        ["bash", "-c", script, "browser", *words], pass_fds=(read_there, write_there), stderr=subprocess.DEVNULL
    )
    os.close(read_there)
    os.close(write_there)
    try:
        yield Page(write_here, read_here)
    finally:
        process.kill()
        process.wait()
        os.close(write_here)
        os.close(read_here)
