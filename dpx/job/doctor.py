"""`job=doctor`: what this machine and this installation are, and whether they compute clipped sums and noise correctly.

The clipped sum of a small encoder is compared with float64 gradients of one example at a time. A million draws of the run's own noise, from
a fresh secret, are compared with the normal distribution.

`job=benchmark_noise`: how far the noise's draws reach and what a million of them cost on this machine. Three generators take turns:
`jax.random.normal`, whose float32 draws stop at 5.42 sigma; the run's own Gaussian draws; and the exact discrete Gaussian of
`mechanism=discrete_gaussian`, which is drawn on the host. Neither job reads data.
"""

import contextlib
import functools
import importlib.metadata
import math
import os
import platform
import secrets
import shutil
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.table import Table

from dpx import packages
from dpx.config.experiment import Experiment
from dpx.console import Console, answer
from dpx.declaration import declaration, require
from dpx.files.run_folder import RunFolder, write_json
from dpx.mechanism.mechanism_protocol import REACH

# The largest relative error of a clipped sum in float32; a wrong term is some per cent.
SUM_BOUND = 1e-4
METHODS = ("book_keeping", "vmap", "traced")
DRAWS = 1 << 20
DEVIATION = 1.5
# Five standard errors of the deviation of so many draws, over the deviation itself.
DEVIATION_BOUND = 5 / math.sqrt(2 * DRAWS)
# The Kolmogorov-Smirnov distance that so many draws exceed with probability 1e-6 at most (Massart 1990).
DISTANCE_BOUND = math.sqrt(math.log(2 / 1e-6) / (2 * DRAWS))
# Of the noise that is timed: the length of a row.
COLUMNS = 1024


@declaration
class Doctor:
    """Prints versions, devices, memory and the checks, and writes `release/doctor.json`.

    A correct machine fails the checks of the noise with probability below 2e-6. Raises `RuntimeError` after writing if a check fails.
    """

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        import jax

        from dpx.training.fingerprint import processor, threads, versions

        folder.made_release()
        devices = jax.devices()
        # None for a checkout that was never installed.
        unmet: list[str] = []
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            required = [Requirement(line) for line in importlib.metadata.requires(packages.DISTRIBUTION) or ()]
            ours = [one for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
            unmet = [str(one) for one in ours if not one.specifier.contains(importlib.metadata.version(one.name), prereleases=True)]
        document = {
            "installation": {
                "python": platform.python_version(),
                **versions(),
                "extras": [extra for extra, package in packages.PACKAGES.items() if packages.is_installed(package)],
                "packages": [str(one) for one in packages.outside() if not one.set_aside],
                "unmet_requirements": unmet,
            },
            "machine": {
                "system": platform.platform(),
                "processor": processor()["model"],
                "cores": threads()["cores"],
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "disk_free_bytes": shutil.disk_usage(folder.path).free,
                "platform": devices[0].platform,
                "devices": [device.device_kind for device in devices],
                "device_memory_bytes": experiment.mesh.usable_bytes(),
            },
            "checks": [*_sums(), *_noise()],
        }
        write_json(folder.release / "doctor.json", document)
        answer(document)
        _show(document)
        failed = [one["name"] for one in document["checks"] if not one["passes"]]
        if failed:
            raise RuntimeError(f"{', '.join(failed)}: outside its bound, so runs on this machine would not be what they state")


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


@declaration
class BenchmarkNoise:
    """Writes `private/benchmark_noise.json`: nanoseconds per draw, median and extremes of the rounds, after one that warms up.

    Attributes:
        draws: Draws of each round, a multiple of 2048.
        rounds: How often every generator is timed.
        output: File for a second copy of benchmark_noise.json.
    """

    draws: int = 1 << 20
    rounds: int = 5
    output: str | None = None

    def __post_init__(self) -> None:
        require(
            self.draws % (2 * COLUMNS) == 0 and self.draws > 0,
            f"job.draws={self.draws}",
            f"the number of draws must be a multiple of {COLUMNS}, the length of a row",
            "Use 1048576",
        )
        require(self.rounds > 0, f"job.rounds={self.rounds}", "the benchmark would measure nothing", "Use 1 or more")

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        document = self.document()
        for path in (folder.made_private() / "benchmark_noise.json", Path(self.output) if self.output else None):
            if path is not None:
                write_json(path, document)
        answer(document)
        table = Table("generator", "largest |draw| / sigma", "ns a draw", "extremes")
        for row in document["rows"]:
            reach = "unbounded" if row["reach"] is None else f"{row['reach']:.2f}"
            table.add_row(row["generator"], reach, f"{row['ns']:.1f}", " to ".join(f"{value:.1f}" for value in row["ns_spread"]))
        Console(soft_wrap=True).print(table)

    def document(self) -> dict[str, Any]:
        """Returns the conditions and rows of benchmark_noise.json."""
        import jax
        import jax.numpy as jnp

        from dpx.mechanism.discrete_gaussian import discrete_gaussian
        from dpx.mechanism.noise import gaussian
        from dpx.randomness import RootSecret

        secret, shape = RootSecret.from_seed(0), (self.draws // COLUMNS, COLUMNS)
        key, plain = jnp.asarray(secret.key("benchmark")), jax.random.key(0, impl="threefry2x32")
        own = jax.jit(functools.partial(gaussian, rows=shape[0], columns=COLUMNS))
        normal = jax.jit(lambda key: jax.random.normal(key, shape))
        # The largest float32 below 1 is what its uniform can come to at most.
        cut = float(jnp.sqrt(2.0) * jax.lax.erf_inv(jnp.nextafter(jnp.float32(1), jnp.float32(0))))
        # By name: the largest absolute draw in sigmas, and a call that makes all draws.
        generators: dict[str, tuple[float | None, Any]] = {
            "jax.random.normal": (cut, lambda: normal(plain)),
            "gaussian": (REACH, lambda: own(key)),
            "discrete_gaussian": (None, lambda: discrete_gaussian(secret.stream("benchmark"), Fraction(1 << 19), self.draws)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in generators}
        for round_ in range(self.rounds + 1):
            for name, (_, call) in generators.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        rows = []
        for name, (reach, _) in generators.items():
            ns = [1e9 * value / self.draws for value in sorted(seconds[name])]
            rows.append({"generator": name, "reach": reach, "ns": ns[len(ns) // 2], "ns_spread": [ns[0], ns[-1]]})
        conditions = {"device": jax.devices()[0].device_kind, "cores": os.cpu_count(), "draws": self.draws, "rounds": self.rounds}
        return {"kind": "noise", **conditions, "rows": rows}
