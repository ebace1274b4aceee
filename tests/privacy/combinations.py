"""Random declarations of a private run, and what any statement about one must satisfy.

`SUPPORTED` is written out by hand rather than read from the table of events: an entry lost or gained there shows here.
"""

import dataclasses
import json
import math
import random
from typing import Literal

from dp_accounting.pld import privacy_loss_distribution

from dpx.claim import calibration, statement
from dpx.claim.calibration import calibrate
from dpx.config.declared_audit import Canaries, NoCanaries, Primary
from dpx.data.declared_data import Vocabulary
from dpx.data.protected_units import unit_facts
from dpx.declaration import ConfigError
from dpx.files.records import to_json
from dpx.mechanism.banded import Banded
from dpx.mechanism.clip import AdaptiveClip, Flat, Normalised, PerLayer
from dpx.mechanism.declared_mechanism import Multiplier, NoiseBatchRatio, TargetEpsilon
from dpx.mechanism.discrete_gaussian import DiscreteGaussian
from dpx.mechanism.dp_sgd import DpSgd, NoPrivacy
from dpx.mechanism.telemetry import ReleasedTelemetry, SecretTelemetry
from dpx.privacy import accounting, closed_form, ledger
from dpx.privacy.declared_privacy import Deterministic as WithoutAmplification
from dpx.privacy.declared_privacy import GdpClt, Pld, Privacy, Rdp
from dpx.privacy.ledger import Ledger
from dpx.privacy.segments import IN_EPOCHS, steps_per_epoch
from dpx.sampler import (
    BallsInBins,
    CyclicPoisson,
    Deterministic,
    FixedSize,
    Poisson,
    RandomAllocation,
    Shuffled,
    TruncatedPoisson,
    batch_schedule,
)
from dpx.sampler.batch_schedule import Constant, Linear, Staged

# (sampler, adjacency) -> accountants that have a proof for it.
SUPPORTED = {
    ("poisson", "zero_out"): {"pld", "rdp", "deterministic"},
    ("poisson", "add_remove"): {"pld", "rdp", "deterministic"},
    ("poisson", "replace_one"): {"pld", "deterministic"},
    ("group", "zero_out"): {"pld", "deterministic"},
    ("group", "add_remove"): {"pld", "deterministic"},
    ("truncated_poisson", "zero_out"): {"pld", "deterministic"},
    ("truncated_poisson", "replace_one"): {"deterministic"},
    ("fixed_size", "zero_out"): {"deterministic"},
    ("fixed_size", "replace_one"): {"rdp", "deterministic"},
    **{(name, adjacency): {"pld", "rdp", "deterministic"} for name in IN_EPOCHS for adjacency in ("zero_out", "replace_one")},
    # A blanked text moves no sum by more than a blanked row; rows released one by one protect the text alone.
    ("poisson", "zero_out_text"): {"pld", "rdp", "deterministic"},
    ("group", "zero_out_text"): {"pld", "deterministic"},
    ("truncated_poisson", "zero_out_text"): {"pld", "deterministic"},
    ("fixed_size", "zero_out_text"): {"deterministic"},
    **{(name, "zero_out_text"): {"pld", "rdp", "deterministic"} for name in IN_EPOCHS},
    ("slot_revealed", "zero_out_text"): {"pld", "deterministic"},
    **{("random_allocation", name): {"pld", "rdp", "deterministic"} for name in ("zero_out", "zero_out_text", "add_remove")},
    ("random_allocation", "replace_one"): {"deterministic"},
}

Unit = tuple[Literal["row", "document"], int, Literal["group", "sample_units"]]
UNITS: tuple[Unit, ...] = (("row", 1, "group"), ("document", 1, "group"), ("document", 3, "group"), ("document", 3, "sample_units"))
# A coarse grid of privacy losses is sound and quick; what is checked here does not depend on it.
COARSE = 5e-3
CYCLE = 4
DATA = [{}, {"declared_size": None}, {"vocabulary": "protected"}]


def choices(size, steps):
    """What a combination is drawn from, for data of `size` rows and runs of `steps` steps."""
    return {
        "sampler": [
            Poisson(),
            TruncatedPoisson(),
            CyclicPoisson(cycle=CYCLE),
            RandomAllocation(),
            *(kind(assumed=assumed) for kind in (FixedSize, Shuffled, Deterministic, BallsInBins) for assumed in (None, "poisson")),
        ],
        "accountant": [kind(value_discretization_interval=COARSE) for kind in (Pld, Rdp, WithoutAmplification, GdpClt)],
        "mechanism": [DpSgd()] * 6 + [NoPrivacy(), DiscreteGaussian(), Banded(bands=3)],
        "clip": [Flat(clipping_norm=0.1), Normalised(clipping_norm=1.0), PerLayer(clipping_norm=0.5), AdaptiveClip(clipping_norm=0.2)],
        "telemetry": [SecretTelemetry()] * 3 + [ReleasedTelemetry()],
        "audit": [NoCanaries()] * 3 + [Canaries(gradients=20, sequences=4, primary=Primary(guesses=4))],
        "noise": [
            Multiplier(noise_multiplier=0.8),
            Multiplier(noise_multiplier=5.0),
            NoiseBatchRatio(noise_batch_ratio=0.05),
            TargetEpsilon(epsilon=3.0),
        ],
        "batch_schedule": [
            Constant(size=size // 20),
            Constant(size=size),
            Staged(sizes=[size // 50, size // 20], stage_steps=max(1, steps // 3)),
            Linear(start=size // 100 + 1, end=size // 20, ramp_steps=2 * steps // 3),
        ],
        "privacy": [
            Privacy(delta=delta, adjacency=adjacency, unit=unit, rows_per_unit_max=rows, unit_mode=mode, allow_large_delta=delta > 1e-3)
            for delta in (1e-5, 1e-2)
            for adjacency in ("zero_out", "add_remove", "replace_one")
            for unit, rows, mode in UNITS
        ],
        "seed": [None] * 5 + [1],
    }


def drawn(base, seed, size_of, steps):
    """Combination number `seed`; `size_of(data, privacy)` is how many protected things it draws from.

    `ConfigError` where two declarations contradict each other.
    """
    choose = random.Random(seed)
    places = {name: choose.randrange(len(options)) for name, options in choices(1000, steps).items()}
    facts = choose.choice(DATA)
    data = base.data
    if "vocabulary" in facts:
        data = dataclasses.replace(data, vocabulary=Vocabulary(size=data.vocabulary.size, fit_on="protected"))
    privacy = choices(1000, steps)["privacy"][places["privacy"]]
    size = size_of(data, privacy)
    if "declared_size" in facts:
        data = dataclasses.replace(data, declared_size=size)
    changes = {name: options[places[name]] for name, options in choices(size, steps).items()}
    return dataclasses.replace(base, name=f"combination_{seed}", steps=steps, data=data, **changes)


def entered(experiment, calibrated, path):
    """`(statement, ledger's runs)` of `experiment` with every step entered and nothing trained."""
    if calibrated.noise_multiplier is None:
        return to_json(statement.build(experiment.claim, None, calibrated)), []
    with_steps = Ledger(path)
    with_steps.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(experiment.steps):
        batch = experiment.batch_schedule.at(step)
        stretch = batch_schedule.stretch_of(experiment.batch_schedule, step)
        entries = calibration.Entries.of(experiment.claim)
        with_steps.append(step, entries.of_step(calibrated.size, calibrated.noise_multiplier, batch, stretch=stretch))
    return to_json(statement.build(experiment.claim, None, calibrated, with_steps)), with_steps.segments()


def is_one_line(refusal):
    text = str(refusal)
    return isinstance(refusal, ConfigError) and "\n" not in text and len(text) < 400 and bool(refusal.fix)


def check(experiment, calibrated, document, runs):
    """Everything in `document` follows from `runs`, what the ledger says ran."""
    assert json.loads(json.dumps(document, allow_nan=False))["guarantee"] in ("dp", "none", "not_private")
    assert (document["guarantee"] == "dp") == (not document["reasons"])
    assert bool(document["epsilon"]) == (document["guarantee"] == "dp")
    if document["guarantee"] == "not_private":
        return
    assert document["spent"]["epsilon"] == document["planned"]["epsilon"]
    unsupported = {item["name"] for item in document["unsupported"]}
    assert ("epsilon/gdp_clt" in unsupported) == isinstance(experiment.accountant, GdpClt)
    assert ("epsilon/pld/poisson" in unsupported) == (experiment.sampler.assumed is not None)
    _check_epsilon(experiment, document, ledger.releases(runs))
    if isinstance(experiment.noise, TargetEpsilon) and experiment.sampler.assumed is None:
        own = calibration.accountant_of(experiment.accountant)[0]
        assert calibrated.epsilon[own] <= experiment.noise.epsilon


def _check_epsilon(experiment, document, charges):
    """Each value is allowed for the sampler that ran, is the ledger's own recomputation, and lies above what no proof can go below."""
    sampler, privacy = experiment.sampler.name, experiment.privacy
    is_group = privacy.unit_mode == "group" and privacy.rows_per_unit_max > 1
    kind = "group" if sampler == "poisson" and is_group else "poisson" if sampler == "cyclic_poisson" else str(sampler)
    assert {release.kind for release, _ in charges} == {kind}
    on_a_grid = isinstance(experiment.mechanism, DiscreteGaussian)
    assert document["epsilon"].keys() <= SUPPORTED[(kind, privacy.adjacency)] & ({"rdp"} if on_a_grid else {"pld", "rdp", "deterministic"})
    floor = _floor(experiment, document)
    for name, value in document["epsilon"].items():
        found = accounting.compose(accounting.bucketed(charges), name, privacy.adjacency, coarse=COARSE).epsilon(privacy.delta)
        assert value == accounting.finite(found)
        assert value is None or value >= floor, (name, value, floor)


def _floor(experiment, document):
    """A lower bound on the true epsilon, from the declaration and dp-accounting's optimistic rounding alone."""
    sigma, delta, size = document["mechanism"]["noise_multiplier"], document["delta"], document["declared_size"]
    rates = [experiment.batch_schedule.at(step) / size for step in range(experiment.steps)]
    if isinstance(experiment.sampler, CyclicPoisson):
        # Row 0 is of the group that starts, so it comes round first.
        rates = [min(1, CYCLE * rate) for rate in rates[::CYCLE]]
    if experiment.sampler.name in IN_EPOCHS:
        begun = math.ceil(experiment.steps / steps_per_epoch(rates[0]))
        return closed_form.epsilon(math.sqrt(begun) / sigma, delta) * (1 - 1e-6)
    if isinstance(experiment.sampler, RandomAllocation):
        # The sum over all steps of a whole epoch shows a unit as one Gaussian release does, with as many times the variance.
        whole = 0.0
        for batch, steps in batch_schedule.stages(experiment.batch_schedule, experiment.steps):
            length = steps_per_epoch(batch / size)
            whole += steps // length / (length * sigma**2)
        return closed_form.epsilon(math.sqrt(whole), delta) * (1 - 1e-6) if whole else 0.0
    least = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=min(rates), value_discretization_interval=1e-2, pessimistic_estimate=False
    )
    return least.self_compose(len(rates)).get_epsilon_for_delta(delta)


def held_to(base, seed, path, size=1_000, steps=12):
    """Whether combination `seed` stands; it is checked if it does, and must be refused in one line if not."""
    try:
        experiment = drawn(base, seed, lambda *_: size, steps)
        calibrated = calibrate(experiment.claim, size)
    except ConfigError as refusal:
        assert is_one_line(refusal)
        return False
    # What calibrates may run, so nothing is refused from here on.
    check(experiment, calibrated, *entered(experiment, calibrated, path))
    return True
