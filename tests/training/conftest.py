"""A micro model, rows made up for it, and a declaration around them."""

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf

from dpx.clipping import ClippingMethod
from dpx.config.experiment import Experiment, Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.files.run_folder import RunFolder
from dpx.mechanism.clip import Flat
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.mechanism.dp_sgd import DpSgd
from dpx.models.shape import Bert
from dpx.optimizer import Adam
from dpx.optimizer.lr_schedule import WarmUpThen
from dpx.privacy.declared_privacy import Privacy, Rdp
from dpx.processes.mesh import Mesh
from dpx.sampler import Poisson
from dpx.sampler.batch_schedule import Constant
from dpx.statement import seals
from dpx.task.declared_task import MaskedLanguageModel
from dpx.task.mlm import Special
from dpx.task.objective import objective
from dpx.training.opening import open_run

from ..processes import WIDTH
from . import sharing

VOCABULARY = 64
LENGTH = 16


def declare(**changes) -> Experiment:
    """A micro experiment; keywords replace fields."""
    fields = {
        "name": "micro",
        "steps": 4,
        "model": Bert(name="micro", layers=1, width=32, heads=2, feed_forward=64, positions=32),
        "task": MaskedLanguageModel(next_sentence=True, max_masked_positions=4),
        "data": Data(
            name="synthetic",
            source=Synthetic(documents=10, words_per_document=50, states=8),
            vocabulary=Vocabulary(size=VOCABULARY),
            sequence_length=LENGTH,
        ),
        "privacy": Privacy(delta=1e-4),
        "sampler": Poisson(),
        "batch_schedule": Constant(size=10),
        "mechanism": DpSgd(),
        "clip": Flat(clipping_norm=0.1),
        "noise": Multiplier(noise_multiplier=0.5),
        "clipping_method": ClippingMethod(name="vmap"),
        "accountant": Rdp(value_discretization_interval=WIDTH),
        "optimizer": Adam(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.01),
        "lr_schedule": WarmUpThen(learning_rate=1e-2, warmup_steps=0, decay="constant"),
        "mesh": Mesh(name="single", flops_per_s=1e10, memory_bytes=1 << 30),
        "schedule": Schedule(),
        "microbatch": 4,
    }
    return Experiment(**(fields | changes))


def as_yaml(experiment: Experiment) -> str:
    """The config that builds into a declared experiment."""

    def node(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [node(item) for item in value]
        if not dataclasses.is_dataclass(value):
            return value
        fields = {field.name: node(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields if isinstance(value, Experiment) else {"_target_": f"{type(value).__module__}.{type(value).__qualname__}"} | fields

    return OmegaConf.to_yaml(OmegaConf.create(node(experiment) | {"job": {"_target_": "dpx.job.train.Train"}}))


@contextlib.contextmanager
def opened(experiment: Experiment, folder: RunFolder):
    """A run that is open in `folder`, which keeps its config as `job=train` does."""
    folder = dataclasses.replace(folder, config_yaml=as_yaml(experiment))
    with folder.claimed(), open_run(experiment, folder) as run:
        seals.write_config(folder, run.ledger)
        yield run


def make_rows(count: int, first_record: int = 0) -> dict[str, np.ndarray]:
    """Rows with padding and repeated words: [CLS] A [SEP] B [SEP]."""
    rng = np.random.default_rng(first_record)
    tokens = rng.integers(5, 20, (count, LENGTH)).astype(np.int32)
    length = rng.integers(8, LENGTH + 1, count).astype(np.int32)
    start = (length // 2).astype(np.int32)
    tokens[:, 0] = 2
    tokens[np.arange(count), start - 1] = 3
    tokens[np.arange(count), length - 1] = 3
    tokens[np.arange(LENGTH)[None] >= length[:, None]] = 0
    record = np.arange(first_record, first_record + count, dtype=np.int32)
    return {
        "tokens": tokens,
        "segment_start": start,
        "length": length,
        "is_next": rng.integers(0, 2, count).astype(np.int32),
        "record": record,
    }


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with sharing.shared_programs():
        yield


@pytest.fixture(scope="session")
def micro():
    experiment = declare()
    return experiment, objective(experiment.model, experiment.task, VOCABULARY, Special(0, 1, 2, 3, 4))
