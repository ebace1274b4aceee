"""Changed code of a sum, a changed declaration or another compiler flag is another fingerprint; reports and comments are not."""

import ast
import dataclasses
import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import dpx
from dpx.claim.calibration import differing
from dpx.config.declared_init import FromRun
from dpx.config.experiment import Experiment, Schedule
from dpx.declaration import declaration, identifying_values
from dpx.mechanism.dp_sgd import NoPrivacy
from dpx.privacy.declared_privacy import Pld
from dpx.privacy.lines import Part, Plan, PlanParts
from dpx.processes.mesh import Mesh
from dpx.training.fingerprint import ROOTS, closure, code_checksum, code_of, code_of_parts, differences, fingerprint, module_at, processor

from .conftest import declare

TOP = Path(dpx.__file__).parent.parent
# Packages that show what ran, plan it or start it: they reach no sum.
OUTSIDE = {"pages", "job", "launch", "scaling", "docs", "generation"}


@pytest.fixture
def package(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("y = 2\n")
    return tmp_path


def test_code_is_told_apart_by_content_name_and_place(package: Path):
    seen = {code_of(package)}
    (package / "a.py").write_text("x = 2\n")
    seen.add(code_of(package))
    (package / "a.py").rename(package / "c.py")
    seen.add(code_of(package))
    (package / "inner" / "b.py").rename(package / "b.py")
    seen.add(code_of(package))
    assert len(seen) == 4


def test_files_that_are_not_code_change_nothing(package: Path):
    before = code_of(package)
    (package / "a.pyc").write_bytes(b"compiled")
    assert code_of(package) == before


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package."""
    shutil.copytree(TOP / "dpx", tmp_path / "dpx", ignore=shutil.ignore_patterns("__pycache__", "docs"))
    return tmp_path


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("dpx/training/step.py", "leaf / expected_batch", "leaf / (expected_batch + 1)"),
        ("dpx/sampler/poisson.py", "sampling_probability", "sampling_rate"),
        ("dpx/mechanism/noise.py", "jnp.float32", "jnp.float64"),
        ("dpx/randomness.py", "blake2b", "blake2s"),
        ("dpx/models/dropout.py", "jax.random", "jax.numpy"),
    ],
)
def test_code_that_a_sum_a_draw_or_noise_depends_on_has_a_checksum(tmp_path: Path, file: str, old: str, new: str):
    before = (TOP / file).read_text()
    assert old in before
    edited = tmp_path / "edited.py"
    edited.write_text(before.replace(old, new))
    assert file.removesuffix(".py").replace("/", ".") in closure(ROOTS)
    assert module_at(edited, TOP).code != module_at(TOP / file, TOP).code


def test_docstrings_comments_reports_and_analyses_do_not_change_the_checksum(checkout: Path):
    step = checkout / "dpx/training/step.py"
    step.write_text("# A comment.\n" + step.read_text().replace("Adds noise once", "Adds the noise once"))
    for place in ("pages/run_page.py", "job/explain.py", "job/report.py", "cost/designs.py"):
        (checkout / "dpx" / place).write_text("x = 1\n")
    assert step.read_text() != (TOP / "dpx/training/step.py").read_text()
    assert code_checksum(top=checkout) == code_checksum()


def test_the_closure_holds_the_step_and_no_reports():
    modules = closure(ROOTS)
    parts = {
        "clipping.methods",
        "models.networks",
        "mechanism.noise",
        "sampler.epochs",
        "optimizer",
        "files.array_checksums",
        "declaration",
    }
    assert {f"dpx.{name}" for name in parts} <= modules
    assert not {name for name in modules if name.split(".")[1:2] and name.split(".")[1] in OUTSIDE}


def test_no_import_of_dpx_is_relative():
    for file in (TOP / "dpx").rglob("*.py"):
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(file.read_bytes()))), file


def test_a_field_added_with_its_default_changes_no_claim():
    @declaration
    class Before:
        size: int
        rate: float = 0.5

    @declaration
    class After:
        size: int
        rate: float = 0.5
        added: int | None = None

    After.__qualname__ = Before.__qualname__
    before, after = Before(size=3), After(size=3)
    assert identifying_values(before) == identifying_values(after)
    assert identifying_values(after) != identifying_values(After(size=3, added=1))
    assert identifying_values([before, {"a": before}]) == identifying_values((after, {"a": after}))


def test_other_values_and_other_classes_are_other_claims():
    claims = {
        declare(**change).claim_checksum
        for change in ({}, {"steps": 5}, {"replicate": 1}, {"mechanism": NoPrivacy()}, {"accountant": Pld()})
    }
    assert len(claims) == 5


def taken(experiment: Experiment, data: str, microbatch: int) -> dict[str, Any]:
    return fingerprint(experiment.computation, code_of_parts(experiment), data, microbatch)


def test_what_differs_is_named(monkeypatch):
    first = taken(declare(), "data", 4)
    assert differences(first, taken(declare(schedule=Schedule(evaluate_every=7)), "data", 4)) == []
    assert differences(first, taken(declare(steps=5), "data", 4)) == ["claim"]
    again = dataclasses.replace(declare().model, rematerialize="layers")
    assert differences(first, taken(declare(model=again), "data", 4)) == ["model"]
    assert differences(first, taken(declare(), "other", 3)) == ["data", "microbatch"]
    assert differences(first, taken(declare(init=FromRun(run="another")), "data", 4)) == ["claim"]
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    assert differences(first, taken(declare(), "data", 4)) == ["environment"]


def test_devices_and_processes_are_none_of_it_but_other_flags_of_the_compiler_are(monkeypatch):
    """Draws and noise have keys by their place, and a sum that another order of adding changes is found by its checksum."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    mesh = Mesh(name="eight", data=4, fsdp=2, flops_per_s=1.0, memory_bytes=1)
    first = taken(declare(mesh=mesh), "data", 4)
    monkeypatch.delenv("XLA_FLAGS")
    assert differences(first, taken(declare(), "data", 4)) == []
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8 --xla_cpu_enable_fast_math=true")
    assert differences(first, taken(declare(mesh=mesh), "data", 4)) == ["environment"]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"])
def test_another_number_of_threads_is_another_fingerprint(monkeypatch, name):
    first = taken(declare(), "data", 4)
    monkeypatch.setenv(name, "1")
    assert differences(first, taken(declare(), "data", 4)) == ["threads"]


def test_another_number_of_cores_is_another_fingerprint(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    three = taken(declare(), "data", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    assert differences(three, taken(declare(), "data", 4)) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert differences(three, taken(declare(), "data", 4)) == ["threads"]


def test_another_processor_and_other_kernels_are_another_fingerprint(monkeypatch):
    first = taken(declare(), "data", 4)
    known = processor()
    monkeypatch.setattr("dpx.training.fingerprint.processor", lambda: known | {"instructions": "others"})
    monkeypatch.setattr("dpx.training.fingerprint.accelerator_libraries", lambda: {"nvidia-cublas-cu12": "12.9"})
    assert differences(first, taken(declare(), "data", 4)) == ["accelerator_libraries", "processor"]


def test_the_processor_is_read_with_its_instructions():
    known = processor()
    assert set(known) == {"model", "machine", "instructions"} and known == processor()


def test_a_checkout_that_is_not_installed_has_a_fingerprint(monkeypatch):
    version = importlib.metadata.version

    def installed(name: str) -> str:
        if name == "dpx":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert taken(declare(), "data", 4)["versions"]["dpx"] == dpx.__version__


def test_a_plan_from_before_a_field_existed_is_the_same_plan_at_its_default():
    def plan(**more: object) -> Plan:
        noise = Part(values={"sigma": 1.0, **more}, at_default=("added",) if more == {"added": None} else ())
        same = Part(values={}, at_default=())
        return Plan(steps=3, declared=PlanParts(noise=noise, privacy=same, accountant=same, audit=same))

    assert differing(plan(), plan(added=None)) == []
    assert differing(plan(), plan(added=1)) == ["noise"]
    assert differing(plan(added=None), plan()) == ["noise"]
    assert differing(plan(), dataclasses.replace(plan(), steps=4)) == ["steps"]
    assert differing(None, plan(added=1)) == []
