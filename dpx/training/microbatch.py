"""`microbatch=auto`: the fastest number of examples per microbatch that fits the memory, probed on synthetic rows.

The answer never depends on protected data. It is cached per (model, task, sequence, clipping, device), and a run keeps its own
copy, written before step 0: a resumed run uses that whatever the cache says, since another size would give other bits.

B: examples of a microbatch (rows, or whole units where those are drawn).
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dpx.clipping.clipped_sum import clipped_sum, plain_sum
from dpx.declaration import Refused
from dpx.durable import write_durably
from dpx.experiment import Experiment
from dpx.training import resting
from dpx.training.cost import compiled_temporaries
from dpx.training.synthetic_rows import synthetic_rows

logger = logging.getLogger(__name__)

CANDIDATES = (2, 4, 8, 16, 32, 64, 128, 256)
# Parameters, two moments, the accumulator, one microbatch's sum and the noisy sum, all float32, live beside the temporaries.
COPIES_OF_PARAMETERS = 6


def resolve_microbatch(objective: Any, experiment: Experiment, private: Path) -> int:
    """The run's microbatch: the config's number, or the answer of `auto`, which is written to `private` once and then kept."""
    if experiment.microbatch != "auto":
        return int(experiment.microbatch)
    path = private / "microbatch.json"
    if path.exists():
        return int(json.loads(path.read_text())["microbatch"])
    chosen = choose(objective, experiment)
    private.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_durably(path, json.dumps({"microbatch": chosen}))
    return chosen


def choose(objective: Any, experiment: Experiment, candidates: Sequence[int] = CANDIDATES, cache: Path | None = None) -> int:
    """The fastest of `candidates` that fits `mesh.memory_bytes`; raises `Refused` where none does."""
    path = (cache or _cache()) / f"{_key(objective, experiment, candidates)}.json"
    if path.exists():
        chosen = int(json.loads(path.read_text())["microbatch"])
        logger.info("microbatch=auto: %d, found before on this device", chosen)
        return chosen
    rates = _rates(objective, experiment, candidates)
    if not rates:
        reason = f"not even {candidates[0]} examples fit mesh.memory_bytes={experiment.mesh.memory_bytes}"
        raise Refused("microbatch=auto", reason, "Use a smaller model or a larger device")
    chosen = max(rates, key=lambda size: rates[size])
    logger.info("microbatch=auto: %d, examples/s by size %s", chosen, {size: round(rate, 1) for size, rate in rates.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, json.dumps({"microbatch": chosen, "examples_per_s": rates}))
    return chosen


def _rates(objective: Any, experiment: Experiment, candidates: Sequence[int]) -> dict[int, float]:
    """Examples/s by size, smallest first, until memory ends or two sizes in a row are no faster than the best."""
    params = jax.jit(lambda key: resting.drawn(experiment.train, objective, key))(jax.random.PRNGKey(0))
    trained, rests = (sum(leaf.size for leaf in jax.tree.leaves(part)) for part in params)
    allowed = experiment.mesh.memory_bytes - 4 * (COPIES_OF_PARAMETERS * trained + rests)
    rates: dict[int, float] = {}
    for candidate in candidates:
        batch = synthetic_batch(objective, experiment, candidate)
        compiled = jax.jit(microbatch_sum(objective, experiment)).lower(params, batch).compile()
        if compiled_temporaries(compiled) > allowed:
            break
        rates[candidate] = candidate / probe(lambda compiled=compiled, batch=batch: compiled(params, batch))
        best = max(rates.values())
        if len(rates) > 2 and all(rates[slower] < best for slower in list(rates)[-2:]):
            break
    return rates


def synthetic_batch(objective: Any, experiment: Experiment, examples: int) -> dict[str, jax.Array]:
    rows = synthetic_rows(
        experiment.task, examples * experiment.privacy.rows_per_example, experiment.data.sequence_length, objective.vocabulary_size
    )
    return jax.jit(objective.batch)(np.zeros(2, np.uint32), rows)


def microbatch_sum(objective: Any, experiment: Experiment) -> Callable[[Any, Any], Any]:
    """What the step does with one microbatch: ((trained, resting), batch) -> sum of gradients, clipped if the run is private."""
    weights = experiment.clip.weights(experiment.clip.clipping_norm) if experiment.is_private else None
    rows_each = experiment.privacy.rows_per_example

    def run(params: Any, batch: Any) -> Any:
        trained, rests = params[0], params[1] or None

        def losses(params: Any, batch: Any) -> Any:
            return objective.losses(params, batch, jnp.zeros(2, jnp.uint32))

        if weights is None:
            return plain_sum(losses, trained, batch, frozen=rests, rows_per_unit=rows_each).total
        options = {"method": experiment.clipping.method, "rows_per_unit": rows_each, "checked": False}
        return clipped_sum(losses, trained, batch, weights=weights, frozen=rests, **options).total

    return run


def probe(call: Callable[[], Any], rounds: int = 2) -> float:
    """Seconds of the fastest of `rounds` calls, after one that warms up."""
    jax.block_until_ready(call())
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _cache() -> Path:
    return Path(os.environ.get("DPX_CACHE", Path.home() / ".cache" / "dpx")) / "microbatch"


def _key(objective: Any, experiment: Experiment, candidates: Sequence[int]) -> str:
    device = jax.devices()[0]
    facts = (objective.model, objective.task, objective.vocabulary_size, experiment.data.sequence_length, experiment.is_private)
    facts += (experiment.privacy.rows_per_example, experiment.train)
    facts += (experiment.clipping, type(experiment.clip).__name__, experiment.mesh.memory_bytes, tuple(candidates))
    facts += (device.device_kind, os.cpu_count(), jax.__version__)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
