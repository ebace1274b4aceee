"""Takes the pictures of the first page from the page of a finished run. From the root of the checkout, with Chromium:

python -m dpx && python -m dpx job=report run=main && python -m docs.pictures outputs/main-*/private/page.html
"""

import base64
import sys
import tempfile
from pathlib import Path

from tests.browser import Browser

FOLDER = Path(__file__).resolve().parents[1] / "dpx" / "docs" / "pictures"
WIDTH = 1000


def main(page: Path) -> None:
    """Writes `run_<scheme>.png`, the top of the page, and `statement_<scheme>.png`, what the run guarantees."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        browser = Browser(Path(profile))
        for scheme in ("light", "dark"):
            browser.open(page, WIDTH, scheme)
            for name, height in (("run", 890), ("statement", 805)):
                if name == "statement":
                    browser.evaluate("document.getElementById('guarantee').scrollIntoView(); 0")
                # Without the bar of the window.
                clip = {"x": 0, "y": browser.evaluate("scrollY"), "width": WIDTH - 15, "height": height, "scale": 1}
                shown = browser.call("Page.captureScreenshot", clip=clip)
                (FOLDER / f"{name}_{scheme}.png").write_bytes(base64.b64decode(shown["data"]))
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
