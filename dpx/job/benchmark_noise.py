"""`job=benchmark_noise`: how far the noise's draws reach and what a million of them cost on this machine.

Three generators take turns: `jax.random.normal`, whose float32 draws stop at 5.42 sigma; the run's own Gaussian draws; and the exact
discrete Gaussian of `mechanism=discrete_gaussian`, which is drawn on the host.
"""

import functools
import os
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.table import Table

from dpx.config.experiment import Experiment
from dpx.console import Console, answer
from dpx.declaration import declaration, require
from dpx.files.run_folder import RunFolder, write_json
from dpx.mechanism.declared_mechanism import REACH

COLUMNS = 1024


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

        generators = _generators(self.draws)
        seconds: dict[str, list[float]] = {name: [] for name in generators}
        for round_ in range(self.rounds + 1):
            for name, (_, call) in generators.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                if round_:
                    seconds[name].append(time.perf_counter() - start)
        device = jax.devices()[0]
        rows = [_row(name, reach, sorted(seconds[name]), self.draws) for name, (reach, _) in generators.items()]
        return {
            "kind": "noise",
            "device": device.device_kind,
            "cores": os.cpu_count(),
            "draws": self.draws,
            "rounds": self.rounds,
            "rows": rows,
        }


def _row(name: str, reach: float | None, seconds: list[float], draws: int) -> dict[str, Any]:
    ns = [1e9 * value / draws for value in seconds]
    return {"generator": name, "reach": reach, "ns": ns[len(ns) // 2], "ns_spread": [ns[0], ns[-1]]}


def _generators(draws: int) -> dict[str, tuple[float | None, Callable[[], Any]]]:
    """Returns (largest absolute draw in sigmas, a call that makes `draws` of them) by name."""
    import jax
    import jax.numpy as jnp

    from dpx.mechanism.discrete_gaussian import discrete_gaussian
    from dpx.mechanism.noise import gaussian
    from dpx.randomness import RootSecret

    secret = RootSecret.from_seed(0)
    key, plain = jnp.asarray(secret.key("benchmark")), jax.random.key(0, impl="threefry2x32")
    own = jax.jit(functools.partial(gaussian, rows=draws // COLUMNS, columns=COLUMNS))
    normal = jax.jit(lambda key: jax.random.normal(key, (draws // COLUMNS, COLUMNS)))
    # The largest float32 below 1 is what its uniform can come to at most.
    cut = float(jnp.sqrt(2.0) * jax.lax.erf_inv(jnp.nextafter(jnp.float32(1), jnp.float32(0))))
    return {
        "jax.random.normal": (cut, lambda: normal(plain)),
        "gaussian": (REACH, lambda: own(key)),
        "discrete_gaussian": (None, lambda: discrete_gaussian(secret.stream("benchmark"), Fraction(1 << 19), draws)),
    }
