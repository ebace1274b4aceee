"""`job=doctor`: what this machine and this installation are, and whether they compute clipped sums and noise correctly.

Reads no data. The clipped sum of a small encoder is compared with float64 gradients of one example at a time. A million draws of the run's
own noise, from a fresh secret, are compared with the normal distribution.
"""

import importlib.metadata
import math
import os
import platform
import secrets
import shutil
from typing import Any

from packaging.requirements import Requirement
from rich.table import Table

from dpx import extras, packages
from dpx.config.experiment import Experiment
from dpx.console import Console, answer
from dpx.declaration import declaration
from dpx.files.run_folder import RunFolder, write_json

# The largest relative error of a clipped sum in float32; a wrong term is some per cent.
SUM_BOUND = 1e-4
METHODS = ("book_keeping", "vmap", "traced")
DRAWS = 1 << 20
DEVIATION = 1.5
# Five standard errors of the deviation of so many draws, over the deviation itself.
DEVIATION_BOUND = 5 / math.sqrt(2 * DRAWS)
# The Kolmogorov-Smirnov distance that so many draws exceed with probability 1e-6 at most (Massart 1990).
DISTANCE_BOUND = math.sqrt(math.log(2 / 1e-6) / (2 * DRAWS))


@declaration
class Doctor:
    """Prints versions, devices, memory and the checks, and writes `release/doctor.json`.

    A correct machine fails the checks of the noise with probability below 2e-6. Raises `RuntimeError` after writing if a check fails.
    """

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        folder.made_release()
        document = {"installation": _installation(), "machine": _machine(experiment, folder), "checks": [*_sums(), *_noise()]}
        write_json(folder.release / "doctor.json", document)
        answer(document)
        _show(document)
        failed = [one["name"] for one in document["checks"] if not one["passes"]]
        if failed:
            raise RuntimeError(f"{', '.join(failed)}: outside its bound, so runs on this machine would not be what they state")


def _installation() -> dict[str, Any]:
    """Returns versions, the extras that are there, the packages that add to dpx, and requirements that are not met."""
    from dpx.training.fingerprint import versions

    return {
        "python": platform.python_version(),
        **versions(),
        "extras": [extra for extra, package in extras.PACKAGES.items() if extras.is_installed(package)],
        "packages": [str(one) for one in packages.outside() if not one.set_aside],
        "unmet_requirements": _unmet(),
    }


def _unmet() -> list[str]:
    """Returns the requirements of dpx whose installed version does not fit; none for a checkout that was never installed."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(packages.DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        return []
    ours = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [str(one) for one in ours if not one.specifier.contains(importlib.metadata.version(one.name), prereleases=True)]


def _machine(experiment: Experiment, folder: RunFolder) -> dict[str, Any]:
    """Returns the devices that JAX finds and the memory, in bytes."""
    import jax

    from dpx.training.fingerprint import processor, threads

    devices = jax.devices()
    return {
        "system": platform.platform(),
        "processor": processor()["model"],
        "cores": threads()["cores"],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "disk_free_bytes": shutil.disk_usage(folder.path).free,
        "platform": devices[0].platform,
        "devices": [device.device_kind for device in devices],
        "device_memory_bytes": experiment.mesh.usable_bytes(),
    }


def _sums() -> list[dict[str, Any]]:
    """Checks the clipped sum by each method."""
    from dpx.models.shape import Bert
    from dpx.task.declared_task import MaskedLanguageModel
    from dpx.training.exactness import Exactness, sum_by

    small = Bert(name="small", layers=2, width=16, heads=2, feed_forward=24)
    exactness = Exactness(small, MaskedLanguageModel(next_sentence=True, max_masked_positions=3))
    errors = {method: exactness.error(sum_by(method)) for method in METHODS}
    return [_check(f"clipped sum by {method}, relative error", error, SUM_BOUND) for method, error in errors.items()]


def _noise() -> list[dict[str, Any]]:
    """Checks the noise of a step: its standard deviation and its distribution."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from scipy.special import ndtr

    from dpx.mechanism.noise import add_noise, slice_keys
    from dpx.randomness import SECRET_BYTES, RootSecret

    total = {"kernel": jnp.zeros((1024, DRAWS // 1024))}
    keys = slice_keys(RootSecret(secrets.token_bytes(SECRET_BYTES)), 0, total)
    noisy, _ = jax.jit(add_noise)(total, keys, jnp.float32(DEVIATION))
    drawn = np.sort(np.asarray(noisy["kernel"], np.float64).ravel()) / DEVIATION
    expected, ranks = ndtr(drawn), np.arange(DRAWS + 1) / DRAWS
    distance = float(max(np.max(ranks[1:] - expected), np.max(expected - ranks[:-1])))
    return [
        _check("noise, relative error of its standard deviation", abs(float(np.sqrt(np.mean(np.square(drawn)))) - 1), DEVIATION_BOUND),
        _check("noise, Kolmogorov-Smirnov distance from a Gaussian", distance, DISTANCE_BOUND),
    ]


def _check(name: str, value: float, bound: float) -> dict[str, Any]:
    # A value that is not a number is not within the bound.
    return {"name": name, "value": value, "bound": bound, "passes": value <= bound}


def _show(document: dict[str, Any]) -> None:
    console = Console(soft_wrap=True)
    for part in ("installation", "machine"):
        table = Table(title=part, title_justify="left", show_header=False)
        for name, value in document[part].items():
            # JAX knows no memory of a CPU, so this is what the mesh declares.
            is_declared = name == "device_memory_bytes" and document["machine"]["platform"] == "cpu"
            called = "device memory, declared" if is_declared else name.removesuffix("_bytes").replace("_", " ")
            table.add_row(called, _in_words(name, value))
        console.print(table)
    table = Table("check", "value", "bound", "", title="checks", title_justify="left")
    for one in document["checks"]:
        table.add_row(one["name"], f"{one['value']:.2e}", f"{one['bound']:.2e}", "passes" if one["passes"] else "FAILS")
    console.print(table)


def _in_words(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return f"{value / 1e9:,.1f} GB"
    if isinstance(value, list):
        counts = {item: value.count(item) for item in value}
        return ", ".join(item if count == 1 else f"{count} x {item}" for item, count in counts.items()) or "none"
    return str(value)
