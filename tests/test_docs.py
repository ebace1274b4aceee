"""README.md and the pages of `dpx/docs/`: every command composes, links lead somewhere, and the page on your own text runs in order."""

import random
import re
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

import dpx
from dpx import config
from dpx.config import recipes
from dpx.config.with_hydra import started
from dpx.packages import is_installed
from tests.processes import CHECKOUT, answers, environment

DOCS = Path(dpx.__file__).parent / "docs"
README = "../../README.md"
PAGES = (README, *sorted(page.name for page in DOCS.glob("*.md")))
WITH_COMMANDS = (
    README,
    "your_text.md",
    "fine_tuning.md",
    "decoders.md",
    "sweeps.md",
    "mechanisms.md",
    "optimizers.md",
    "initial_weights.md",
    "run_folder.md",
    "chains.md",
    "command_line.md",
)
# What makes the pages' commands quick; what they are about stays as printed. The test's text is small, so a delta below one over its units.
QUICK = (
    *(
        "model=micro",
        "model.layers=1",
        "steps=3",
        "microbatch=8",
        "data.vocabulary.size=256",
        "data.sequence_length=16",
        "schedule.evaluation_rows=32",
    ),
    *("schedule.evaluate_every=3", "accountant=rdp", "privacy.delta=1e-5"),
)
FEW_CANARIES = ("audit.gradients=200",)
missing = object()
# Words that say what is printed.
NOT_COMPOSED = ("--cfg", "job", "--json", "--quiet")
JOBS_OF_A_RUN = ("explain", "account", "evaluate")


def commands(page: str) -> list[list[str]]:
    """Every line of the page's bash blocks, split as a shell would."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    return [shlex.split(line, comments=True) for block in blocks for line in block.splitlines() if line.strip()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """120 authors of 8 letters each."""
    drawn, words = (
        random.Random(0),
        "the river town letter morning winter house friend paper garden road light never write again soon".split(),
    )
    lines = []
    for author in range(120):
        for _ in range(8):
            text = " ".join(drawn.choices(words, k=40)) + "."
            lines.append(f'{{"text": "{text.capitalize()}", "author": "a{author}"}}')
    path = tmp_path_factory.mktemp("letters")
    (path / "letters.jsonl").write_text("\n".join(lines) + "\n")
    return path


def composed(line: list[str]):
    """The config of a command; of a sweep, that of its first point."""
    if line[0] != "-m":
        return recipes.compose(line)
    with started():
        # It lists the recipes of a pattern.
        parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(line[1:])
    first = [
        f"{one.get_key_element()}={next(one.sweep_string_iterator())}" if one.is_sweep_override() else one.input_line for one in parsed
    ]
    return recipes.compose([str(one) for one in first])


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_every_command_composes(page: str):
    """What they do is in the slow suite; that their words are still dpx's is here."""
    # The config folder that `--config-dir` names is written by the command before it.
    lines = [line[3:] for line in commands(page) if line[:3] == ["python", "-m", "dpx"] and "--config-dir" not in line]
    assert len(lines) > 2
    for line in lines:
        # The composed config is printed by Hydra; launchers and Optuna belong to extras: a search's config is that of one trial.
        words = [word for word in line if word not in NOT_COMPOSED and not word.startswith(("hydra/sweeper/", "hydra/launcher="))]
        cfg = composed([*words, *(["hydra/sweeper=basic"] if any(word.startswith("tune.") for word in words) else [])])
        # Building the declaration reads the checkpoint or parent, which does not exist here.
        if not {"init=hf", "init=run", "init=file"} & {*line} and not cfg.run:
            config.build(cfg)


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str):
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", (DOCS / page).read_text())
    gone = [link for link in links if "://" not in link and not ((DOCS / page).parent / link).exists()]
    assert gone == []


def test_the_tests_that_pages_name_exist():
    named = set(re.findall(r"`(test_\w+_\w+_\w+)`", "\n".join(page.read_text() for page in DOCS.glob("*.md"))))
    written = {
        name for file in (CHECKOUT / "tests").rglob("test_*.py") for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) > 15 and named <= written, named - written


def test_what_users_of_other_libraries_write_here_exists():
    """Each key of the right column is one of a config, each line of options composes, and each name is public."""
    rows = [line.split("|") for line in (DOCS / "coming_from.md").read_text().splitlines() if line.startswith("| `")]
    said = [code for row in rows for code in re.findall(r"`([^`]+)`", row[2])]
    cfg, seen = recipes.compose(["train=lora", "lr_schedule=linear"], with_hydra=True), 0
    for code in (one for one in said if "<recipe>" not in one and not one.startswith(("release/", "outputs/", "-m "))):
        seen += 1
        if code.startswith("dpx."):
            attrgetter(code.removeprefix("dpx."))(dpx)
        elif "=" in code:
            assert recipes.compose(re.sub(r"<folder>|<path>", "x", code).split()) is not None
        elif not code.startswith("job="):
            assert OmegaConf.select(cfg, code, default=missing) is not missing, code
    assert len(rows) > 25 and seen > 30


def test_the_loop_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / README).read_text(), re.DOTALL)
    defined: dict = {}
    exec(code, defined)
    assert defined["noisy"].keys() == defined["params"].keys()


def test_the_excerpts_of_one_step_are_lines_of_their_source_in_order():
    page = (DOCS / "one_step.md").read_text()
    blocks = re.findall(r"```python\n# (dpx/\S+\.py)\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == page.count("```python") > 10
    for file, block in blocks:
        source, place = f"\n{(CHECKOUT / file).read_text()}", 0
        for part in re.split(r"^\.\.\.\n", block, flags=re.MULTILINE):
            place = source.find(f"\n{part}", place)
            assert place >= 0, f"{file} has no such lines, or has them before those above:\n{part}"


def test_the_readme_is_short_and_leads_to_the_index_of_every_page():
    text = (DOCS / README).read_text()
    assert len(text.splitlines()) <= 160 and "dpx/docs/index.md" in text
    index = (DOCS / "index.md").read_text().splitlines()
    sections = [line for line in index if (DOCS / f"{line}.md").is_file()]
    assert len(sections) <= 12, "the site has one list of contents on the left, and a reader looks through it"
    listed = [*sections, *(line for name in sections for line in (DOCS / f"{name}.md").read_text().splitlines())]
    assert [page for page in PAGES[1:] if page != "index.md" and page.removesuffix(".md") not in listed] == []


@pytest.mark.slow
@pytest.mark.skipif(not (is_installed("furo") and is_installed("myst_nb")), reason="the extra docs is not installed")
def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", str(CHECKOUT / "docs"), str(DOCS), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "clip.target_quantile" in (tmp_path / "config.html").read_text()


@pytest.mark.slow
def test_your_text_from_a_file_to_weights(folder):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "your_text.md").read_text(), re.DOTALL)
    lines = []
    for command in commands("your_text.md"):
        if command[:3] != ["python", "-m", "dpx"]:
            assert command == ["tensorboard", "--logdir", "outputs/tensorboard"]
            continue
        of_a_run = any(f"job={job}" in command for job in JOBS_OF_A_RUN)
        few = FEW_CANARIES if "audit=canaries" in command else ()
        lines.append([*command[3:], *(() if of_a_run else QUICK), *few])
    *said, last = answers([(folder, line) for line in [*lines, code]], trains_alike=True)
    assert [answer.stderr for answer in said if answer.returncode] == []
    by_line = {" ".join(line): answer.stdout for line, answer in zip(lines, said, strict=True)}
    plan = next(text for line, text in by_line.items() if "unit_field" in line and "job=plan" in line)
    assert "epsilon" in plan and "noise" in plan
    assert "author" in by_line["job=explain run=letters"]
    assert len(list((folder / "outputs").glob("letters-*/release/privacy.json"))) == 1
    assert list((folder / "outputs" / "tensorboard").iterdir())
    assert last.stdout.split()[:2] == ["dp", "micro"]
