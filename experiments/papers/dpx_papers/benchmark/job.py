"""`job=benchmark`: the cost of private steps relative to plain steps and to other libraries (peers), on this machine, as ratios within one
run.

Programs take turns (A B C A B C ...), so that a machine shared with others slows all of them alike. Each mesh, jax-privacy and torch have
separate processes, each of which waits while a program of another process is timed.
"""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.files.run_folder import RunFolder, write_json
from dpx.mechanism.clip import Flat
from dpx.mechanism.mechanism_protocol import Reparametrisation
from dpx.packages import require_extra
from dpx_papers.benchmark.rows import matrix_rates, rows
from dpx_papers.benchmark.setting import PACKAGES, PEERS, VARIANTS, Setting
from dpx_papers.benchmark.worker import Worker, worker

# The share of a time limit in which programs are compiled; the rest is for rounds.
COMPILING = 0.6


@declaration
class Benchmark:
    """Writes `private/benchmark.json`, and `output` if given: one row per (model, sequence, physical batch, clipping, dtype, mesh).

    Raises `ConfigError` for a variant, mesh or size that is not valid, and for a peer among `variants` that is not installed.

    Attributes:
        variants: Programs that are timed: autodiff (jax.grad of the modules), plain (our blocks without clipping), clipping methods,
            and peers.
        dtypes: Compute types; empty means the experiment's own.
        meshes: Mesh options, each in its own process; empty means the experiment's own.
        logical_batch: Examples of a step.
        physical_batches: Examples that a device holds at a time.
        peer_batches: The same for peers, which run on one device in float32; empty means as physical_batches.
        optional_peers: Peers that are measured where they are installed, and else left out and named.
        rounds: How often every program is timed, in turns.
        limit_s: Seconds in all; batches that come too late are left out and named.
        automatic_batch: Whether the private step is also measured at the batch of microbatch=auto.
        output: File for a second copy of benchmark.json.
    """

    variants: Sequence[str] = ("autodiff", "plain", "book_keeping")
    dtypes: Sequence[str] = ()
    meshes: Sequence[str] = ()
    logical_batch: int = 32
    physical_batches: Sequence[int] = (4, 8, 16, 32)
    peer_batches: Sequence[int] = ()
    optional_peers: Sequence[str] = ()
    rounds: int = 9
    limit_s: float | None = None
    automatic_batch: bool = False
    output: str | None = None

    def __post_init__(self) -> None:
        for name, given in (("variants", self.variants), ("physical_batches", self.physical_batches)):
            require(bool(given), f"job.{name}=[]", "the benchmark would measure nothing", "Name at least one")
        for variant in self.variants:
            require(variant in VARIANTS, f"job.variants={variant}", "no such variant", f"Use {', '.join(VARIANTS)}")
        for peer in self.optional_peers:
            require(peer in PEERS, f"job.optional_peers={peer}", "no such peer", f"Use {', '.join(PEERS)}")
        for dtype in self.dtypes:
            require(dtype in ("float32", "bfloat16"), f"job.dtypes={dtype}", "no such compute type", "Use float32 or bfloat16")
        for name, sizes in (("physical_batches", self.physical_batches), ("peer_batches", self.peer_batches)):
            for size in sizes:
                self._require_divides(f"job.{name}={size}", size)
        require(self.rounds > 0, f"job.rounds={self.rounds}", "the benchmark would measure nothing", "Use 1 or more")
        require(
            self.limit_s is None or self.limit_s > 0,
            f"job.limit_s={self.limit_s}",
            "the time limit must be positive",
            "Give a number of seconds, or null for no limit",
        )

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        document = self.document(experiment)
        for path in (folder.made_private() / "benchmark.json", Path(self.output) if self.output else None):
            if path is not None:
                write_json(path, document)
        answer(document)
        wide_console().print(shown(document))

    def document(self, experiment: Experiment) -> dict[str, Any]:
        """Returns the contents of benchmark.json: the conditions and the rows.

        Raises `ConfigError` for a mechanism that replaces parameters: programs are of the parameters' own gradients."""
        mechanism = experiment.mechanism
        reason = "programs clip the parameters' own gradients, and this mechanism replaces parameters"
        require(not isinstance(mechanism, Reparametrisation), f"job=benchmark, mechanism={mechanism.name}", reason, "Use mechanism=dp_sgd")
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            settings = list(self.settings(experiment, began))
            workers = [stack.enter_context(worker(module, setting)) for module, setting in settings]
            seconds = interleaved(workers, self.rounds, began + (self.limit_s or math.inf))
        facts = [fact for one in workers for fact in one.facts]
        late = [{name: value for name, value in fact.items() if name != "kind"} for fact in facts if fact["kind"] == "left out"]
        return {
            "name": experiment.name,
            "device": next((fact["device"] for fact in facts if fact["kind"] == "rate"), None),
            "cores": os.cpu_count(),
            "versions": _versions(),
            "logical_batch": self.logical_batch,
            "rounds": len(seconds[0]),
            "matrix_rate": matrix_rates(facts, seconds),
            "rows": rows(facts, seconds, self.logical_batch),
            "left_out": [*late, *self._absent()],
        }

    def settings(self, experiment: Experiment, began: float = 0.0) -> Iterator[tuple[str, Setting]]:
        """Returns the processes: the module that makes the programs of each, and what it is to measure. `began`: the monotonic clock's."""
        from dpx.config import recipes

        require(
            experiment.mechanism.name == "dp_sgd",
            f"job=benchmark, mechanism={experiment.mechanism.name}",
            "this job compares the step with independent noise to plain steps",
            "Use mechanism=dp_sgd, or job=benchmark_noise for the cost of other noise",
        )
        require(
            experiment.train.is_all, f"train={experiment.train.kind}", "this job measures steps that train every parameter", "Use train=all"
        )
        dtypes = tuple(self.dtypes) or (experiment.model.dtype,)
        meshes = [recipes.option("mesh", name) for name in self.meshes] or [experiment.mesh]
        variants = [*self.variants, *(peer for peer in self.optional_peers if _why_absent(peer) is None)]
        own = [variant for variant in variants if variant not in PEERS]
        for mesh in meshes:
            for size in self.physical_batches:
                self._require_divides(f"job.physical_batches={size} on mesh={mesh.name}", size * mesh.data * mesh.fsdp)
        until = began + COMPILING * (self.limit_s or math.inf)
        for mesh in meshes if own else ():
            placed = dataclasses.replace(experiment, mesh=mesh)
            sizes = self.physical_batches
            yield "dpx_papers.benchmark.jax_programs", Setting(placed, own, dtypes, self.logical_batch, sizes, until, self.automatic_batch)
        sizes = self.peer_batches or self.physical_batches
        for name, module in (("jax_privacy", "dpx_papers.benchmark.jax_programs"), ("torch", "dpx_papers.benchmark.torch_programs")):
            peers = [variant for variant in variants if variant in PEERS and (variant == "jax_privacy") == (name == "jax_privacy")]
            for variant in peers:
                require_installed(variant)
            if peers:
                require(
                    meshes[0].devices == 1,
                    f"job.variants={peers[0]}",
                    "the other libraries run on one device only",
                    "Put mesh single first in the list",
                )
                require(
                    isinstance(experiment.clip, Flat),
                    f"clip={experiment.clip.kind}",
                    "the other libraries clip the whole gradient vector",
                    "Use clip=flat",
                )
                placed = dataclasses.replace(experiment, mesh=meshes[0])
                yield module, Setting(placed, peers, ("float32",), self.logical_batch, sizes, until)

    def _absent(self) -> list[dict[str, Any]]:
        """Returns rows of the optional peers that are not installed, which say so."""
        reasons = {peer: why for peer in self.optional_peers if (why := _why_absent(peer)) is not None}
        sizes = self.peer_batches or self.physical_batches
        return [
            {"clipping": peer, "dtype": "float32", "physical_batch": size, "why": why} for peer, why in reasons.items() for size in sizes
        ]

    def _require_divides(self, value: str, size: int) -> None:
        fits = 0 < size <= self.logical_batch and self.logical_batch % size == 0
        require(fits, value, f"does not divide job.logical_batch={self.logical_batch}", "Use a divisor of it")


def require_installed(variant: str) -> None:
    """Raises `ConfigError` where a package of this peer is missing."""
    for package in PACKAGES.get(variant, ()):
        require_extra(f"job.variants={variant}", "bench", package)


def _why_absent(peer: str) -> str | None:
    try:
        require_installed(peer)
    except ConfigError as error:
        return error.reason
    return None


def interleaved(workers: Sequence[Worker], rounds: int, until: float = math.inf) -> list[list[float]]:
    """Returns the seconds of every program of every worker in every round.

    One round before warms up. A round, other than the first, does not begin if it would end after `until` (seconds of the monotonic clock).
    """
    calls = [(one, index) for one in workers for index in range(len(one.facts))]
    timed: list[list[float]] = []
    while len(timed) < 2 or (len(timed) <= rounds and time.monotonic() + sum(timed[-1]) < until):
        timed.append([one.seconds(index) for one, index in calls])
    return [list(times) for times in zip(*timed[1:], strict=True)]


def _versions() -> dict[str, str]:
    names = ("jax", "jax-privacy", "torch", "opacus")
    return {name: importlib.metadata.version(name) for name in names if list(importlib.metadata.distributions(name=name))}


def shown(document: dict[str, Any]) -> Table:
    """Returns the rows, best physical batch of each variant first."""
    columns = ("clipping", "dtype", "mesh", "batch", "examples/s", "to autodiff", "to plain", "of products", "FLOPs", "MiB", "collectives")
    table = Table(*columns, "exact")
    for row in sorted(document["rows"], key=lambda row: (row["mesh"], row["dtype"], row["clipping"], -row["examples_per_s"])):
        names = ("ratio_to_autodiff", "ratio_to_plain", "share_of_matrix_rate", "flops_ratio_to_plain")
        ratios = [_number(row[name], ".2f") for name in names]
        collectives = "" if row["collectives"] is None else str(row["collectives"]["per_logical_batch"])
        size = "" if row["temporary_bytes"] is None else f"{row['temporary_bytes'] / 2**20:.0f}"
        exact = {None: "", True: "yes", False: "NO"}[row["is_exact"]] + ("" if row["is_tied"] else " (untied)")
        name, rate = (row["clipping"], row["dtype"], row["mesh"]), f"{row['examples_per_s']:.1f}"
        table.add_row(*name, str(row["physical_batch"]), rate, *ratios, size, collectives, exact)
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
