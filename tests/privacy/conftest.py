"""A small experiment that privacy tests vary field by field, and a separate calibration cache for them."""

import dataclasses

import pytest

from dpx.clipping import ClippingMethod
from dpx.config.experiment import Experiment, Schedule
from dpx.data.declared_data import Data, Embedded, Vocabulary
from dpx.mechanism.clip import Flat
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.mechanism.dp_sgd import DpSgd
from dpx.models.shape import Bert
from dpx.optimizer import Adam
from dpx.optimizer.lr_schedule import WarmUpThen
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.processes.mesh import Mesh
from dpx.sampler import Poisson
from dpx.sampler.batch_schedule import Constant
from dpx.task.declared_task import MaskedLanguageModel

SMALL = Experiment(
    name="small",
    steps=20,
    model=Bert(name="micro", layers=2, width=32, heads=2, feed_forward=64, positions=64),
    task=MaskedLanguageModel(next_sentence=False),
    data=Data(name="embedded", source=Embedded(), vocabulary=Vocabulary(size=500), sequence_length=32),
    privacy=Privacy(delta=1e-6),
    sampler=Poisson(),
    batch_schedule=Constant(size=64),
    mechanism=DpSgd(),
    clip=Flat(clipping_norm=0.5),
    noise=Multiplier(noise_multiplier=1.0),
    clipping_method=ClippingMethod(name="vmap"),
    accountant=Pld(),
    optimizer=Adam(beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0),
    lr_schedule=WarmUpThen(learning_rate=1e-3, warmup_steps=0, decay="constant"),
    mesh=Mesh(name="single", flops_per_s=1e9, memory_bytes=1 << 30),
    schedule=Schedule(),
    microbatch=8,
)


@pytest.fixture
def small():
    """`small(privacy={"delta": 1e-5}, steps=3)`: dictionaries change fields of a part, values replace it."""

    def vary(**changes):
        parts = {
            name: dataclasses.replace(getattr(SMALL, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return dataclasses.replace(SMALL, **parts)

    return vary


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
