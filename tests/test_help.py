"""What `--help` and the page of the config say: every group, option and key has a sentence; completion in bash."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from dpx import packages
from dpx.config import recipes, reference
from dpx.config.experiment import Experiment
from tests.processes import answers, environment


@pytest.mark.parametrize("group", reference.groups())
def test_every_option_and_key_has_a_sentence(group: str) -> None:
    untold = [] if reference.meanings().get(group) else [group]
    for option in reference.options(group):
        if packages.is_own(group, option.name):
            untold += [option.name] * (not option.meaning)
            untold += [f"{option.name}: {key.path}" for key in reference.keys(option) if not key.meaning]
    assert untold == []


def test_every_key_at_the_root_has_a_sentence() -> None:
    assert {"steps", "microbatch", "seed", "run", "fork"} <= {name for name, sentence in reference.meanings().items() if sentence}


def test_keys_are_those_of_the_declaration_with_the_values_of_the_option() -> None:
    (option,) = [one for one in reference.options("clip") if one.name == "quantile"]
    by_path = {key.path: key for key in reference.keys(option)}
    assert list(by_path) == ["clip.clipping_norm", "clip.target_quantile", "clip.learning_rate", "clip.count_noise_multiplier"]
    assert (by_path["clip.target_quantile"].type, by_path["clip.target_quantile"].value) == ("a number", "0.5")


def test_the_default_keys_are_those_that_hydra_composes() -> None:
    composed, read = recipes.compose([]), reference.default_keys()
    assert set(read) == {str(key) for key in composed}
    for group in reference.defaults().keys() & read.keys():
        assert read[group].keys() - {"defaults"} == {str(key) for key in composed[group]}, group


def test_the_fields_of_the_experiment_are_read_as_python_declares_them() -> None:
    assert reference.meanings() == reference.attributes(Experiment) | reference.BESIDE_THE_EXPERIMENT


def test_a_key_without_a_sentence_is_found() -> None:
    @dataclasses.dataclass
    class Told:
        """Holds two fields.

        Attributes:
            first: A sentence that continues
                in the next line.
        """

        first: int
        second: int

    assert reference.attributes(Told) == {"first": "A sentence that continues in the next line."}


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> str:
    (told,) = answers([(tmp_path_factory.mktemp("help"), ["--help"])])
    assert told.returncode == 0
    return told.stdout


def test_help_names_every_job_option_and_recipe(shown: str) -> None:
    words = set(shown.replace(",", " ").replace("*", " ").split())
    listed = [group for group in reference.groups() if group not in ("base", "analysis")]
    missing = [f"{group}={name}" for group in listed for name in packages.names_in(group) if name.removeprefix("laptop/") not in words]
    # The only recipe that exists at laptop size alone.
    assert missing == ["experiment=laptop/dpfp_sst2"]


def test_help_says_what_a_newcomer_needs(shown: str) -> None:
    for part in ("job=plan", "(default) BERT-Tiny", "Anil et al. 2021: anil_2m_batch*", "== Exit codes ==", "$(dpx -sc install=bash)"):
        assert part in shown
    docs = next(line.split()[1] for line in shown.splitlines() if line.startswith("  pages: "))
    assert Path(docs, "index.md").is_file() and Path(docs, "config.md").is_file()


@pytest.mark.parametrize(
    ("meaning", "paper"),
    [
        ("Anil et al. 2021, Table 1: the best.", "Anil et al. 2021"),
        ("Ours, from Anil et al. 2021, section 5.2: readings.", "Anil et al. 2021"),
        ("Du and Mi 2021, abstract: RoBERTa.", "Du and Mi 2021"),
        ("A chain of two stages, to copy.", reference.OTHERS),
    ],
)
def test_recipes_are_told_by_paper(meaning: str, paper: str) -> None:
    assert reference.paper_of(meaning) == paper


@pytest.mark.slow
def test_the_line_of_the_help_completes_in_bash(tmp_path: Path, shown: str) -> None:
    script = tmp_path / "dpx"
    script.write_text(f"#!{sys.executable}\nfrom dpx.__main__ import main\nmain()\n")
    script.chmod(0o755)
    install = next(line for line in shown.splitlines() if "completion in bash" in line).partition(": ")[2]
    line = f"{install}; COMP_LINE='dpx clip=' COMP_POINT=9 COMP_CWORD=1 && hydra_bash_completion && echo ${{COMPREPLY[@]}}"
    path = f"{tmp_path}:{environment()['PATH']}"
    done = subprocess.run(["bash", "-c", line], env=environment(PATH=path), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["clip=flat", "clip=normalised", "clip=per_layer", "clip=quantile"]
