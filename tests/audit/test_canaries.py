"""Canaries in a run: their rows, coins and draws, exposure by hand, a sound run that passes and broken ones that fail."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dpx.audit import canaries, in_run
from dpx.audit.canaries import Planted, WithCanaries, plant
from dpx.audit.verdict import judge
from dpx.claim.calibration import calibrate
from dpx.clipping import ClippingMethod
from dpx.config.declared_audit import Canaries, NoCanaries, Primary
from dpx.config.experiment import Schedule
from dpx.data.declared_data import Data, Synthetic, Vocabulary
from dpx.data.prepare import prepare
from dpx.declaration import ConfigError
from dpx.files.orbax_checkpoints import released
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder
from dpx.job.train import Train
from dpx.mechanism import noise
from dpx.mechanism.clip import Flat
from dpx.mechanism.declared_mechanism import Multiplier
from dpx.privacy.declared_privacy import Pld, Privacy
from dpx.randomness import RootSecret
from dpx.sampler.batch_schedule import Constant
from dpx.training import opening, session
from dpx.training.loop import chunks
from dpx.training.opening import open_run
from tests.processes import WIDTH
from tests.training.conftest import declare
from tests.training.sharing import shared_programs
from tests.training.test_length_buckets import STEP

AUDIT = Canaries(gradients=600, sequences=100, masks=2, primary=Primary(guesses=100))
ROW, UNITS = Privacy(delta=1e-4), Privacy(delta=1e-4, unit="document", rows_per_unit_max=3, unit_mode="sample_units")
GROUP = Privacy(delta=1e-4, unit="document", rows_per_unit_max=3)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """A micro run of two steps in which every unit takes part, canaries included."""
    directory = str(tmp_path_factory.getbasetemp() / "data")
    source = Synthetic(documents=24, words_per_document=40, states=16)
    data = Data(name="synthetic", source=source, vocabulary=Vocabulary(size=256), sequence_length=16, directory=directory)
    size = calibrate_size(data)
    fields = {
        "data": data,
        "steps": 2,
        "audit": AUDIT,
        "batch_schedule": Constant(size=size),
        "noise": Multiplier(noise_multiplier=3.0),
        "accountant": Pld(value_discretization_interval=WIDTH),
        "clipping_method": ClippingMethod(name="book_keeping"),
        "schedule": Schedule(evaluation_rows=32),
        "microbatch": 32,
    }
    return lambda **changes: declare(**(fields | changes))


def calibrate_size(data):
    return prepare(data, ROW).manifest.rows["protected"] + AUDIT.count


def planted(store, audit=AUDIT):
    is_in = np.arange(audit.count) % 2 == 0
    return Planted(audit.gradients, is_in, canaries.canary_tokens(store.manifest, audit.sequences, np.random.default_rng(0)))


@pytest.mark.parametrize("privacy", [ROW, UNITS, GROUP], ids=["rows", "units", "group"])
def test_a_canary_that_is_out_is_padding_in_its_own_place(experiment, privacy):
    plain = prepare(experiment().data, privacy)
    store, first = WithCanaries(plain, planted(plain), AUDIT, privacy), plain.population(privacy)
    each = 3 if privacy is GROUP else 1
    assert store.population(privacy) == first + 700 * each
    # A data row, canaries 0 (in), 1 (out), 2 (in), sequences 600 (in) and 601 (out).
    asked = [0, *(first + each * number for number in (0, 1, 2, 600, 601))]
    found = store.examples("protected", asked, privacy.rows_per_example)
    shape = (6, 3) if privacy is UNITS else (6,)
    assert found["canary"].shape == shape and found["tokens"].shape == (*shape, 16)
    assert found["canary"].reshape(6, -1)[:, 0].tolist() == [-1, 0, 1, 2, -1, -1]
    assert found["is_padding"].reshape(6, -1).all(axis=1).tolist() == [False, False, True, False, False, True]
    own = plain.examples("protected", [0], privacy.rows_per_example)
    assert {name: value.dtype for name, value in own.items()} == {n: v.dtype for n, v in found.items() if n in own}
    if privacy is UNITS:
        assert found["is_padding"][[1, 3, 4]].tolist() == [[False, True, True]] * 3


@pytest.mark.parametrize("privacy", [ROW, UNITS, GROUP], ids=["rows", "units", "group"])
def test_a_coin_moves_nobody(experiment, privacy):
    """All chunks of a step in which everyone takes part, with one canary in and out: only the padding of its places differs."""
    plain = prepare(experiment().data, privacy)
    given, number = planted(plain), 600
    other = dataclasses.replace(given, is_in_M=given.is_in_M ^ (np.arange(AUDIT.count) == number))
    everyone = np.arange(WithCanaries(plain, given, AUDIT, privacy).population(privacy))
    both = []
    for coins in (given, other):
        store = WithCanaries(plain, coins, AUDIT, privacy)
        both.append([*chunks(store, everyone, STEP, privacy.rows_per_example, (8, 16))])
    differing = 0
    for (rows, is_padding, count), (others, are_padding, again) in zip(*both, strict=True):
        assert count == again
        jax.tree.map(np.testing.assert_array_equal, rows, others)
        differing += int(np.sum(is_padding != are_padding))
    assert differing == (3 if privacy is GROUP else 1)


def test_canaries_add_to_n(experiment):
    rows = prepare(experiment().data, ROW).manifest.rows["protected"]
    assert calibrate(experiment().claim, rows).size == rows + 700
    assert calibrate(experiment(privacy=GROUP).claim, rows).size == rows + 3 * 700


def test_coins_are_drawn_once_and_a_fork_keeps_its_parents(experiment, tmp_path):
    store = prepare(experiment().data, ROW)
    private = [tmp_path / name / "private" for name in ("parent", "child")]
    for folder in private:
        folder.mkdir(parents=True)
    first = plant(private[0], AUDIT, store.manifest, RootSecret.from_seed(1))
    assert 0.4 < first.is_in_M.mean() < 0.6 and first.tokens_ST.shape == (100, 16)
    with pytest.raises(ConfigError, match="audit_canaries.json: is missing, and the coins .* cannot be tossed again"):
        plant(private[1], AUDIT, store.manifest, None)
    canaries.inherit(private[1], private[0])
    for folder, secret in ((private[0], RootSecret.from_seed(2)), (private[0], None), (private[1], None)):
        found = plant(folder, AUDIT, store.manifest, secret)
        np.testing.assert_array_equal(found.is_in_M, first.is_in_M)
        np.testing.assert_array_equal(found.tokens_ST, first.tokens_ST)
    canaries.require_same_audit("parent@1", private[0], AUDIT)
    for other in (dataclasses.replace(AUDIT, gradients=500), NoCanaries()):
        with pytest.raises(ConfigError, match="^fork=parent@1.*canaries"):
            canaries.require_same_audit("parent@1", private[0], other)


@pytest.mark.parametrize("changed", ["{", "[]", "{}", {"coins": [1]}, {"tokens": [[1]]}, {"gradients": 1}, {"coins": {"a": 1}}])
def test_canaries_that_were_damaged_or_planted_are_refused_in_a_line(experiment, tmp_path, changed):
    """Fewer places than declared would be drawn from more often than is charged."""
    store = prepare(experiment().data, ROW)
    plant(tmp_path, AUDIT, store.manifest, RootSecret.from_seed(1))
    path = tmp_path / canaries.COINS
    path.write_text(changed if isinstance(changed, str) else json.dumps(json.loads(path.read_text()) | changed))
    for refused in (
        lambda: plant(tmp_path, AUDIT, store.manifest, RootSecret.from_seed(1)),
        lambda: canaries.require_same_audit("parent@1", tmp_path, AUDIT) or plant(tmp_path, AUDIT, store.manifest, None),
    ):
        with pytest.raises(ConfigError):
            refused()


@pytest.fixture(scope="module", autouse=True)
def shared_sums():
    """Runs that clip alike share the compiled sum of a step, and evaluations; what adds the noise is each run's own."""
    first, make_step = {}, opening.make_step

    def made(*given):
        step = make_step(*given)
        shared = first.setdefault(repr(Flat.weights), step)
        for name in ("init", "gather", "zero", "accumulate", "reduce"):
            object.__setattr__(step, name, getattr(shared, name))
        return step

    with shared_programs() as patch:
        patch.setattr(opening, "make_step", made)
        yield


def run(experiment, path, **changes):
    Train()(experiment(**changes), RunFolder(path, "name: micro\n"))


def read(path, *places):
    return json.loads(path.joinpath(*places).read_text())


@pytest.fixture(scope="module")
def sound(experiment, tmp_path_factory):
    path, patch, seen = tmp_path_factory.mktemp("sound"), pytest.MonkeyPatch(), []
    whole = in_run.of_gradients
    with patch.context() as patched:
        patched.setattr(in_run, "of_gradients", lambda *args: seen.append(whole(*args)) or seen[-1])
        run(experiment, path)
    return path, seen[0]


def test_a_sound_run_passes_and_says_what_it_releases(sound):
    sound, _ = sound
    stated, found = read(sound, "release", "privacy.json"), read(sound, "private", "audit.json")
    assert stated["guarantee"] == "dp" and stated["audit"]["verdict"] == "passes"
    assert stated["audit"]["lower_bound"]["epsilon"] < stated["audit"]["lower_bound"]["claim"]
    assert "at no further cost" in stated["audit"]["released"] and found["passes"]
    assert any("are canaries, which hold no protected text" in line for line in stated["assumptions"])
    assert 0.2 < found["sequences_without_guarantee"]["auc"] < 0.8
    assert {bound["score"] for bound in found["others"]} == {"gradient", "loss"}
    assert not list((sound / "release").rglob("*audit*"))


def test_released_parameters_hold_no_canary(sound):
    assert set(released(sound[0] / "release" / "params")) == {"embeddings", "layers", "mlm", "pooler", "next_sentence"}


def test_gradient_canaries_are_scored_by_what_was_released(sound, experiment):
    """Each that is in stands two clipping norms (one a step) above one that is out; noise on both sides."""
    path, found = sound
    coins = np.asarray(read(path, "private", canaries.COINS)["coins"][:600], bool)
    in_norms = found * experiment().batch_schedule.at(0) / experiment().clip.clipping_norm
    deviation = 3.0 * np.sqrt(2)
    assert in_norms[coins].mean() - in_norms[~coins].mean() == pytest.approx(2, abs=5 * deviation * np.sqrt(4 / 600))
    assert in_norms[~coins].std() == pytest.approx(deviation, rel=0.2)


@pytest.mark.parametrize("broken", ["no noise", pytest.param("no clip", marks=pytest.mark.slow)])
def test_a_broken_mechanism_fails_its_own_run(experiment, tmp_path, monkeypatch, broken):
    if broken == "no noise":
        sound_noise = noise.add_noise
        monkeypatch.setattr(noise, "add_noise", lambda total, keys, deviation: sound_noise(total, keys, 0 * deviation))
    else:
        monkeypatch.setattr(Flat, "weights", lambda *_: jnp.ones_like)
    with pytest.raises(ConfigError, match="^audit: the lower bound .* exceeds the claim"):
        run(experiment, tmp_path)
    stated = read(tmp_path, "release", "privacy.json")
    assert stated["guarantee"] == "none" and stated["epsilon"] == {} and stated["audit"]["verdict"] == "fails"
    assert stated["reasons"][0].startswith("audit: a lower bound of")
    # Started again and killed before it judges once more, the run still says so.
    folder = RunFolder(tmp_path, "name: micro\n")
    with folder.claimed(), open_run(experiment(), folder) as again:
        session.publish(again)
    assert read(tmp_path, "release", "privacy.json") | {"ledger": 0} == stated | {"ledger": 0}


def test_exposure_and_area_by_hand():
    found, is_in = np.array([5.0, 3.0, 0.0, 1.0, 2.0, 4.0]), np.array([True, True, True, False, False, False])
    np.testing.assert_allclose(in_run.exposures(found, is_in), [2, 1, 0])
    assert in_run.area_under_curve(found, is_in) == pytest.approx((3 + 2 + 0) / 9)


def test_nothing_to_compare_with_is_refused():
    with pytest.raises(ConfigError, match="every canary is in"):
        in_run.exposures(np.zeros(3), np.ones(3, bool))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"privacy": Privacy(delta=1e-4, adjacency="replace_one")}, "audit=canaries with privacy.adjacency=replace_one"),
    ],
)
def test_an_audit_that_cannot_stand_is_refused(experiment, changes, word):
    with pytest.raises(ConfigError, match=f"^{word}"):
        experiment(**changes)


def test_more_guesses_than_canaries_are_refused():
    with pytest.raises(ConfigError, match="^audit.primary.guesses=400"):
        Canaries(gradients=100, sequences=0, primary=Primary())


@pytest.mark.parametrize("side", [True, False])
def test_coins_that_fell_alike_end_no_run(side):
    """Four coins do so once in eight runs."""
    scored, is_in = np.linspace(0, 1, 4), np.full(4, side)
    assert in_run.power(scored, is_in) is None
    found = to_json(judge({"gradient": (scored, is_in)}, lambda delta: 1.0, Primary(guesses=2)))
    assert json.dumps(in_run.finite(found), allow_nan=False)
