"""Made-up runs: as rows would tell them, and as folders a run would leave."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dpx.files.results import Results, write_results
from dpx.files.run_folder import RunFolder
from dpx.pages.analysis_tables import Table
from dpx.pages.read_runs import Run
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import NoiseEpoch
from dpx.statement import seals
from dpx.statement.statement_records import AnyRun
from dpx_papers.report import page, paper, rows
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.shape import Verdict
from dpx_papers.report.sizes import FULL, LAPTOP, PREFIX

from ..made_statement import MECHANISM, made_plain, made_statement
from ..sealed import sealed_anew

ACCURACY = "heldout/mlm_accuracy"
EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
# The sizes of laptop/anil_batch_schedule: both constant batches, and the schedule between them.
SMALL, LARGE, RISING = [256], [1024], [256, 448, 640, 832, 1024]


@functools.cache
def declared(name: str) -> paper.Paper:
    """The committed paper.yaml."""
    return paper.read(EXPERIMENTS / name)


def verdict(name: str, number: str, runs: Sequence[Run] = (), size: str = FULL, **tables: list[dict[str, Any]]) -> Verdict:
    """The verdict of a committed item on made-up runs and tables of its analysis, which has that size."""
    (item,) = [one for one in declared(name).items if one.number == number]
    source = PREFIX * (size == LAPTOP) + item.experiment
    found = {source: {table: Table.from_rows(table, rows) for table, rows in tables.items()}}
    printed = rows.read_published(EXPERIMENTS / name / "published.csv")
    evidence = Evidence(Path("nowhere"), runs, printed, found if tables else {})
    return page.verdict(item, evidence)


def rows_by_table(analysis: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows that an analysis makes, by table."""
    return {table.name: table.as_json()["rows"] for table in analysis()}


def run(name: str, accuracy: float, replicate: int = 0, snr: Any = None, curves: Any = None, finals: Any = None, **config: Any) -> Run:
    """A laptop run of 100 steps; `snr(step)` gives its SNR; knobs use `__` for the dot."""
    knobs = {key.replace("__", "."): value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    knobs = {"steps": "100", "mechanism": "DpSgd"} | knobs
    drawn = dict(curves or {})
    if snr is not None:
        drawn["grad/snr"] = tuple((step, float(snr(step))) for step in range(5, 105, 5))
    point = " ".join(f"{key}={value}" for key, value in knobs.items() if key not in ("steps", "mechanism")) or "-"
    facts = {"guarantee": "not_private" if knobs["mechanism"] == "NoPrivacy" else "dp", "epsilon/rdp": "5.36", "delta": "1e-06"}
    facts |= {"noise_multiplier": "0.8", "unit": "row", "adjacency": "zero_out", "accountant": "rdp", "commit": "0123456789ab"}
    measured = {ACCURACY: accuracy, "train/expected_examples": 100.0, "baseline/most_frequent_token": 0.05, **(finals or {})}
    return Run(f"laptop_{name}", f"{name}-{point}-{replicate}", point, replicate, knobs, facts, measured, drawn)


def replicates(name: str, accuracies: list[float], **arguments: Any) -> list[Run]:
    """One run for each accuracy."""
    return [run(name, accuracy, replicate, **arguments) for replicate, accuracy in enumerate(accuracies)]


def sweep(sizes: dict[int, tuple[list[float], float]]) -> list[Run]:
    """A batch sweep: accuracies and SNR level by batch size; SNR falls as 1 / sqrt(step)."""
    found = []
    for size, (accuracies, level) in sizes.items():
        found += replicates(
            "anil_batch_sweep", accuracies, snr=lambda step, level=level: level / math.sqrt(step), batch_schedule__size=size
        )
    return found


def schedule(accuracies: list[float], slope: float = 0.1) -> list[Run]:
    """Figure 4: small 0.20, large 0.30, and the schedule at `accuracies`, its log SNR falling with `slope`."""
    found = []
    for sizes, values, fall, examples in ((SMALL, [0.19, 0.2, 0.21], 0.9, 100.0), (LARGE, [0.299, 0.3, 0.301], 0.8, 400.0)):
        found += _scheduled(sizes, values, fall, examples)
    return found + _scheduled(RISING, accuracies, slope, 340.0)


def _scheduled(sizes: list[int], values: list[float], fall: float, examples: float) -> list[Run]:
    """Accuracy rises in a straight line to its last value."""
    finals = {"train/expected_examples": examples}
    found = replicates(
        "anil_batch_schedule",
        values,
        snr=lambda step: step**-fall,
        finals=finals,
        batch_schedule__sizes=sizes,
        batch_schedule__stage_steps=10,
    )
    for one, accuracy in zip(found, values, strict=True):
        one.curves[ACCURACY] = tuple((step, accuracy * step / 100) for step in range(10, 101, 10))
    return found


def folder(
    outputs: Path, name: str, plain: dict[str, Any], accuracy: float, steps: int = 100, private: bool = True, corpus: str = "0" * 64
) -> Path:
    """What a finished run of `steps` steps leaves behind; `plain` is its resolved config."""
    made = outputs / f"{name}-{hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]}"
    (made / "release").mkdir(parents=True)
    (made / "private").mkdir()
    (made / "release" / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(plain)))
    with contextlib.closing(Ledger(made / "private" / "ledger")) as entered:
        fresh = NoiseEpoch(
            number=0, name="0", from_step=0, start=None, secret_tag="", secret_place=None, fingerprint={"data": corpus}, why=""
        )
        entered.open_noise_epoch(fresh)
        seals.write_statement(RunFolder(made), entered, _claim(entered, private))
    sealed_anew(made)
    baselines = {"most_frequent_token": 0.05, "untrained": 0.0}
    results = Results(steps=steps, metric="mlm_accuracy", heldout={"loss": 5.0, "mlm_accuracy": accuracy}, baselines=baselines)
    write_results(made / "private", results)
    (made / "private" / "status.json").write_text(json.dumps({"train": {"state": "finished", "commit": "0123456789ab", "seconds": 9.0}}))
    (made / "private" / "metrics.jsonl").write_text(
        "".join(json.dumps(_line(step, accuracy, private)) + "\n" for step in range(1, steps + 1))
    )
    return made


def _claim(entered: Ledger, private: bool) -> AnyRun:
    assumed = ("the vocabulary is fitted on documents of the public split, which are not protected",)
    mechanism = dataclasses.replace(MECHANISM, noise_multiplier=0.8)
    made = made_statement(entered, delta=1e-6, epsilon={"rdp": 5.36}, mechanism=mechanism, assumptions=assumed)
    return made if private else made_plain(entered)


def _line(step: int, accuracy: float, private: bool) -> dict[str, Any]:
    line = {"step": step, "train/examples": 60, "train/expected_batch_size": 64, "train/examples_per_s": 1.0 if step < 3 else 200.0}
    line |= {
        "grad/norm": 0.5,
        "weights/embeddings/word": 3.0,
        "weights/layers/up/kernel/layer_00": 4.0,
        "weights/layers/up/bias/layer_00": 9.0,
    }
    if private:
        line |= {"grad/snr": 1 / step, "grad/example_norm": 2.0, "grad/clipped_fraction": 1.0}
    if step % 50 == 0:
        line |= {"heldout/mlm_accuracy": accuracy * step / 100, "heldout/loss": 6.0}
    return line
