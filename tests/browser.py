"""An installed Chromium, driven over its debugging pipe with the standard library alone.

`python -m tests.browser <page.html> <folder>` writes pictures of the whole page, 400 and 1,280 pixels wide, light and dark.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.processes import CHECKOUT

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# From `npm install --no-save axe-core`, which is not committed.
AXE = CHECKOUT / "node_modules" / "axe-core" / "axe.min.js"


class Browser:
    """One tab. `profile` is an empty folder for what Chromium writes."""

    def __init__(self, profile: Path) -> None:
        (to_read, self._write), (self._read, to_write) = os.pipe(), os.pipe()
        # Chromium reads commands from descriptor 3 and writes answers to 4; each ends with a zero byte. sh takes numbers of one digit.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}', str(PROGRAM), *flags]
        self._process = subprocess.Popen(command, pass_fds=(to_read, to_write), stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self._number, self._text, self._session = 0, b"", {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        self.call("Page.enable")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._write)
        os.close(self._read)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Returns the result of a method of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda told: told.get("id") == self._number)
        assert "error" not in answer, answer
        return answer["result"]

    def _until(self, is_it: Any) -> dict[str, Any]:
        while True:
            while b"\0" not in self._text:
                more = os.read(self._read, 1 << 20)
                assert more, "Chromium has ended"
                self._text += more
            line, _, self._text = self._text.partition(b"\0")
            if is_it(told := json.loads(line)):
                return told

    def open(self, page: Path | str, width: int, scheme: str) -> None:
        """Loads a file, or an address, in a window of `width` pixels, for a reader who prefers the `light` or `dark` scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=page.resolve().as_uri() if isinstance(page, Path) else page)
        self._until(lambda told: told.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression, of a promise the value that it comes to."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press_tab(self) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)

    def picture(self) -> bytes:
        """Returns what the window shows, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])

    def whole_picture(self, width: int) -> bytes:
        """Returns the page from its top to its end, as PNG."""
        clip = {"x": 0, "y": 0, "width": width, "height": self.evaluate("document.documentElement.scrollHeight"), "scale": 1}
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"])


def _pictures(page: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for width in (400, 1280):
            for scheme in ("light", "dark"):
                browser.open(page, width, scheme)
                (folder / f"{page.stem}_{width}_{scheme}.png").write_bytes(browser.whole_picture(width))
        browser.close()


if __name__ == "__main__":
    _pictures(Path(sys.argv[1]), Path(sys.argv[2]))
