"""Texts padded to several lengths: the same masks, losses, norms and clipped sum as padded to one, and every drawn example once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dpx
from dpx.audit.canaries import Planted, WithCanaries, canary_tokens
from dpx.config.declared_audit import Canaries, Primary
from dpx.data.declared_data import Data, SyntheticLabels, Vocabulary
from dpx.data.length_buckets import by_width
from dpx.data.prepare import prepare
from dpx.privacy.declared_privacy import Privacy
from dpx.training.loop import chunks
from dpx.training.microbatch import synthetic_rows
from dpx.training.step import Step
from tests.clipping.batches import QUICKLY, parameters
from tests.clipping.families import DROPOUT_KEY, subject

WIDTHS = (16, 24)
# Two microbatches of four; nothing of it runs.
FUNCTIONS = ("init", "gather", "zero", "accumulate", "reduce", "finish", "draw_frozen", "place_frozen")
NOTHING: Any = dict.fromkeys(FUNCTIONS, lambda *_: None)
STEP = Step(**NOTHING, chunk=2, rows=4)
ROW, UNITS = Privacy(delta=1e-4), Privacy(delta=1e-4, unit="document", rows_per_unit_max=2, unit_mode="sample_units")


def _narrowed(rows, places, width):
    return {name: values[places][..., :width] if name == "tokens" else values[places] for name, values in rows.items()}


SLOW = (("bert", "book_keeping"), ("decoder_choices", "vmap"))


# tests/clipping holds every method at every width; the masks and the dropout of a width are the subject here.
@pytest.mark.parametrize(("family", "method"), [("bert", "vmap"), *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_the_clipped_sum_of_all_widths_is_that_of_one(family, method):
    """In float64, masks and dropout drawn for each width by itself."""
    of = subject(family, layers=1, dropout=0.2)
    rows = synthetic_rows(of.task, 6, WIDTHS[-1], 50)
    rows["length"][::2] = rows["length"][::2] * WIDTHS[0] // WIDTHS[1]
    rows["segment_start"] = np.minimum(rows["segment_start"], rows["length"])
    rows["tokens"][np.arange(WIDTHS[-1]) >= rows["length"][..., None]] = 0
    longest = np.asarray(rows["length"]).reshape(6, -1).max(axis=1)
    places = list(by_width(longest, WIDTHS))
    assert [width for width, _ in places] == [24, 16]
    batch_of = jax.jit(of.batch)
    batches = {width: batch_of(np.asarray(DROPOUT_KEY), _narrowed(rows, found, width)) for width, found in places}
    # In halves, so that the widest part takes their program.
    halves = [batch_of(np.asarray(DROPOUT_KEY), _narrowed(rows, half, WIDTHS[-1])) for half in (slice(3), slice(3, 6))]
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float64), parameters(of))

        def run(params, batch):
            losses = lambda p, b: of.losses(p, b, DROPOUT_KEY)  # noqa: E731
            return dpx.clipped_sum(losses, params, batch, weights=lambda n: 1 / jnp.maximum(n, 1), method=method, checked=False)

        compiled = jax.jit(run, compiler_options=QUICKLY)
        whole = [jax.device_get(compiled(params, half)) for half in halves]
        found = {width: jax.device_get(compiled(params, batch)) for width, batch in batches.items()}
    losses_B, norms_B = (np.concatenate([getattr(half, name) for half in whole]) for name in ("losses_B", "norms_B"))
    assert np.median(norms_B) > 1
    for width, numbers in places:
        np.testing.assert_allclose(found[width].losses_B, losses_B[numbers], rtol=1e-12)
        np.testing.assert_allclose(found[width].norms_B, norms_B[numbers], rtol=1e-9)
    total, expected = (jax.tree.map(lambda *parts: sum(parts), *(one.total for one in each)) for each in (found.values(), whole))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), total, expected)


@pytest.fixture(scope="module")
def declared(tmp_path_factory):
    source = SyntheticLabels(examples=200, labels=("no", "yes"))
    directory = str(tmp_path_factory.getbasetemp() / "data")
    return Data(
        name="labels",
        source=source,
        vocabulary=Vocabulary(size=256),
        sequence_length=32,
        pairs="none",
        public_fraction=0.2,
        directory=directory,
    )


@pytest.mark.parametrize("privacy", [ROW, UNITS], ids=["rows", "units"])
@pytest.mark.parametrize("audited", [False, True], ids=["", "canaries"])
def test_every_drawn_example_comes_once_and_whole(declared, privacy, audited):
    store = prepare(declared, privacy)
    if audited:
        audit = Canaries(gradients=4, sequences=4, primary=Primary(guesses=2))
        tokens, label = canary_tokens(store.manifest, 4, np.random.default_rng(0)), np.array([0, 1, 0, 1])
        store = WithCanaries(store, Planted(4, np.arange(8) % 2 == 0, tokens, label), audit, privacy)
    drawn = np.arange(store.population(privacy))[::2]
    each = privacy.rows_per_example
    one, several = ([*chunks(store, drawn, STEP, each, widths)] for widths in ((32,), (8, 16, 32)))
    assert [rows["tokens"].shape[-1] for rows, _, _ in several] == sorted(
        (rows["tokens"].shape[-1] for rows, _, _ in several), reverse=True
    )
    assert len({rows["tokens"].shape for rows, _, _ in several}) == 3
    assert _real(one) == _real(several) and len(_real(one)) == len(set(_real(one)))


def _real(found):
    """Every column of every row that is not padding, as one set of tuples; texts without their padding."""
    rows_of = []
    for rows, is_padding, count in found:
        assert is_padding[count:].all()
        for place in zip(*np.nonzero(~is_padding), strict=True):
            row = {name: values[place] for name, values in rows.items()}
            assert row["length"] <= len(row["tokens"])
            row["tokens"] = row["tokens"][: row["length"]]
            rows_of.append(tuple((name, tuple(np.ravel(row[name]))) for name in sorted(row)))
    return sorted(rows_of)


def test_one_width_is_drawn_in_the_order_of_the_draw(declared):
    """Bits of runs without buckets follow from it."""
    store = prepare(declared, ROW)
    drawn = np.random.default_rng(0).permutation(store.population(ROW))[:21]
    (first, _, _), *_ = chunks(store, drawn, STEP, 1, (32,))
    assert first["record"].ravel().tolist() == drawn[:8].tolist()


def test_lengths_are_read_by_the_block(declared, monkeypatch):
    store = prepare(declared, ROW)
    whole = store.lengths("protected", np.arange(50), 1)
    monkeypatch.setattr("dpx.data.store._LENGTHS_AT_ONCE", 7)
    np.testing.assert_array_equal(store.lengths("protected", np.arange(50), 1), whole)
    np.testing.assert_array_equal(whole, store.rows("protected", np.arange(50))["length"])
