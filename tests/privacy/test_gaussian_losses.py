"""Losses of the sampled Gaussian are dp-accounting's to the bit, and a declared grid of them only raises epsilon."""

from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation, pld
from dp_accounting.pld import privacy_loss_distribution as theirs
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

from dpx.claim.calibration import calibrate
from dpx.declaration import ConfigError
from dpx.privacy import accounting, cache, gaussian_losses, loss_grid, solve
from dpx.privacy.declared_privacy import Deterministic, GdpClt, Pld, Rdp
from dpx.privacy.events import Release
from tests.composed import composed

RELATIONS = [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.ADD_OR_REMOVE_ONE, NeighboringRelation.REPLACE_ONE]


@pytest.mark.parametrize("adjacency", [AdjacencyType.ADD, AdjacencyType.REMOVE, AdjacencyType.REPLACE])
@pytest.mark.parametrize(("sigma", "q"), [(0.4, 1e-6), (0.7, 0.3), (2.0, 0.01), (9.0, 0.999), (50.0, 1e-4), (1.0, 1.0)])
def test_the_deltas_of_a_grid_are_those_of_dp_accounting_to_the_bit(adjacency, sigma, q):
    ours, reference = (
        kind(sigma, sampling_prob=q, adjacency_type=adjacency) for kind in (gaussian_losses.GaussianLosses, GaussianPrivacyLoss)
    )
    bounds = reference.connect_dots_bounds()
    assert bounds.epsilon_lower is not None and bounds.epsilon_upper is not None
    step = (bounds.epsilon_upper - bounds.epsilon_lower) / 2000
    # A little beyond what losses there are, and with the one where their formula has another form.
    losses_P: Any = np.append(np.arange(bounds.epsilon_lower - 3 * step, bounds.epsilon_upper + 3 * step, step), 0.0)
    np.testing.assert_array_equal(ours.get_delta_for_epsilon(losses_P), reference.get_delta_for_epsilon(losses_P))
    assert ours.get_delta_for_epsilon(0.1) == reference.get_delta_for_epsilon(0.1)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("sigma", "count"), [(0.6, 1), (40.0, 900)])
def test_releases_of_everyone_compose_as_in_dp_accounting_to_the_bit(relation, sigma, count):
    event = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), count)
    ours, reference = accounting._Losses(relation, 2e-3, 0.0).compose(event), pld.PLDAccountant(relation, 2e-3).compose(event)
    for mine, other in zip(_masses(ours._pld), _masses(reference._pld), strict=True):
        np.testing.assert_array_equal(mine, other)


def _masses(distribution: Any) -> list[np.ndarray]:
    pmfs = [distribution._pmf_remove, *([] if distribution._symmetric else [distribution._pmf_add])]
    return [np.append(pmf.to_dense_pmf()._probs, [pmf._infinity_mass, pmf.to_dense_pmf()._lower_loss]) for pmf in pmfs]


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize(("sigma", "q"), [(0.7, 0.3), (2.0, 0.01), (1.0, 1.0), (300.0, 1.0)])
# A few points are a dictionary in dp-accounting, one point alone has a formula of its own.
@pytest.mark.parametrize("interval", [2e-3, 0.1, 50.0])
def test_distributions_are_those_of_dp_accounting_to_the_bit(relation, sigma, q, interval):
    ours = gaussian_losses.of_poisson_sample(sigma, q, interval, relation)
    reference = theirs.from_gaussian_mechanism(
        sigma, value_discretization_interval=interval, sampling_prob=q, neighboring_relation=relation
    )
    assert type(ours._pmf_remove) is type(reference._pmf_remove)
    for mine, other in zip(_masses(ours), _masses(reference), strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("relation", RELATIONS[:2])
@pytest.mark.parametrize("cap", [12, 1000])
def test_truncated_samples_are_those_of_dp_accounting_to_the_bit(relation, cap):
    ours = gaussian_losses.of_truncated_sample(1.0, 0.01, 1000, cap, 2e-3, relation)
    reference = theirs.from_truncated_subsampled_gaussian_mechanism(
        1000, 0.01, cap, 1.0, value_discretization_interval=2e-3, neighboring_relation=relation
    )
    for mine, other in zip(_masses(ours), _masses(reference), strict=True):
        np.testing.assert_array_equal(mine, other)


CHARGES = [
    [(Release(noise_multiplier=0.8, sampling_probability=0.02), 200)],
    [(Release(noise_multiplier=3.0, sampling_probability=0.2), 50), (Release(noise_multiplier=1.0, sampling_probability=0.001), 500)],
]


# Of one release under each relation, and of several; several under the dearer relation are slow.
@pytest.mark.parametrize(
    ("charges", "adjacency"),
    [
        (CHARGES[0], "zero_out"),
        pytest.param(CHARGES[0], "replace_one", marks=pytest.mark.slow),
        pytest.param(CHARGES[1], "zero_out", marks=pytest.mark.slow),
        (CHARGES[1], "replace_one"),
    ],
)
def test_a_coarser_grid_only_raises_epsilon_and_delta(charges, adjacency):
    grids = [None, 1e-5, 3.3e-4, 1e-3, 5e-3, 2e-2]
    compositions = [accounting.compose(charges, adjacency=adjacency, coarse=grid) for grid in grids]
    epsilons = [one.epsilon(1e-6) for one in compositions]
    assert epsilons[0] == epsilons[1] and min(epsilons) == epsilons[0] and epsilons[-1] > epsilons[0]
    assert min(one.delta(0.5) for one in compositions) == compositions[0].delta(0.5)


def test_a_declared_grid_is_a_whole_multiple_of_the_default_one():
    own = loss_grid.grid(CHARGES[0])
    assert loss_grid.coarser(CHARGES[0]) == loss_grid.coarser(CHARGES[0], at_most=own / 2) == own
    assert loss_grid.coarser(CHARGES[0], at_most=3.9 * own) == 3 * own
    times = loss_grid.multiple(CHARGES[0], at_most=4.1 * own) / (4 * own)
    assert times > 1 and times == pytest.approx(round(times), rel=1e-12)


def test_noise_is_solved_on_the_declared_grid_and_stored_apart(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "folder", lambda: tmp_path)
    fine, coarse = (solve.solve(CHARGES[0], epsilon=2.0, delta=1e-6, coarse=grid) for grid in (None, 2e-2))
    assert coarse > fine
    assert accounting.compose(solve.scaled(CHARGES[0], coarse), coarse=2e-2).epsilon(1e-6) <= 2.0
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    # Each is found again under its own name.
    assert [solve.solve(CHARGES[0], epsilon=2.0, delta=1e-6, coarse=grid) for grid in (None, 2e-2)] == [fine, coarse]


@pytest.mark.parametrize("accountant", [Pld, Rdp, Deterministic, GdpClt])
@pytest.mark.parametrize("width", [0.0, -1e-3, 1.5, float("nan")])
def test_a_width_that_is_no_width_is_refused(accountant, width):
    with pytest.raises(ConfigError, match="accountant.value_discretization_interval=.*above 0 and at most 1"):
        accountant(value_discretization_interval=width)


def test_the_declaration_reaches_every_loss_distribution_of_a_run():
    fixed = ("noise=multiplier", "noise.noise_multiplier=1.0", "privacy.delta=1e-5")
    for accountant in ("pld", "rdp"):
        declared = [
            composed(*fixed, f"accountant={accountant}", *more)[0] for more in ((), ("+accountant.value_discretization_interval=0.05",))
        ]
        default, coarse = (calibrate(experiment.claim, 20_000).epsilon for experiment in declared)
        assert coarse["pld"] > default["pld"] and coarse["rdp"] == default["rdp"]
