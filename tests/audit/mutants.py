"""Deliberately broken mechanisms: one edit of the source each, and the test of the sound code that must then fail.

`python -m tests.audit.mutants` applies each edit to a copy of the project, runs its test there, and writes the result to
`experiments/audit/mutants.md`. Names after it run only those mutants.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import edits

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "experiments" / "audit" / "mutants.md"
AUDIT = "tests/audit/test_dirac.py::test_sound_runs_stay_below_the_claim"
SLICES = "tests/mechanism/test_noise.py::test_every_slice_has_the_noise_of_its_own_key"
LEAVES = "tests/training/test_released_noise.py::test_every_leaf_has_the_stated_variance_once_whatever_the_mesh"


@dataclasses.dataclass(frozen=True)
class Mutant:
    """In `symbol` of `file`, the code `old` (`tests.audit.edits`) becomes `new`; `test` is a pytest node that must fail."""

    name: str
    file: str
    symbol: str
    old: str
    new: str
    test: str

    def of(self, source: str) -> str:
        """`source` with the edit; raises `ValueError` with the mutant's name where its symbol or its code is not found."""
        try:
            return edits.edited(source, self.symbol, self.old, self.new)
        except ValueError as fault:
            raise ValueError(f"{self.name}: {self.file}: {fault}") from fault

    def apply(self, root: Path) -> None:
        path = root / self.file
        path.write_text(self.of(path.read_text()))


STEP, LOOP, NOISE = "dpx/training/step.py", "dpx/training/loop.py", "dpx/mechanism/noise.py"
NOISY = "drawn, deviation, state.noise"
SLICE_KEY = 'secret.key("noise", step, path_name(path), index)'
COUNTED = "is_counted_B = is_finite_B & ~is_padding_B"
FINITE = "is_finite_B = jnp.isfinite(total_B) & jnp.isfinite(losses_B)"
EVENTS = "dpx/privacy/events.py"
LEDGER, CHAIN = "dpx/privacy/ledger.py", "dpx/privacy/hash_chain.py"
DP_FP = "dpx/mechanism/dp_fp.py"
ACCIDENTS = "tests/job/test_accidents.py::"
CHARGED = "charges.append((_release(segment), segment.count))"
APART = """for z in filter(None, [segment.noise_multiplier, *(getattr(segment, name) for name in AUXILIARY)]):
                alone = dataclasses.replace(segment, **dict.fromkeys(AUXILIARY) | {"noise_multiplier": z})
                charges.append((_release(alone), segment.count))"""
ALLOCATION = "dpx/sampler/random_allocation.py"
POISSON, DRAW = "dpx/sampler/poisson.py", "return independent(size, sampling_probability, generator_for, step)"
SUBSET = """from dpx.sampler.fixed_size import _subset

        return _subset(size, round(size * sampling_probability), generator_for(step, "subset"))"""

MUTANTS = (
    Mutant("no noise", STEP, "_finish.finish", NOISY, "drawn, 0 * deviation, state.noise", AUDIT),
    Mutant("half the noise", STEP, "_finish.finish", NOISY, "drawn, deviation / 2, state.noise", AUDIT),
    Mutant(
        "clip off",
        "dpx/training/gradient_sum.py",
        "GradientSum.__call__",
        "self.clip.weights(limit)",
        "lambda norms_B: 0 * norms_B + 1",
        AUDIT,
    ),
    Mutant("noise for the mean added to the sum", STEP, "_finish.finish", NOISY, "drawn, deviation / expected_batch, state.noise", AUDIT),
    Mutant(
        "noise for the mean asked of the step",
        LOOP,
        "computed",
        "np.float32(noise_multiplier) * norm",
        "np.float32(noise_multiplier) * norm / size",
        "tests/training/test_loop.py::test_the_deviation_is_of_the_sum",
    ),
    Mutant(
        "tied cross-term dropped",
        "dpx/clipping/forms.py",
        "squares",
        "each[0].square + each[1].square + 2 * _product(*both)",
        "each[0].square + each[1].square",
        "tests/clipping/test_attacks.py::test_parameters_met_more_than_once[lookup_and_decode]",
    ),
    Mutant(
        "the head's factor after the norm",
        "dpx/clipping/groups.py",
        "clip",
        "part._replace(values=part.values * factor(part.path) ** 2)",
        "part",
        "tests/clipping/test_factors.py::test_gradients_are_multiplied_before_their_norm_is_taken[flat-groups0-book_keeping]",
    ),
    Mutant(
        "gradients rebuilt from the sum without noise",
        STEP,
        "_finish.finish",
        "mechanism.rebuilt(noisy, carriers)",
        "mechanism.rebuilt(total, carriers)",
        "tests/training/test_rgp.py::test_one_step_is_carriers_clipped_sum_noise_rebuilt_gradient_and_update",
    ),
    Mutant(
        "one start of the carriers for all steps",
        "dpx/mechanism/rgp.py",
        "Rgp.draw_first",
        'secret.key("carriers", step, path)',
        'secret.key("carriers", 0, path)',
        "tests/mechanism/test_rgp.py::test_carriers_are_drawn_again_in_each_step_and_the_same_in_a_replay",
    ),
    Mutant(
        "the last term of a rebuilt gradient added",
        "dpx/mechanism/carriers.py",
        "rebuilt",
        "d_b - _product",
        "d_b + _product",
        "tests/mechanism/test_rgp.py::test_the_rebuilt_gradient_is_the_papers_formula",
    ),
    Mutant(
        "ghost's second pass leaves out negative weights",
        "dpx/clipping/program.py",
        "_backward",
        "!= 0",
        "> 0",
        "tests/clipping/test_ghost.py::test_negative_weights_stay_beside_a_row_that_is_not_finite[ghost]",
    ),
    Mutant(
        "a parameter with several uses taken for one with a use",
        "dpx/clipping/joint.py",
        "_is_alone",
        "and len(uses[key]) == 1 and",
        "and",
        "tests/clipping/test_attacks.py::test_parameters_met_more_than_once[two_denses]",
    ),
    Mutant(
        "parts of a kernel that overlap taken for separate ones",
        "dpx/clipping/reader_ops.py",
        "are_separate",
        "not set(first) & set(second)",
        "first != second",
        "tests/clipping/test_parts.py::test_parts_are_exact[overlapping-kept]",
    ),
    Mutant(
        "a round's part of a gradient replaces what other rounds have added there",
        "dpx/clipping/reader_ops.py",
        "PartOfProduct.added",
        "jax.lax.dynamic_slice(total, at, part.shape) + part",
        "part",
        "tests/clipping/test_parts.py::test_parts_are_exact[by_computed_number-kept]",
    ),
    Mutant(
        "a layer that each example chooses taken for one that all share",
        "dpx/clipping/mapped.py",
        "_batched",
        "all(axis is None for axis in axes[2:-1])",
        "True",
        "tests/clipping/test_parts.py::test_parts_are_exact[number_of_the_example-units]",
    ),
    Mutant(
        "gradients of what no example reaches added up before they are clipped",
        "dpx/clipping/mapped.py",
        "_linear",
        "out + tick.astype(out.dtype)",
        "out",
        "tests/clipping/test_alike.py::test_kernels_computed_from_parameters_are_exact[without_data-kept]",
    ),
    Mutant(
        "units that fill the last turn count twice",
        "dpx/clipping/groups.py",
        "summed_by_turns",
        "in_turns(is_padding_B) | jnp.repeat(jnp.swapaxes(is_added.reshape(at_once, count), 0, 1), rows, 1)",
        "in_turns(is_padding_B)",
        "tests/clipping/test_turns.py::test_turns_change_nothing[202-2-20-17]",
    ),
    Mutant(
        "a parameter of every round taken for one of a layer each",
        "dpx/clipping/joint.py",
        "_is_alone",
        "and len(reference.depths) == len(site.loops)",
        "",
        "tests/clipping/test_ops.py::test_a_parameter_used_in_every_round_of_a_loop_adds_up[book_keeping]",
    ),
    Mutant(
        "a kept gradient of one of several uses",
        "dpx/clipping/joint.py",
        "squares",
        "[_added_up(use, records[use.part.site], cache) for use in uses]",
        "[_added_up(use, records[use.part.site], cache) for use in uses[:1]]",
        "tests/clipping/test_kept_uses.py::test_sums_and_norms_are_those_of_float64[1]",
    ),
    Mutant(
        "padding left in kept gradients",
        "dpx/clipping/norms.py",
        "contracted_units.add",
        "jnp.where(is_kept, own, 0)",
        "own",
        "tests/clipping/test_kept_uses.py::test_padding_and_rows_that_are_not_finite_contribute_nothing",
    ),
    Mutant(
        "a value of a loop taken for another that is stacked",
        "dpx/clipping/program.py",
        "_stacked_once",
        "while not isinstance(var, core.Literal) and var in made_by and made_by[var].primitive.name in _SHAPES:",
        "while not isinstance(var, core.Literal) and var in made_by and made_by[var].invars:",
        "tests/clipping/test_passed_on.py::test_results_are_equal_to_the_bit_and_values_are_stacked_once",
    ),
    Mutant(
        "any reader of a parameter let through",
        "dpx/clipping/readers.py",
        "_Walk._pass_on",
        "if reference is None or eqn.primitive is primitives.stop_gradient_p:",
        "if True:",
        "tests/clipping/test_readme.py::test_what_the_page_calls_refused_is_refused_for_that_reason",
    ),
    Mutant(
        "ghost weighs all groups as one in its second pass",
        "dpx/clipping/methods.py",
        "ghost_sum",
        "joint.part_weights(clipped, site)",
        "joint.part_weights(clipped, program.sites[0])",
        "tests/clipping/test_narrow_and_infinite.py::test_groups_are_weighed_apart_by_every_method[ghost]",
    ),
    Mutant(
        "ids kept in the cotangent's type",
        "dpx/clipping/ops.py",
        "Lookup.input_cotangent",
        "id_BT.astype(F32)",
        "id_BT.astype(cotangent.dtype)",
        "tests/clipping/test_narrow_and_infinite.py::test_ids_past_256_are_told_apart_in_bfloat16[book_keeping]",
    ),
    Mutant(
        "an infinite loss counts",
        "dpx/clipping/groups.py",
        "clip",
        FINITE,
        FINITE.removesuffix(" & jnp.isfinite(losses_B)"),
        "tests/clipping/test_narrow_and_infinite.py::test_an_infinite_loss_of_a_finite_gradient_counts_for_nothing[book_keeping]",
    ),
    Mutant(
        "logits without a value left in the fused head",
        "dpx/models/fused_head.py",
        "cross_entropy",
        "jnp.where(jnp.isfinite(top_m)[:, None], logits_mV + bias_V - top_m[:, None], -jnp.inf)",
        "logits_mV + bias_V - top_m[:, None]",
        "tests/clipping/test_narrow_and_infinite.py::test_an_example_without_logits_counts_for_nothing_in_the_fused_head[nan-book_keeping]",
    ),
    Mutant(
        "a narrow record read before it is stored",
        "dpx/clipping/norms.py",
        "as_stored",
        "jax.lax.optimization_barrier(leaf) if leaf.dtype.itemsize < 4 else leaf",
        "leaf",
        "tests/clipping/test_narrow_and_infinite.py::test_what_is_rounded_is_read_after_it_was_stored",
    ),
    Mutant(
        "the low part of a weighted cotangent left out",
        "dpx/clipping/bounds.py",
        "_in_parts",
        "i + j < 2",
        "i + j < 1",
        "tests/clipping/test_in_parts.py::test_a_product_in_parts_leaves_out_less_than_is_stated[False]",
    ),
    Mutant(
        "wide rows left to the blocks of the compiler",
        "dpx/clipping/norms.py",
        "outer",
        'cut("mv,nv->mn", *pair)',
        'product("mv,nv->mn", *pair)',
        "tests/clipping/test_bounds.py::test_wide_rows_are_cut_whatever_the_compiler_does",
    ),
    Mutant(
        "noise reused after a fork, the key inherited",
        "dpx/training/run_start.py",
        "seeded",
        "+ (branch << 128)",
        "",
        "tests/training/test_session.py::test_a_fork_takes_a_fresh_key_and_the_whole_parents_ledger",
    ),
    Mutant(
        "noise reused in a new epoch, the key kept",
        "dpx/training/run_start.py",
        "path_of_secret",
        'f"root_secret_{number}"',
        '"root_secret_0"',
        "tests/training/test_session.py::test_another_microbatch_starts_a_new_noise_epoch_and_charges_again",
    ),
    Mutant(
        "equal-shaped leaves share noise",
        NOISE,
        "slice_keys.keys",
        SLICE_KEY,
        'secret.key("noise", step, index)',
        "tests/mechanism/test_noise.py::test_equal_shaped_leaves_and_steps_get_other_noise",
    ),
    Mutant(
        "every step has the same noise",
        NOISE,
        "slice_keys.keys",
        SLICE_KEY,
        'secret.key("noise", path_name(path), index)',
        "tests/mechanism/test_noise.py::test_equal_shaped_leaves_and_steps_get_other_noise",
    ),
    Mutant(
        "shuffled but charged as Poisson",
        "dpx/sampler/sampler_protocol.py",
        "Sampler.ledger_fields",
        '"sampler": self.name',
        '"sampler": "poisson"',
        "tests/privacy/test_statement.py::test_shuffled_passes_are_not_amplified",
    ),
    Mutant(
        "a subset of fixed size drawn under poisson",
        POISSON,
        "Poisson.draw",
        DRAW,
        SUBSET,
        "tests/test_sampler.py::test_counts_are_binomial",
    ),
    Mutant(
        "surplus rows dropped by the sampler under poisson",
        POISSON,
        "Poisson.draw",
        DRAW,
        DRAW + "[: round(size * sampling_probability)]",
        "tests/test_sampler.py::test_counts_are_binomial",
    ),
    Mutant(
        "surplus rows dropped after the first chunk",
        LOOP,
        "chunks",
        "range(-(-count // step.chunk))",
        "range(min(1, count))",
        "tests/training/test_loop.py::test_no_drawn_row_is_left_out",
    ),
    Mutant(
        "padding rows counted",
        "dpx/clipping/groups.py",
        "clip",
        COUNTED,
        COUNTED.removesuffix(" & ~is_padding_B"),
        "tests/clipping/test_clipped_sum.py::test_padding_rows_contribute_exactly_zero",
    ),
    Mutant(
        "non-finite example kept",
        "dpx/clipping/groups.py",
        "clip",
        COUNTED,
        "is_counted_B = ~is_padding_B",
        "tests/clipping/test_clipped_sum.py::test_a_non_finite_example_contributes_exactly_zero",
    ),
    Mutant(
        "drawn size as divisor",
        LOOP,
        "computed",
        "np.float32(size), rate, auxiliary",
        'np.float32(max(1.0, float(reduced["count"]["examples"]))), rate, auxiliary',
        "tests/training/test_loop.py::test_the_divisor_is_the_expected_size",
    ),
    Mutant(
        "counted N sampled from under add_remove",
        LOOP,
        "_sums",
        ".at(step) / run.calibrated.size,",
        ".at(step) / run.store.population(experiment.privacy),",
        "tests/training/test_loop.py::test_the_rate_and_the_charge_follow_the_declared_size",
    ),
    Mutant(
        "counted N calibrated for under add_remove",
        "dpx/claim/claim_checks.py",
        "check_claim",
        "size = declared or size",
        "size = size or declared",
        "tests/privacy/test_calibration.py::test_declared_size_stands_in_for_the_count",
    ),
    Mutant(
        "ledger reset on resume",
        CHAIN,
        "Chain.__init__",
        "if not self.path.exists():",
        "if True:",
        "tests/training/test_session.py::test_a_replayed_run_ends_with_the_same_bits_and_ledger",
    ),
    Mutant(
        "a step that is not in the ledger when its noise is drawn",
        LOOP,
        "one_step",
        "        _enter(run, noise_epoch, step)",
        "        pass",
        "tests/training/test_loop.py::test_the_ledger_is_written_before_the_noise_is_drawn",
    ),
    Mutant(
        "row event for a document unit",
        "dpx/privacy/ledger.py",
        "_release",
        'kind = "group" if rows_clipped_apart(segment) > 1 else segment.sampler',
        "kind = segment.sampler",
        "tests/privacy/test_ledger.py::test_the_mixture_event_replaces_the_row_event_for_units_of_several_rows",
    ),
    Mutant(
        "row event for a document whose rows are drawn singly, by calling them units",
        "dpx/claim/calibration.py",
        "Entries.of_step",
        "unit_mode=privacy.unit_mode",
        'unit_mode="sample_units"',
        "tests/privacy/test_units.py::test_rows_drawn_singly_are_never_charged_as_units",
    ),
    Mutant(
        "tied cross terms between different rows of a unit dropped",
        "dpx/clipping/forms.py",
        "_product",
        "return (_gathered(decoded, looked_up) * across_BMT).sum((1, 2))",
        "M, T = (size // 3 for size in across_BMT.shape[1:])\n"
        "    return (_gathered(decoded, looked_up) * across_BMT * jnp.kron(jnp.eye(3), jnp.ones((M, T)))).sum((1, 2))",
        "tests/clipping/test_units.py::test_equals_the_float64_gradient_of_each_unit[book_keeping_grams]",
    ),
    Mutant(
        "rows drawn singly where whole units are charged",
        "dpx/privacy/declared_privacy.py",
        "Privacy.population",
        'manifest.rows["protected"] if self.unit_mode == "group" else manifest.units["protected"]',
        'manifest.rows["protected"]',
        "tests/privacy/test_units.py::test_n_counts_what_is_drawn",
    ),
    Mutant(
        "rows of a unit beyond its first left out",
        "dpx/data/store.py",
        "Store._rows_of_units",
        "return row_nR, row_nR >= end_n[:, None]",
        "return row_nR, row_nR >= first_n[:, None] + 1",
        "tests/data/test_store.py::test_units_are_found_with_all_their_rows",
    ),
    Mutant(
        "canaries left out of N",
        "dpx/claim/claim_checks.py",
        "check_claim",
        "size += claim.audit.places(privacy)",
        "size += 0",
        "tests/audit/test_canaries.py::test_canaries_add_to_n",
    ),
    Mutant(
        "canaries trained on whatever their coins",
        "dpx/audit/canaries.py",
        "WithCanaries.examples",
        "| ~self._planted.is_in_M[number_n]",
        "| np.zeros(len(number_n), bool)",
        "tests/audit/test_canaries.py::test_a_canary_that_is_out_is_padding_in_its_own_place",
    ),
    Mutant(
        "mixture event replaced by the row event",
        EVENTS,
        "_SAMPLED",
        '("group", "zero_out"): (_mixture, _NO_MIXTURE)',
        '("group", "zero_out"): (_poisson, _NO_MIXTURE)',
        "tests/privacy/test_events.py::test_a_unit_of_rows_costs_between_its_rows_apart_and_always_together",
    ),
    Mutant(
        "RDP replace-one without the factor 2",
        EVENTS,
        "_gaussian_twice",
        "GaussianDpEvent(release.noise_multiplier / 2)",
        "GaussianDpEvent(release.noise_multiplier)",
        "tests/privacy/test_events.py::test_replaced_units_cost_twice_the_sensitivity_by_renyi",
    ),
    Mutant(
        "sums of other devices left out of the reduction",
        "dpx/training/sharding.py",
        "Layout.reduce",
        "return jax.lax.psum(total, EXAMPLE_AXES)",
        "return total",
        "tests/training/test_step.py::test_sums_of_all_devices_are_added_up_each_once",
    ),
    Mutant(
        "local norm under a model axis",
        "dpx/models/fused_layers.py",
        "LayerStack._record",
        'record["squares"] += bounds.upper(norms.of_recorded(self.form[weight], own))',
        'record["squares"] += jax.shard_map(norms.squares, in_specs=jax.P(None, None, "tensor"), out_specs=jax.P(), '
        'axis_names={"tensor"}, check_vma=False)(norms.per_example(a, g))',
        "tests/training/test_step.py::test_a_model_axis_changes_neither_norms_nor_sums",
    ),
    Mutant(
        "noise added by each device (over-noise)", STEP, "_finish.finish", NOISY, "drawn, deviation * mesh.size**0.5, state.noise", LEAVES
    ),
    Mutant(
        "noise not divided with the sum (over-noise)",
        STEP,
        "_finish.finish",
        NOISY,
        "drawn, deviation * expected_batch, state.noise",
        LEAVES,
    ),
    Mutant("a tenth more noise than stated (over-noise)", STEP, "_finish.finish", NOISY, "drawn, 1.1 * deviation, state.noise", LEAVES),
    Mutant(
        "adaptive count charged as a second subsampled event",
        LEDGER,
        "releases",
        CHARGED,
        APART,
        "tests/privacy/test_joint.py::test_an_adaptive_count_is_charged_on_the_draw_of_the_sum",
    ),
    Mutant(
        "the norm follows the exact count",
        "dpx/mechanism/clip.py",
        "AdaptiveClip.next_clipping_norm",
        "(centred + noise) / expected_batch",
        "centred / expected_batch",
        "tests/mechanism/test_quantile.py::test_the_norm_moves_by_the_noisy_fraction_as_stated",
    ),
    Mutant(
        "C_t from this step's own count",
        STEP,
        "_finish.finish",
        NOISY,
        'drawn, deviation * clip.next_clipping_norm(state.clip, counts, keys["count"], expected_batch) / state.clip, state.noise',
        "tests/training/test_adaptive.py::test_a_step_adds_noise_for_the_norm_it_clipped_to",
    ),
    Mutant(
        "correlated noise carried under a fresh key",
        "dpx/training/run_start.py",
        "start_run",
        "together.in_a_new_noise_epoch(state) if first_step == noise_epoch.from_step else state",
        "state",
        "tests/training/test_correlated.py::test_replay_is_bit_exact_and_past_noise_stays_within_its_epoch",
    ),
    Mutant(
        "correlated noise carried into a fork",
        "dpx/training/run_start.py",
        "_fork",
        "state = together.in_a_new_noise_epoch(state)",
        "",
        "tests/training/test_correlated.py::test_replay_is_bit_exact_and_past_noise_stays_within_its_epoch",
    ),
    Mutant(
        "products between a unit's rows dropped from fused Grams",
        "dpx/models/fused_layers.py",
        "LayerStack._record",
        'record["squares"] += bounds.upper(norms.of_recorded(self.form[weight], own))',
        'by_row = norms.gram(factors[f"a_{weight}"], factors[f"g_{weight}"]).reshape(-1, self.rows_per_unit).sum(1)\n'
        '            is_gram = self.form[weight] == "gram"\n'
        '            record["squares"] += by_row if is_gram else bounds.upper(norms.of_recorded(self.form[weight], own))',
        "tests/clipping/test_units.py::test_the_grams_of_fused_layers_hold_products_between_rows",
    ),
    Mutant(
        "products between a unit's rows dropped from fused kept gradients",
        "dpx/models/fused_layers.py",
        "LayerStack._record",
        'record["squares"] += bounds.upper(norms.of_recorded(self.form[weight], own))',
        'apart = norms.squares(norms.per_example(factors[f"a_{weight}"], factors[f"g_{weight}"]))\n'
        '            is_formed = self.form[weight] != "gram"\n'
        "            upper = bounds.upper(norms.of_recorded(self.form[weight], own))\n"
        '            record["squares"] += apart.reshape(-1, self.rows_per_unit).sum(1) if is_formed else upper',
        "tests/clipping/test_units.py::test_equals_the_float64_gradient_of_each_unit[book_keeping_grams]",
    ),
    Mutant(
        "non-finite row left in its unit",
        "dpx/clipping/groups.py",
        "clip",
        COUNTED,
        "is_counted_B = ~is_padding_B",
        "tests/clipping/test_units.py::test_one_non_finite_row_drops_its_whole_unit[nan-book_keeping_grams]",
    ),
    Mutant(
        "a refuted run keeps its guarantee",
        "dpx/claim/statement.py",
        "build",
        "*refuted(facts.verdict),",
        "",
        "tests/audit/test_canaries.py::test_a_broken_mechanism_fails_its_own_run",
    ),
    Mutant(
        "rounding left out of the sensitivity",
        "dpx/mechanism/discrete_gaussian.py",
        "DiscreteGaussian.sensitivity",
        "root * self.spacing(clipping_norm)",
        "0 * self.spacing(clipping_norm)",
        "tests/mechanism/test_rounded.py::test_the_sensitivity_holds_under_adversarial_rounding_and_the_norm_alone_does_not",
    ),
    Mutant(
        "sums rounded by the microbatch beside whatever moves rows",
        "dpx/claim/claim_checks.py",
        "check_claim",
        "declared_mechanism.check(claim.mechanism, claim)",
        "_ = places",
        "tests/training/test_neighbours.py::test_neighbours_are_no_further_apart_than_is_charged",
    ),
    Mutant(
        "released loss not limited to its range",
        "dpx/mechanism/telemetry.py",
        "ReleasedTelemetry.centred_sums",
        "jnp.clip(values[name].astype(jnp.float32), 0, width)",
        "values[name].astype(jnp.float32)",
        "tests/mechanism/test_telemetry.py::test_one_example_moves_the_loss_by_half_the_limit_at_most",
    ),
    Mutant(
        "cyclic draws charged at the rate of plain ones",
        LEDGER,
        "releases",
        "segment.q * cycle",
        "segment.q",
        "tests/mechanism/test_banded.py::test_one_release_is_charged_each_time_the_busiest_group_comes_round",
    ),
    Mutant(
        "vectors noised without the clip",
        DP_FP,
        "clipped",
        "return vectors_BH * factor_B[:, None],",
        "return vectors_BH,",
        "tests/mechanism/test_dp_fp.py::test_no_vector_is_longer_than_the_norm",
    ),
    Mutant(
        "one key for the rows of all micro-batches",
        DP_FP,
        "DpFp.row_keys",
        'secret.key("forward_noise", step, draw, row)',
        'secret.key("forward_noise", step, row)',
        "tests/mechanism/test_dp_fp.py::test_keys_are_those_of_step_draw_and_row_and_of_no_other_use",
    ),
    Mutant(
        "the pooler trained below the noise under a guarantee",
        DP_FP,
        "DpFp.trained",
        "return OutputLayer() if isinstance(train, LastLayer) else train",
        "return train",
        "tests/training/test_forward_noise.py::test_with_the_last_layer_alone_nothing_below_the_noise_is_trained",
    ),
    Mutant(
        "rows of a replayed step noised before they are compared",
        LOOP,
        "computed",
        "if before is not None and isinstance(mechanism, ForwardNoise):",
        "if False and isinstance(mechanism, ForwardNoise):",
        "tests/training/test_forward_noise.py::test_vectors_that_are_others_now_meet_no_key_that_was_used",
    ),
    Mutant(
        "rows released one by one charged as a hidden draw",
        LEDGER,
        "_of_rows",
        'kind="slot_revealed"',
        'kind="poisson"',
        "tests/privacy/test_revealed.py::test_a_ledger_alone_gives_the_draws_of_its_steps",
    ),
    Mutant(
        "a replayed step is not compared with its entry",
        LOOP,
        "_require_same",
        "before is not None and before not in found",
        "False and before not in found",
        ACCIDENTS + "test_a_sum_that_changed_on_replay_meets_a_fresh_key_and_both_are_charged",
    ),
    Mutant(
        "a copied folder resumes with the same key",
        "dpx/training/run_start.py",
        "NoiseEpochs.secret_of",
        "and self._place(noise_epoch.number) == noise_epoch.secret_place",
        "",
        ACCIDENTS + "test_both_of_a_folder_and_its_copy_go_on_under_keys_of_their_own",
    ),
    Mutant(
        "a run resumes from a state that its noise epoch does not cover",
        "dpx/training/run_start.py",
        "_why_anew",
        "if not is_own and (first_step, start) != (noise_epoch.from_step, noise_epoch.start):",
        "if False:",
        ACCIDENTS + "test_a_checkpoint_moved_away_in_a_later_noise_epoch_leaves_no_draw_uncharged",
    ),
    Mutant(
        "values released before the statement that charges for them",
        "dpx/training/session.py",
        "observers_of.hold",
        "run.released.hold(run.ledger.noise_epochs[-1].number, done, scalars)",
        "run.released.hold(0, done, scalars); run.released.publish(run.ledger.mark)",
        ACCIDENTS + "test_no_value_is_released_ahead_of_the_statement_that_charges_for_it[telemetry]",
    ),
    Mutant(
        "parts of a folder not held against its ledger",
        "dpx/statement/agreement.py",
        "checked",
        "missing = ledger.missing(mark)",
        "missing = None",
        ACCIDENTS + "test_nothing_looks_at_a_run_whose_ledger_falls_short[cut-account]",
    ),
    Mutant(
        "an edited statement not held against its seal",
        "dpx/statement/agreement.py",
        "checked",
        "fits = content is None or seal(content) in ledger.statements",
        "fits = True",
        "tests/job/test_seals.py::test_a_trial_whose_statement_was_edited_disagrees",
    ),
    Mutant(
        "trials without results not charged",
        "dpx/claim/search_claim.py",
        "build",
        "costs = [(trial, trial_charges.cost_of(trial, record)) for trial in charged]",
        "costs = [(trial, trial_charges.cost_of(trial, record)) for trial in charged if trial.score is not None]",
        "tests/tuning/test_composition.py::test_a_trial_that_left_nothing_is_charged_its_plan_and_named",
    ),
    Mutant(
        "a trial whose folder is gone not charged",
        "dpx/claim/search_claim.py",
        "build",
        "charged = record.trials if tune",
        "charged = [one for one in record.trials if (record.outputs / one.folder).exists()] if tune",
        "tests/tuning/test_accidents.py::test_epsilon_stays_when_the_folders_of_losing_trials_are_deleted",
    ),
    Mutant(
        "a trial let in beyond the declared budget",
        "dpx/claim/trial_charges.py",
        "check_plan",
        "budget.holds(begun + new)",
        "budget.holds(begun)",
        "tests/tuning/test_budget.py::test_a_trial_beyond_the_budget_is_refused_before_it_begins",
    ),
    Mutant(
        "all slices of a leaf with its first key",
        NOISE,
        "_added_by_slice.body",
        "keys[index], index * block",
        "keys[0], index * block",
        SLICES,
    ),
    Mutant(
        "the last part of a leaf with its first key",
        NOISE,
        "_added_by_slice",
        "keys[whole], whole * block",
        "keys[0], whole * block",
        SLICES,
    ),
    Mutant(
        "small leaves drawn as one with the first one's key",
        "dpx/mechanism/noise.py",
        "gaussians",
        "jnp.stack(keys)[draw_M]",
        "jnp.stack(keys)[0 * draw_M]",
        "tests/mechanism/test_noise.py::test_small_leaves_are_drawn_as_one_with_the_bits_of_their_own_keys",
    ),
    Mutant(
        "the same rows drawn at every step",
        LOOP,
        "_sums",
        'secret.generator("sample", *place), step',
        'secret.generator("sample", *place), 0',
        "tests/training/test_draws_and_charges.py::test_no_two_steps_draw_the_same_rows",
    ),
    Mutant(
        "every step charged at the first batch size",
        LOOP,
        "_enter",
        "batch = experiment.batch_schedule.at(step)",
        "batch = experiment.batch_schedule.at(0)",
        "tests/training/test_draws_and_charges.py::test_each_step_is_charged_at_its_own_batch_size",
    ),
    Mutant(
        "sampler shards share their draws",
        POISSON,
        "independent",
        "generator_for(step, shard)",
        "generator_for(step, 0)",
        "tests/test_sampler.py::test_virtual_shards_draw_independently",
    ),
    Mutant(
        "a root secret of 32 bits",
        "dpx/randomness.py",
        "RootSecret.create",
        "secrets.token_bytes(SECRET_BYTES)",
        "secrets.token_bytes(4) * (SECRET_BYTES // 4)",
        "tests/test_randomness.py::test_a_secret_is_256_bits_of_the_operating_systems",
    ),
    Mutant(
        "keys of 32 bits of the root secret",
        "dpx/randomness.py",
        "RootSecret._derive",
        "key=self._secret,",
        "key=self._secret[:4],",
        "tests/test_randomness.py::test_every_byte_of_the_secret_reaches_every_key",
    ),
    Mutant(
        "threads dropped from the fingerprint",
        "dpx/training/fingerprint.py",
        "fingerprint",
        '"threads": threads(),',
        "",
        "tests/training/test_fingerprint.py::test_another_number_of_cores_is_another_fingerprint",
    ),
    Mutant(
        "a fixed size may differ from the declared one",
        "dpx/sampler/fixed_size.py",
        "FixedSize",
        "depends_on_size: ClassVar[bool] = True",
        "",
        "tests/privacy/test_statement.py::test_a_sampler_accounted_at_another_size_has_no_guarantee",
    ),
    Mutant(
        "an allocation with replacement: fresh places at every step",
        ALLOCATION,
        "RandomAllocation.draw_part",
        'generator_for("allocation", epoch, block)',
        'generator_for("allocation", step, block)',
        "tests/test_random_allocation.py::test_every_unit_has_one_uniform_place_in_each_epoch_independent_of_other_units_and_epochs",
    ),
    Mutant(
        "one allocation for all epochs",
        ALLOCATION,
        "RandomAllocation.draw_part",
        'generator_for("allocation", epoch, block)',
        'generator_for("allocation", 0, block)',
        "tests/test_random_allocation.py::test_places_repeat_with_their_key_and_only_with_it",
    ),
    Mutant(
        "a place that depends on the other units",
        ALLOCATION,
        "RandomAllocation.draw_part",
        'generator_for("allocation", epoch, block)',
        'generator_for("allocation", epoch, block, size)',
        "tests/test_random_allocation.py::test_every_unit_has_one_uniform_place_in_each_epoch_independent_of_other_units_and_epochs",
    ),
    Mutant(
        "epochs of another length share their places",
        "dpx/sampler/sampler_protocol.py",
        "draw",
        'whole(*place, "from", stretch)',
        "whole(*place)",
        "tests/test_random_allocation.py::test_epochs_of_another_length_have_places_of_their_own",
    ),
    Mutant(
        "epochs of another length are not counted apart",
        LEDGER,
        "releases",
        "segment.epoch_name, start, length, number",
        "segment.epoch_name, 0, 0, number",
        "tests/training/test_allocated_steps.py::test_epochs_that_share_a_number_are_charged_apart",
    ),
    Mutant(
        "epochs redone with fresh places and noise are charged once",
        LEDGER,
        "releases",
        "segment.origin, segment.epoch, segment.epoch_name, start",
        'segment.origin, 0, "", start',
        "tests/test_random_allocation.py::test_an_epoch_that_began_is_charged_whole_and_once",
    ),
    Mutant(
        "balls in bins are read as an allocation",
        LEDGER,
        "_of_epoch",
        'segment.sampler == "random_allocation"',
        'segment.sampler in ("random_allocation", "balls_in_bins")',
        "tests/test_random_allocation.py::test_a_record_of_balls_in_bins_stays_without_amplification_whatever_else_it_says",
    ),
    Mutant(
        "an allocation's addition is left out",
        "dpx/privacy/allocation.py",
        "of_epoch",
        "(-upper, masses[:0:-1], masses[0] + steps * without)",
        "removal",
        "tests/privacy/test_allocation.py::test_both_directions_are_at_least_the_exact_integral_and_close_to_it",
    ),
    Mutant(
        "an allocation's sums are rounded to the nearest point",
        "dpx/privacy/allocation.py",
        "split",
        "upward = masses * share",
        "upward = masses * np.round(share)",
        "tests/privacy/test_allocation.py::test_both_directions_are_at_least_the_exact_integral_and_close_to_it",
    ),
)

NOT_RUN = "not run"

# Asked for, and without a place in this code to be put.
WITHOUT_CODE: tuple[tuple[str, str], ...] = ()


@contextmanager
def copied() -> Iterator[Path]:
    """The project in a separate folder: compiled programs are shared, solved calibrations are not (a mutant's are wrong)."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "dpx"
        # Tests of clipping read programs of the benchmarks.
        for name in ("dpx", "conf", "tests", "experiments/benchmarks"):
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        (root / "outputs" / "cache").mkdir(parents=True)
        compiled = ROOT / "outputs" / "cache" / "compiled"
        compiled.mkdir(parents=True, exist_ok=True)
        (root / "outputs" / "cache" / "compiled").symlink_to(compiled)
        yield root


def fails(mutant: Mutant) -> tuple[bool, float]:
    """Whether the mutant's test fails under it (a test that could not run is an error), and the seconds it took."""
    with copied() as root:
        mutant.apply(root)
        began = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-n0", "-x", "-q", "-p", "no:cacheprovider", mutant.test]
        # What the tests start must import the copy too.
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)}
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    if done.returncode not in (0, 1) or "error" in done.stdout.splitlines()[-1]:
        raise RuntimeError(f"{mutant.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1, time.monotonic() - began


def known() -> dict[str, str]:
    """What the table says so far: yes, **no** or not run, by mutant."""
    lines = TABLE.read_text().splitlines() if TABLE.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {row[0]: row[3] for row in rows[2:]}


def write(caught: dict[str, str]) -> None:
    lines = [
        "# Mutants and what caught each",
        "",
        "Each is one edit of the source (`tests/audit/mutants.py`); its test passes without the edit, as part of the suite.",
        "Written by `python -m tests.audit.mutants`; a name after it runs that mutant alone.",
        "",
        "| mutant | file | caught by | caught |",
        "| --- | --- | --- | --- |",
    ]
    lines += [f"| {m.name} | `{m.file}` | `{m.test}` | {caught.get(m.name, NOT_RUN)} |" for m in MUTANTS]
    lines += [f"| {name} | | {why} | not applicable |" for name, why in WITHOUT_CODE]
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(lines) + "\n")


def main(names: list[str]) -> int:
    """Runs the named mutants, or all; the table is written after each."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        print(f"no such mutant: {', '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    caught = known()
    for mutant in [mutant for mutant in MUTANTS if not names or mutant.name in names]:
        seen, seconds = fails(mutant)
        caught[mutant.name] = "yes" if seen else "**no**"
        print(f"{'caught' if seen else 'MISSED'}  {seconds:5.1f} s  {mutant.name}", flush=True)
        write(caught)
    return int("**no**" in caught.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
