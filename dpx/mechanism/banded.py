"""Declares `mechanism=banded`: noise that is correlated over a band of steps.

Step t releases (z_t - sum_j c_j noise_{t-j}) / c_0, row t of C^-1 z.

What the proof covers (Choquette-Choo et al. 2023, theorem 4): a row that takes part in step j adds only column j of C, of norm 1, to C x;
that column ends before step j + bands. Steps of one row are `cycle` >= `bands` apart, so its columns do not overlap: each turn of its group
is one Poisson-sampled Gaussian release of probability `cycle` q, and nothing else. The statement depends on the number of bands and the
columns' norm, not on the coefficients' values. Groups must be the same in both neighbours, which the sampler requires
(`Sampler.needs_fixed_numbers`); places within a step may differ, since sums are of real numbers.

Past noise is state: it starts at zero, is saved with every checkpoint, and starts at zero again in a new noise epoch or fork, which is then
a separate mechanism.

Shape legend: J past steps (bands - 1), most recent first.
"""

import json
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.durable import make_private, write_durably
from dpx.mechanism.mechanism_protocol import Declared, Mechanism, NoisySum
from dpx.packages import require_extra
from dpx.randomness import RootSecret

# Coefficients are rounded to float32 below this norm, so no column is longer than 1.
_BELOW_ONE = 1 - 1e-6


@declaration
class Banded(Mechanism):
    """Adds noise that is correlated over `bands` steps (Choquette-Choo et al. 2023, BandMF).

    Much of this noise cancels in the sum of all updates.

    The release is x + C^-1 z for a lower-triangular Toeplitz matrix C with `bands` diagonals and columns of norm 1, optimised for prefix
    sums. A row may take part once in any `bands` steps; `sampler=cyclic_poisson` ensures this. Keeps `bands` - 1 noise vectors as state.

    Attributes:
        bands: Diagonals of the matrix: steps over which the noise is correlated.
    """

    bands: int = 4
    name: Literal["banded"] = "banded"

    def __post_init__(self) -> None:
        require(self.bands >= 2, f"mechanism.bands={self.bands}", "one band is independent noise", "Use 2 or more, or mechanism=dp_sgd")

    def check(self, declared: Declared) -> None:
        steps_apart = declared.sampler.steps_apart
        require(
            steps_apart is not None,
            f"mechanism=banded, sampler={declared.sampler.name}",
            f"the proof for noise correlated over {self.bands} steps needs at least {self.bands} steps between two draws of a row",
            f"Use sampler=cyclic_poisson sampler.cycle={self.bands}",
        )
        require(
            steps_apart is None or steps_apart >= self.bands,
            f"sampler.cycle={steps_apart}",
            f"a row may be drawn again within mechanism.bands={self.bands} steps, whose noise is correlated",
            f"Use sampler.cycle={self.bands} or more",
        )
        reason, fix = "dpx has no proof for the joint release with correlated noise", "Remove one of them"
        require(not declared.clip.is_adaptive, f"mechanism=banded, clip={declared.clip.kind}", reason, fix)
        require(not declared.telemetry.is_released, "mechanism=banded, telemetry=released", reason, fix)

    def ledger_fields(self) -> dict[str, Any]:
        """Returns the fields of Gaussian noise. Columns of C have norm 1, so what a row adds to C x has at most the clipping norm."""
        return {"noise": "gaussian"}

    def require_library(self, private: Path) -> None:
        if _read(private / "strategy.json") is None:
            require_extra("mechanism=banded", "correlated")

    def load_strategy(self, steps: int, private: Path) -> np.ndarray:
        """Returns the run's coefficients of C's first column, float32 [bands], which are written to `private` once and then kept.

        They are a function of (steps, bands) except for the optimiser's last bits, so a lost or unreadable file is written again.
        If that gives other coefficients, or the file was changed, the run's fingerprint differs and a new noise epoch begins: the
        proof assumes one strategy for a whole epoch. Raises `ConfigError` if the library is missing.
        """
        path = private / "strategy.json"
        found = _read(path)
        if found is None:
            make_private(private)
            write_durably(path, json.dumps({"coefficients": optimised(steps, self.bands).tolist()}))
            found = _read(path)
        return checked(found, self.bands)

    def initial_state(self, params: Any) -> Any:
        """Returns the past noise before the first step: a tree of zeros [J, ...], float32."""
        import jax
        import jax.numpy as jnp

        return jax.tree.map(lambda leaf: jnp.zeros((self.bands - 1, *leaf.shape), jnp.float32), params)

    def draw(self, secret: RootSecret, step: int, params: Any, noise_multiplier: float, clipping_norm: float, strategy: Any) -> Any:
        """Returns (keys of the slices of every parameter, uint32 [S, 2]; the coefficients, [bands])."""
        from dpx.mechanism import noise

        return noise.slice_keys(secret, step, params), strategy

    def noisy_sum(self, total: Any, drawn: Any, deviation: Any, state: Any, clipping_norm: float) -> NoisySum:
        import jax
        import jax.numpy as jnp

        from dpx.mechanism import noise

        keys, strategy = drawn

        carried = jax.tree.map(lambda past_J: -jnp.tensordot(strategy[1:], past_J, axes=1), state)
        own = jax.tree.map(lambda leaf: leaf / strategy[0], noise.add_noise(carried, keys, deviation)[0])
        moved = jax.tree.map(lambda own, past_J: jnp.concatenate([own[None], past_J[:-1]]), own, state)
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(own)]
        return NoisySum(total, jax.tree.map(jnp.add, total, own), jnp.sum(jnp.stack(squares)), moved)

    def extra_memory_bytes(self, parameters: int, replaced: int) -> int:
        """Returns the bytes of the past noise, old and new."""
        return 2 * 4 * (self.bands - 1) * parameters

    def explanation(self) -> list[str]:
        apart = f"a row can take part in at most one of {self.bands} consecutive steps"
        return [f"Noise of {self.bands} steps in a row is correlated, so that much of it cancels over time; {apart}."]


def _read(path: Path) -> Any:
    """Returns the coefficients in the file at `path`, or `None` if it is missing or unreadable."""
    try:
        return json.loads(path.read_text())["coefficients"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def optimised(steps: int, bands: int) -> np.ndarray:
    """Returns the coefficients that minimise the mean squared error of all prefix sums, computed by jax-privacy."""
    require_extra("mechanism=banded", "correlated")
    from jax_privacy.matrix_factorization import toeplitz  # pyright: ignore[reportMissingImports]

    coefficients = np.asarray(toeplitz.optimize_banded_toeplitz(n=max(steps, bands), bands=bands), np.float64)
    return (coefficients / np.linalg.norm(coefficients) * _BELOW_ONE).astype(np.float32)


def checked(coefficients: Any, bands: int) -> np.ndarray:
    """Returns `coefficients` as float32 [bands]. Raises `ConfigError` where a column would be longer than 1 or wider than the band."""
    values = np.asarray(coefficients, np.float32)
    sound = values.shape == (bands,) and np.all(np.isfinite(values)) and values[0] > 0 and np.linalg.norm(values.astype(np.float64)) <= 1
    require(bool(sound), "strategy.json", "is not a strategy with this number of bands and columns of norm 1", "Start a new run folder")
    return values
