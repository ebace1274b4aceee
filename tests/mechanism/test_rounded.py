"""Integer sums and noise: how far one example moves them, that claim's divergences, and what a step releases."""

import dataclasses
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, rdp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dpx.claim import statement
from dpx.claim.calibration import Entries, calibrate
from dpx.declaration import ConfigError
from dpx.mechanism import declared_mechanism
from dpx.mechanism.clip import AdaptiveClip
from dpx.mechanism.declared_mechanism import TargetEpsilon
from dpx.mechanism.discrete_gaussian import DiscreteGaussian, grid_noise, to_grid, with_grid_noise
from dpx.mechanism.dp_sgd import DpSgd
from dpx.optimizer import Adam
from dpx.privacy import accounting, events, ledger
from dpx.privacy.declared_privacy import Pld, Privacy, Rdp
from dpx.privacy.events import Release
from dpx.randomness import RootSecret
from dpx.sampler import FixedSize, Poisson, Shuffled
from dpx.statement.statement_records import RunStatement
from dpx.training.dirac import variance_p_value
from dpx.training.step import make_step
from tests.training.conftest import declare

SECRET = RootSecret.from_seed(4)
NORM, HARDENED = 0.1, DiscreteGaussian(grid_bits=10)
N = 5_000


def test_the_spacing_is_a_power_of_two_near_the_declared_fraction_of_the_norm():
    assert HARDENED.spacing(NORM) == 2.0**-14 <= NORM * 2**-10
    assert HARDENED.spacing(2.0) == 2.0**-9


def test_the_sensitivity_holds_under_adversarial_rounding_and_the_norm_alone_does_not():
    size, norm, step = 400, NORM, HARDENED.spacing(NORM)
    # What the others add up to lies just below half a step everywhere, and one example of norm C pushes each coordinate past it.
    others = np.full(size, 0.49 * step, np.float32)
    example = np.full(size, norm / np.sqrt(size), np.float32)
    with_it, without = (to_grid({"w": jnp.asarray(value)}, step)["w"] for value in (others + example, others))
    moved = float(np.linalg.norm(np.asarray(with_it - without, np.float64))) * step
    assert norm * (1 + 1e-6) < moved <= HARDENED.sensitivity(NORM, size)
    rng = np.random.default_rng(0)
    for _ in range(200):
        example = rng.normal(size=size)
        example *= norm / np.linalg.norm(example)
        others = rng.uniform(-50, 50, size) * step
        with_it, without = (np.asarray(to_grid(jnp.asarray(value, jnp.float32), step), np.float64) for value in (others + example, others))
        assert np.linalg.norm(with_it - without) * step <= HARDENED.sensitivity(NORM, size)


def test_the_noise_is_stated_relative_to_the_sensitivity_with_rounding():
    found = HARDENED.deviation(0.5, NORM, 10_000)
    assert isinstance(found, Fraction)
    assert float(found) == pytest.approx(0.5 * (0.1 + 100 * 2.0**-14) * 2**14, rel=1e-9)
    assert found >= Fraction(0.5) * (Fraction(0.1) + 100 * Fraction(2.0**-14)) * 2**14


def renyi(first: np.ndarray, second: np.ndarray, order: int) -> float:
    return math.log(float(np.sum(second * (first / second) ** order))) / (order - 1)


@pytest.mark.parametrize("order", [2, 3, 8])
def test_sampled_integer_noise_has_the_gaussians_divergences_at_integer_orders(order):
    # Far too narrow to be nearly continuous, and still equal: the sums over shifted integers are the same sums.
    deviation, shift, q = 1.5, 2, 0.2
    k = np.arange(-35, 36)
    base = np.exp(-np.square(k) / (2 * deviation**2))
    moved = np.exp(-np.square(k - shift) / (2 * deviation**2))
    base, moved = base / base.sum(), moved / moved.sum()
    mixture = (1 - q) * base + q * moved
    event = events.event(Release(noise_multiplier=deviation / shift, sampling_probability=q, is_discrete=True), "zero_out", "rdp")
    theirs = rdp.RdpAccountant([float(order)], NeighboringRelation.REPLACE_SPECIAL).compose(event)._rdp[0]
    assert renyi(mixture, base, order) == pytest.approx(theirs, rel=1e-9)
    assert renyi(base, mixture, order) <= theirs


def test_only_integer_orders_are_composed():
    charges = [(Release(noise_multiplier=1.0, sampling_probability=0.01, is_discrete=True), 100)]
    plain = [(Release(noise_multiplier=1.0, sampling_probability=0.01), 100)]
    assert accounting.compose(charges, "rdp", orders=[1.5, 2.5, 8]).epsilon(1e-5) == accounting.compose(plain, "rdp", orders=[8.0]).epsilon(
        1e-5
    )
    with pytest.raises(ConfigError, match=r"accountant.orders=\[1.5\]: integer noise has a bound at integer orders only"):
        accounting.compose(charges, "rdp", orders=[1.5])
    for accountant in ("pld", "deterministic"):
        with pytest.raises(ConfigError, match="integer noise has a bound only by Renyi divergences of integer order"):
            accounting.compose(charges, accountant)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"accountant": Pld()}, "accountant=pld"),
        ({"privacy": Privacy(delta=1e-5, adjacency="add_remove")}, "mechanism=discrete_gaussian, privacy.adjacency=add_remove"),
        ({"length_buckets": [8]}, r"mechanism=discrete_gaussian, length_buckets=\[8, 16\]: .*Use length_buckets=null"),
        ({"clip": AdaptiveClip(clipping_norm=1.0)}, "clip=quantile"),
        ({"sampler": Shuffled(assumed="poisson")}, "sampler.assumed=poisson"),
        ({"sampler": FixedSize(), "privacy": Privacy(delta=1e-5, adjacency="replace_one")}, "sampler=fixed_size"),
    ],
)
def test_what_the_proof_does_not_cover_is_refused(change, named):
    experiment = declare(mechanism=DiscreteGaussian(), **change)
    with pytest.raises(ConfigError, match=named) as caught:
        experiment.mechanism.check(experiment)
        declared_mechanism.check(experiment.mechanism, experiment)
    assert "\n" not in str(caught.value)


def test_one_length_moves_nobody():
    for widths in (None, "auto"):
        declared_mechanism.check(DiscreteGaussian(), declare(length_buckets=widths))


def test_any_mechanism_or_sampler_may_need_the_others_to_stay():
    class Rounded(DpSgd):
        needs_fixed_places = True

    class InTurns(Poisson):
        needs_fixed_numbers = True

    class Coarse(DpSgd):
        def summand(self, total, clipping_norm):
            return jax.tree.map(jnp.round, total)

    class Doubled(Coarse):
        needs_fixed_places = False

    size = {"declared_size": N}
    removed = {"privacy": Privacy(delta=1e-5, adjacency="add_remove"), "data": dataclasses.replace(declare().data, **size)}
    for change, named in (
        ({"mechanism": Rounded(), "length_buckets": [8]}, "^mechanism=dp_sgd, length_buckets="),
        ({"mechanism": Coarse(), "length_buckets": [8]}, "^mechanism=dp_sgd, length_buckets="),
        ({"mechanism": Rounded(), **removed}, "^mechanism=dp_sgd, privacy.adjacency=add_remove"),
        ({"sampler": InTurns(), **removed}, "^sampler=poisson, privacy.adjacency=add_remove"),
    ):
        with pytest.raises(ConfigError, match=named):
            calibrate(declare(**change).claim, N)
    # Numbers do not follow from lengths.
    for mechanism in (DpSgd(), Doubled()):
        declared_mechanism.check(mechanism, declare(sampler=InTurns(), length_buckets=[8]))


def test_the_statement_claims_renyi_only_and_names_the_margin():
    experiment = declare(mechanism=DiscreteGaussian(grid_bits=20), noise=TargetEpsilon(epsilon=6.0), accountant=Rdp())
    calibrated = calibrate(experiment.claim, N)
    assert list(calibrated.epsilon) == ["rdp"] and 5.9 < calibrated.epsilon["rdp"] <= 6.0
    assert calibrated.noise_multiplier is not None
    assert Entries.of(experiment.claim).of_step(N, calibrated.noise_multiplier, 10).noise == "discrete_gaussian"
    ((release, _),) = ledger.releases(Entries.of(experiment.claim).planned(calibrated.batch_stages, N, calibrated.noise_multiplier))
    assert release.is_discrete
    stated = statement.build(experiment.claim, None, calibrated)
    assert isinstance(stated, RunStatement)
    facts = stated.mechanism
    assert 0 < facts.grid_margin < 1e-3 and facts.generator_strength_bits == 256
    assert any(
        "before it is rounded" in line
        for line in statement.not_covered(experiment.mechanism, experiment.clipping_method, experiment.data, experiment.privacy)
    )


def test_leaves_steps_and_slices_share_no_noise(monkeypatch):
    from dpx.mechanism import noise

    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 512)
    params = {"a": jnp.zeros((32, 32)), "b": jnp.zeros((32, 32))}
    drawn = [grid_noise(SECRET, step, params, Fraction(1000)) for step in (0, 0, 1)]
    assert np.array_equal(drawn[0]["a"], drawn[1]["a"])
    halves = [drawn[0]["a"][:16], drawn[0]["a"][16:], drawn[0]["b"][:16], drawn[2]["a"][:16]]
    assert np.max(np.abs(np.corrcoef([half.ravel() for half in halves]) - np.eye(4))) < 0.25


@pytest.mark.parametrize(("devices", "parts"), [(2, 4), (4, 2), (5, 2), (8, 1)])
def test_each_process_draws_only_what_its_devices_hold_with_the_bits_of_one(devices, parts, monkeypatch):
    """1,000 columns in 8 parts of 125, whose rows are 2 blocks; a part that lies in two of five devices is drawn for both."""
    from dpx.mechanism import noise

    monkeypatch.setattr(noise, "SLICE_ELEMENTS", 20 * 125)
    params, deviation = {"w": jnp.zeros((40, 1000))}, Fraction(1000)
    whole = np.asarray(grid_noise(SECRET, 0, params, deviation)["w"])
    assert np.max(np.abs(np.corrcoef([whole[:20, :125].ravel(), whole[20:, :125].ravel(), whole[:20, 125:250].ravel()]) - np.eye(3))) < 0.1
    layout = NamedSharding(Mesh(np.asarray(jax.devices()[:devices]), ("fsdp",)), P(None, "fsdp"))
    divided = grid_noise(SECRET, 0, jax.device_put(params, layout), deviation)["w"]
    assert divided.sharding == layout and np.array_equal(divided, whole)
    # As the process that holds the first device alone.
    own_place = lambda shape, sharding, at: at(sharding.devices_indices_map(shape)[jax.devices()[0]])  # noqa: E731
    monkeypatch.setattr(jax, "make_array_from_callback", own_place)
    places, stream = [], RootSecret.stream
    monkeypatch.setattr(RootSecret, "stream", lambda self, *of: places.append(of[3:]) or stream(self, *of))
    own = grid_noise(SECRET, 0, jax.device_put(params, layout), deviation)["w"]
    assert np.array_equal(own, divided.addressable_shards[0].data)
    assert places == [(part, block) for part in range(parts) for block in range(2)]


def test_integers_wrap_around_alike_in_sum_and_noise():
    total, noise = {"w": jnp.asarray([2**31 - 1], jnp.int32)}, {"w": jnp.asarray([5], jnp.int32)}
    _, noisy, squares = with_grid_noise(total, noise, 0.5)
    assert float(noisy["w"][0]) == -(2**30) and float(squares) == 2.5**2


def test_a_step_releases_multiples_of_the_spacing_with_the_stated_variance(micro):
    changes = {"optimizer": Adam(beta1=0.0, beta2=0.0, eps=1.0, weight_decay=0.0), "mechanism": DiscreteGaussian(grid_bits=12)}
    experiment, objective, mechanism = declare(**changes), micro[1], changes["mechanism"]
    step = make_step(experiment.one_step, objective, experiment.mesh.make(), 2, 2)
    state, spacing = step.init(np.zeros(2, np.uint32), None), mechanism.spacing(NORM)
    size = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    deviation = mechanism.deviation(0.5, NORM, size)
    noise = grid_noise(SECRET, 0, state.params, deviation)
    state, metrics = step.finish(state, step.reduce(step.zero(), ()), noise, np.float32(0), np.float32(8), np.float32(0))
    for leaf in jax.tree.leaves(state.moments[0].mu):
        steps = np.asarray(leaf, np.float64) * 8 / spacing
        assert np.array_equal(steps, np.round(steps))
        assert variance_p_value(float(np.sum(steps**2)) / float(deviation) ** 2, leaf.size) > 1e-8
    assert float(metrics["noise_norm"]) == pytest.approx(0.5 * mechanism.sensitivity(NORM, size) * np.sqrt(size) / 8, rel=0.02)
