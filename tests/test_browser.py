"""Pages in a real browser, opened from disk: narrow and wide, light and dark, for a screen reader and by keyboard."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpx.packages import is_installed
from tests.browser import AXE, PROGRAM, Browser
from tests.processes import CHECKOUT, environment, micro_run

PAPERS = sorted(path.parent.name for path in (CHECKOUT / "experiments").glob("*/paper.yaml"))
PAGES = ["experiments/index.html", *(f"experiments/{name}/page.html" for name in PAPERS)]
PAGES += ["outputs/main-*/private/page.html", "outputs/jobs/report-*/private/page.html"]
SITE = ["site/index.html", "site/config.html"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
    pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not there: npm install --no-save axe-core"),
]


def _dpx(folder: Path, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", *words], cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the pages of all papers, of two runs, and of both runs side by side."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(CHECKOUT / "experiments", folder / "experiments")
    for steps in (20, 30):
        _dpx(folder, "dpx", *micro_run(steps), "schedule.evaluate_every=5")
    runs = sorted(str(path) for path in folder.glob("outputs/main-*"))
    for chosen in (f"run={runs[0]}", f"run={runs[1]}", f"report.runs=[{','.join(runs)}]", "report.paper=all"):
        _dpx(folder, "dpx", "job=report", "report.collect=false", chosen)
    return folder


@pytest.fixture(scope="module")
def site(made: Path) -> None:
    """The documentation, in the same folder."""
    if not (is_installed("furo") and is_installed("myst_nb")):
        pytest.skip("the extra docs is not installed")
    _dpx(CHECKOUT, "sphinx", "-q", "-c", "docs", "dpx/docs", str(made / "site"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


# What can be clicked and seen; `focus` is true where the element with the focus is in the window, is not covered, and has an outline.
WHAT = """
window.clickable = [...document.querySelectorAll("a[href], button, summary, input:not([type=hidden]), select, [onclick], [tabindex]")]
    .filter(one => one.checkVisibility({visibilityProperty: true}) && one.getClientRects().length && one.getAttribute("tabindex") !== "-1");
window.focus_of = () => {
    const one = document.activeElement, [box] = one.getClientRects(), style = getComputedStyle(one);
    if (one === document.body) return null;
    const left = Math.max(box.left, 0), right = Math.min(box.right, innerWidth), above = Math.max(box.top, 0);
    const below = Math.min(box.bottom, innerHeight);
    const top = document.elementFromPoint(left + Math.min(20, (right - left) / 2), above + Math.min(20, (below - above) / 2));
    const is_seen = top !== null && (one.contains(top) || top.contains(one)) && style.outlineStyle !== "none";
    return [clickable.indexOf(one), is_seen, one.outerHTML.slice(0, 100)];
};
clickable.length
"""


def _overflow(browser: Browser) -> list[str]:
    """Returns what is wider than the window, if the page can be scrolled sideways."""
    wide = "[...document.body.querySelectorAll('*')].filter(one => one.getBoundingClientRect().right > innerWidth + 1)"
    scrolls = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
    return browser.evaluate(f"{scrolls} ? ['the page', ...{wide}.slice(0, 5).map(one => one.outerHTML.slice(0, 100))] : []")


def _violations(browser: Browser) -> list[str]:
    """Returns what axe-core finds serious or critical."""
    browser.evaluate(AXE.read_text() + ";0")
    kept = "found.violations.filter(one => ['serious', 'critical'].includes(one.impact))"
    told = f"{kept}.map(one => `${{one.id}}: ${{one.help}}: ${{one.nodes.length}} such as ${{one.nodes[0].html.slice(0, 150)}}`)"
    return browser.evaluate(f"axe.run(document, {{resultTypes: ['violations']}}).then(found => {told})")


def _by_keyboard(browser: Browser) -> list[str]:
    """Returns what Tab does not reach, or reaches out of sight."""
    count, reached, unseen = browser.evaluate(WHAT), set(), []
    for _ in range(count + 5):
        browser.press_tab()
        found = browser.evaluate("focus_of()")
        if found is None or found[0] in reached:
            break
        reached |= {found[0]} - {-1}
        unseen += [] if found[1] else [f"not seen: {found[2]}"]
    missed = sorted({*range(count)} - reached)[:5]
    return unseen[:5] + [f"not reached: {browser.evaluate(f'clickable[{number}].outerHTML.slice(0, 100)')}" for number in missed]


def _found(browser: Browser, page: Path, width: int, scheme: str) -> dict[str, list[str]]:
    """Returns what is wrong with a page, by what looked for it."""
    browser.open(page, width, scheme)
    folded = _overflow(browser)
    browser.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found = {"folded": folded, "unfolded": _overflow(browser), "axe": _violations(browser), "keyboard": _by_keyboard(browser)}
    return {name: lines for name, lines in found.items() if lines}


BAD = """<!doctype html><html lang="en"><title>Bad</title><meta charset="utf-8"><style>a { outline: none }</style>
<p style="color: #aaa; background: #fff">pale <a href="#" style="color: #000">link</a></p><div onclick="0">clicked</div>
<details><summary>more</summary><div style="width: 2000px">wide</div></details>"""


def test_what_is_wrong_is_found(tmp_path: Path, browser: Browser) -> None:
    (tmp_path / "bad.html").write_text(BAD)
    found = _found(browser, tmp_path / "bad.html", 400, "light")
    assert [*found] == ["unfolded", "axe", "keyboard"] and "wide" in found["unfolded"][-1]
    assert [line.partition(":")[0] for line in found["axe"]] == ["color-contrast"]
    assert [line.partition(":")[0] for line in found["keyboard"]] == ["not seen", "not reached"]


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (400, 1280))
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_for_every_reader(page: str, width: int, scheme: str, made: Path, browser: Browser) -> None:
    assert _found(browser, next(made.glob(page)), width, scheme) == {}


@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", (400, 1280))
@pytest.mark.parametrize("page", SITE)
@pytest.mark.usefixtures("site")
def test_the_documentation_is_for_every_reader(page: str, width: int, scheme: str, made: Path, browser: Browser) -> None:
    assert _found(browser, made / page, width, scheme) == {}
