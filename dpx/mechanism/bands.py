"""What the proof of banded noise covers (Choquette-Choo et al. 2023, theorem 4), and the strategy a run uses.

Column j of C, of norm 1, is all that a row taking part in step j adds to C x; it ends before step j + bands. Steps of one row are `cycle`
>= `bands` apart, so its columns do not overlap: each time its group comes round is one Poisson-sampled Gaussian release of probability
`cycle` q, and nothing else. The claim rests on the number of bands and the columns' norm, not on the coefficients' values.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from dpx.declaration import require
from dpx.durable import write_durably
from dpx.experiment import Experiment
from dpx.extras import require_extra
from dpx.mechanism.declarations import Banded, Quantile, ReleasedTelemetry
from dpx.sampler import CyclicPoisson

# Coefficients are rounded to float32 below this norm, so no column is longer than 1.
_BELOW_ONE = 1 - 1e-6


def check(experiment: Experiment) -> None:
    """Raises `Refused` for what the proof does not cover."""
    mechanism, sampler = experiment.mechanism, experiment.sampler
    if isinstance(sampler, CyclicPoisson):
        _check_cycle(experiment)
    if not isinstance(mechanism, Banded):
        return
    require(
        isinstance(sampler, CyclicPoisson),
        f"mechanism=banded, sampler={sampler.name}",
        f"noise correlated over {mechanism.bands} steps is proved for rows that rest {mechanism.bands} steps between two",
        f"Use sampler=cyclic_poisson sampler.cycle={mechanism.bands}",
    )
    assert isinstance(sampler, CyclicPoisson)
    require(
        sampler.cycle >= mechanism.bands,
        f"sampler.cycle={sampler.cycle}",
        f"a row may come back while mechanism.bands={mechanism.bands} steps share its noise",
        f"Use sampler.cycle={mechanism.bands} or more",
    )
    for is_met, value in (
        (not isinstance(experiment.clip, Quantile), "clip=quantile"),
        (not isinstance(experiment.telemetry, ReleasedTelemetry), "telemetry=released"),
    ):
        require(is_met, f"mechanism=banded, {value}", "the joint release with correlated noise is not proved here", "Leave one of them out")


def _check_cycle(experiment: Experiment) -> None:
    privacy, name = experiment.privacy, "sampler=cyclic_poisson"
    require(
        privacy.adjacency != "add_remove",
        f"{name}, privacy.adjacency=add_remove",
        "one row more moves others to another group",
        "Use privacy.adjacency=zero_out",
    )
    require(
        privacy.rows_per_unit_max == 1,
        f"{name}, privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
        "rows of one unit may lie in several groups",
        "Use privacy.unit=row",
    )
    require(
        experiment.accountant.name != "gdp_clt",
        f"{name}, accountant=gdp_clt",
        "the limit is known for plain Poisson sampling",
        "Use accountant=pld",
    )


def require_library(experiment: Experiment, private: Path) -> None:
    """Raises `Refused` where `settle` would need a library that is not installed: before any work, not after the text was prepared."""
    if isinstance(experiment.mechanism, Banded) and not (private / "strategy.json").exists():
        require_extra("mechanism=banded", "correlated")


def settle(experiment: Experiment, private: Path) -> np.ndarray | None:
    """The run's coefficients of C's first column, float32 [bands], written to `private` once and then kept; `None` without bands.

    They are a function of (steps, bands) but for the optimiser's last bits. Raises `Refused` where the library is missing.
    """
    if not isinstance(experiment.mechanism, Banded):
        return None
    path = private / "strategy.json"
    if not path.exists():
        private.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, json.dumps({"coefficients": optimised(experiment.steps, experiment.mechanism.bands).tolist()}))
    return checked(json.loads(path.read_text())["coefficients"], experiment.mechanism.bands)


def optimised(steps: int, bands: int) -> np.ndarray:
    """Coefficients that minimise the mean squared error of all prefix sums, by jax-privacy."""
    require_extra("mechanism=banded", "correlated")
    from jax_privacy.matrix_factorization import toeplitz

    found = np.asarray(toeplitz.optimize_banded_toeplitz(n=max(steps, bands), bands=bands), np.float64)
    return (found / np.linalg.norm(found) * _BELOW_ONE).astype(np.float32)


def checked(coefficients: Any, bands: int) -> np.ndarray:
    """`coefficients` as float32 [bands]; raises `Refused` where a column would be longer than 1 or wider than the band."""
    found = np.asarray(coefficients, np.float32)
    sound = found.shape == (bands,) and np.all(np.isfinite(found)) and found[0] > 0 and np.linalg.norm(found.astype(np.float64)) <= 1
    require(bool(sound), "strategy.json", "is not a strategy of this band with columns of norm 1", "Start a new run folder")
    return found
