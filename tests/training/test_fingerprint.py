"""A changed byte of the package, a changed declaration or another compiler flag is another fingerprint; reporting is not."""

import importlib.metadata
import os
from pathlib import Path

import pytest

import dpx
from dpx.experiment import Schedule
from dpx.init.declarations import FromRun
from dpx.training.fingerprint import code_of, differences, fingerprint, processor

from .conftest import declare


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


def test_what_differs_is_named(monkeypatch):
    first = fingerprint(declare(), "data", 4)
    assert differences(first, fingerprint(declare(schedule=Schedule(evaluate_every=7)), "data", 4)) == []
    assert differences(first, fingerprint(declare(steps=5), "data", 4)) == ["claim"]
    assert differences(first, fingerprint(declare(), "other", 3)) == ["data", "microbatch"]
    assert differences(first, fingerprint(declare(init=FromRun(run="another")), "data", 4)) == ["claim"]
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    assert differences(first, fingerprint(declare(), "data", 4)) == ["environment"]


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NPROC"])
def test_another_number_of_threads_is_another_fingerprint(monkeypatch, name):
    first = fingerprint(declare(), "data", 4)
    monkeypatch.setenv(name, "1")
    assert differences(first, fingerprint(declare(), "data", 4)) == ["threads"]


def test_another_number_of_cores_is_another_fingerprint(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    three = fingerprint(declare(), "data", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6})
    assert differences(three, fingerprint(declare(), "data", 4)) == []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert differences(three, fingerprint(declare(), "data", 4)) == ["threads"]


def test_another_processor_and_other_kernels_are_another_fingerprint(monkeypatch):
    first = fingerprint(declare(), "data", 4)
    known = processor()
    monkeypatch.setattr("dpx.training.fingerprint.processor", lambda: known | {"instructions": "others"})
    monkeypatch.setattr("dpx.training.fingerprint.accelerator_libraries", lambda: {"nvidia-cublas-cu12": "12.9"})
    assert differences(first, fingerprint(declare(), "data", 4)) == ["accelerator_libraries", "processor"]


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
    assert fingerprint(declare(), "data", 4)["versions"]["dpx"] == dpx.__version__
