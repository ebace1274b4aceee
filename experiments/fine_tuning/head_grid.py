"""The head alone, on a grid of batches, steps and rates, by the rules of a private step; for the table that `job=design` reads.

    DPX_DATA=<data> python experiments/fine_tuning/head_grid.py encode <checkpoint folder> <work> [tasks] [--head linear_tanh]
    python experiments/fine_tuning/head_grid.py measure <work> <table.csv> [--replicates 3] [--head linear_tanh] [--tasks ...]

`--head linear` (with the mean over a text's tokens) is the head that transformers cannot load, `linear_tanh` (the first token) the default
of `train=last_layer`; a folder <work> holds the features of one of them. A table that is there is continued, task by task.

`encode` reads every text once, as `train=last_layer` does, through the data, the checkpoint and the task of that job. `measure` trains the
linear head on these features: Poisson draws, the gradient of each row clipped to norm 1, noise once for a step, the expected batch as
divisor, Adam and the schedule of the job, the noise multiplier that dpx solves for. A run takes a second or less instead of a minute,
since the gradient of a linear map has a closed form. Draws and noise come from a seed: these are measurements, and guarantee nothing.

Shape legend: N rows, H features and the constant 1, K classes.
"""

import argparse
import csv
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpx.optimizer.lr_schedule import WarmUpThen
from dpx.privacy import noise_multiplier

# By the name of the head: what pools a text, and the map from its vector to what the last map reads.
HEADS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {"linear": ("mean", lambda x: x), "linear_tanh": ("cls", np.tanh)}
TASKS = {
    "overruling": ["data=overruling"],
    "mrpc": ["data=glue_mrpc"],
    "qnli": ["data=glue_qnli", "data.heldout_fraction=0.1"],
    "sst2": ["data=glue_sst2"],
    # Not in measured.csv: a design's prediction is held against them.
    "mnli": ["data=glue_mnli", "data.heldout_fraction=0.1"],
    "qqp": ["data=glue_qqp", "data.heldout_fraction=0.1"],
}
UNREAD = ("mnli", "qqp")
# At most so many rows of a task are read, spread over its files; of SST-2 parts are used too, since N decides how much noise a step has.
MOST_ROWS, SUBSETS = 16_000, {"sst2": (1000, 4000)}
DELTA, EPSILONS, PASSES = 1e-5, (1.0, 3.0, 8.0), (2, 5, 20)
SHARES, PATHS = (1 / 32, 1 / 8, 1 / 2), (0.3, 1.0, 3.0, 10.0)
FIELDS = ["task", "size", "trained", "epsilon", "delta", "passes", "batch", "steps", "rate", "replicate"]
FIELDS += ["noise_multiplier", "snr", "accuracy", "rows", "baseline", "head"]


@dataclasses.dataclass(frozen=True)
class Task:
    """Features [N,H] and labels [N] to train on and to judge by."""

    name: str
    train: tuple[np.ndarray, np.ndarray]
    judge: tuple[np.ndarray, np.ndarray]

    @property
    def baseline(self) -> float:
        """How often the most frequent class is the right one."""
        return float(np.bincount(self.judge[1]).max() / len(self.judge[1]))


def encode(checkpoint: Path, work: Path, task: str, head: str, most: int) -> None:
    import jax

    from dpx.config import build, recipes
    from dpx.data.prepare import prepare
    from dpx.init.start import start
    from dpx.task.objective import objective as objective_of
    from dpx.training.evaluation import BATCH_ROWS, in_batches

    given = [
        "init=hf",
        f"init.path={checkpoint}",
        "init.provenance=public",
        "model=hf",
        f"model.pool={HEADS[head][0]}",
        f"model.classifier={head}",
    ]
    given += ["task=classification", "train=last_layer", "data.sequence_length=64", "length_buckets=auto", *TASKS[task]]
    experiment, _ = build(recipes.compose([*given, f"data.directory={work / 'data'}"]))
    store = prepare(experiment.data, experiment.privacy)
    loaded = start(experiment.init, experiment.receiver, store, set()).parameters
    objective: Any = objective_of(experiment.model, experiment.task, experiment.vocabulary_size, store.manifest)
    key = np.zeros(2, np.uint32)
    read = jax.jit(lambda params, rows: objective.features(params, objective.batch(key, rows)).astype(np.float32))
    arrays = {}
    splits: tuple[tuple[str, Any], ...] = (("train", "protected"), ("judge", "test" if "test" in store.manifest.splits else "heldout"))
    for name, split in splits:
        features, labels = [], []
        count = min(store.manifest.rows[split], most)
        for rows, is_padding_B in in_batches(store, split, count, BATCH_ROWS, experiment.widths):
            features.append(np.asarray(read(loaded, rows))[~is_padding_B])
            labels.append(np.asarray(rows["label"])[~is_padding_B])
        # Batches are sorted by length: in another order, a part of the rows is a sample.
        order = np.random.default_rng(0).permutation(sum(map(len, labels)))
        arrays |= {f"{name}_features": np.concatenate(features)[order], f"{name}_labels": np.concatenate(labels)[order]}
    np.savez(work / f"{task}.npz", **arrays)
    print(f"{task}: {len(arrays['train_labels']):,} rows to train on, {len(arrays['judge_labels']):,} to judge by", flush=True)


def tasks(work: Path, head: str, names: Sequence[str]) -> Iterator[Task]:
    """Tasks that were encoded, and parts of them, as the last map of `head` reads them."""
    for name in names:
        if not (work / f"{name}.npz").is_file():
            continue
        with np.load(work / f"{name}.npz") as arrays:
            sides = [(with_constant(HEADS[head][1](arrays[f"{side}_features"])), arrays[f"{side}_labels"]) for side in ("train", "judge")]
        count = len(sides[0][1])
        for size in (*(size for size in SUBSETS.get(name, ()) if size < count), count):
            yield Task(name, (sides[0][0][:size], sides[0][1][:size]), sides[1])


def with_constant(features_NH: np.ndarray) -> np.ndarray:
    return np.concatenate([features_NH, np.ones((len(features_NH), 1), np.float32)], axis=1)


def clipped_sum(params_HK: np.ndarray, features_BH: np.ndarray, labels_B: np.ndarray) -> np.ndarray:
    """The sum of cross-entropy's gradients, each clipped to norm 1: the outer product of features and errors has the product's norm."""
    logits_BK = features_BH @ params_HK
    errors_BK = np.exp(logits_BK - logits_BK.max(1, keepdims=True))
    errors_BK /= errors_BK.sum(1, keepdims=True)
    errors_BK[np.arange(len(labels_B)), labels_B] -= 1
    norms_B = np.linalg.norm(features_BH, axis=1) * np.linalg.norm(errors_BK, axis=1)
    return features_BH.T @ (errors_BK / np.maximum(norms_B, 1.0)[:, None])


def train(task: Task, share: float, steps: int, rate: float, sigma: float, seed: int) -> tuple[float, float]:
    """Returns (accuracy, median gradient-SNR of the steps) of one run; each step draws each row with the probability `share`."""
    random, (features_NH, labels_N) = np.random.default_rng(seed), task.train
    batch = share * len(labels_N)
    schedule = WarmUpThen(learning_rate=rate, warmup_steps=max(1, round(steps / 10)), decay="linear")
    shape = (features_NH.shape[1], int(max(labels_N.max(), task.judge[1].max())) + 1)
    params_HK = random.normal(0, 0.02, shape).astype(np.float32)
    params_HK[-1] = 0
    # conf/optimizer/adam.yaml; the bias is not decayed.
    mean_HK, square_HK, decay_H1 = np.zeros(shape), np.zeros(shape), np.append(np.full(shape[0] - 1, 0.1), 0.0)[:, None]
    ratios = []
    for step in range(steps):
        drawn = random.random(len(labels_N)) < share
        total_HK = clipped_sum(params_HK, features_NH[drawn], labels_N[drawn])
        noise_HK = random.normal(0, 1, shape) * sigma
        ratios.append(float(np.linalg.norm(total_HK) / max(np.linalg.norm(noise_HK), 1e-30)))
        gradient_HK = (total_HK + noise_HK) / batch
        mean_HK = 0.9 * mean_HK + 0.1 * gradient_HK
        square_HK = 0.98 * square_HK + 0.02 * gradient_HK**2
        direction = mean_HK / (1 - 0.9 ** (step + 1)) / (np.sqrt(square_HK / (1 - 0.98 ** (step + 1))) + 1e-11)
        params_HK = (params_HK - schedule.at(step, steps) * (direction + decay_H1 * params_HK)).astype(np.float32)
    features_NH, labels_N = task.judge
    return float((np.argmax(features_NH @ params_HK, 1) == labels_N).mean()), float(np.median(ratios))


def grid() -> Iterator[tuple[float, int, float, int, float]]:
    """Yields (epsilon, passes, share, steps, path): 12 points for each epsilon and number of passes.

    A path is how far Adam moves a parameter at most at a rate that falls linearly to zero: half of the rate times the steps.
    """
    for epsilon, passes, share, path in itertools.product(EPSILONS, PASSES, SHARES, PATHS):
        yield epsilon, passes, share, round(passes / share), path


def measure(task: Task, replicates: int, head: str) -> Iterator[dict[str, str]]:
    size = len(task.train[1])
    for epsilon, passes, share, steps, path in grid():
        sigma, rate = noise_multiplier([(share, steps)], epsilon=epsilon, delta=DELTA), 2 * path / steps
        for replicate in range(1, replicates + 1):
            accuracy, snr = train(task, share, steps, rate, sigma, replicate)
            values = (task.name, size, "last_layer", f"{epsilon:g}", f"{DELTA:g}", passes, round(share * size), steps, f"{rate:.4g}")
            values += (
                replicate,
                f"{sigma:.4f}",
                f"{snr:.4g}",
                f"{accuracy:.4f}",
                len(task.judge[1]),
                f"{task.baseline:.4f}",
                f"{HEADS[head][0]} {head}",
            )
            yield dict(zip(FIELDS, map(str, values), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    encoding = commands.add_parser("encode")
    encoding.add_argument("checkpoint", type=Path)
    encoding.add_argument("work", type=Path)
    encoding.add_argument("tasks", nargs="*", default=[name for name in TASKS if name not in UNREAD])
    encoding.add_argument("--most", type=int, default=MOST_ROWS, help="rows of a split that are read")
    measuring = commands.add_parser("measure")
    measuring.add_argument("work", type=Path)
    measuring.add_argument("table", type=Path)
    measuring.add_argument("--replicates", type=int, default=3)
    measuring.add_argument("--tasks", nargs="*", default=[name for name in TASKS if name not in UNREAD])
    for one in (encoding, measuring):
        one.add_argument("--head", choices=list(HEADS), default="linear_tanh")
    given = parser.parse_args()
    if given.command == "encode":
        given.work.mkdir(parents=True, exist_ok=True)
        for task in given.tasks:
            encode(given.checkpoint, given.work, task, given.head, given.most)
        return
    there = list(csv.DictReader(given.table.open(newline=""))) if given.table.is_file() else []
    done = {(row["task"], row["size"]) for row in there}
    with given.table.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if not there:
            writer.writeheader()
        for task in tasks(given.work, given.head, given.tasks):
            if (task.name, str(len(task.train[1]))) not in done:
                writer.writerows(list(measure(task, given.replicates, given.head)))
                file.flush()


if __name__ == "__main__":
    main()
