"""Every family, selection of what is trained, method and way of computing clips exactly: the one matrix of them.

A cell is (family, what is trained, method, way). The default suite holds those of `DEFAULT`, in which each kind of layers occurs, with what
no other file of the default suite compares; the others are slow.
"""

from itertools import product

import pytest

from dpx.models import fused_layers
from tests.clipping.exactness import SELECTIONS, assert_exact, case
from tests.clipping.families import FAMILIES, ROTARY

# way: (changes of the model, options of the sum); short stacks are unrolled unless they are told to loop.
WAYS = {
    "blocks": ({}, {}),
    "ops": ({}, {"fused": False, "kept_bytes": 2**30}),
    "loop": ({}, {}),
    "loop_without_memory": ({}, {"kept_bytes": 0}),
    "in_line": ({"scan": False}, {"kept_bytes": 0}),
    "dropout": ({"dropout": 0.1}, {}),
    "adapter_dropout": ({"adapter_dropout": 0.25}, {}),
    "adapter_dropout_ops": ({"adapter_dropout": 0.25}, {"fused": False}),
    "again": ({"rematerialize": "layers"}, {}),
    "again_ops": ({"rematerialize": "layers"}, {"fused": False}),
    "loop_again_without_memory": ({"rematerialize": "layers"}, {"kept_bytes": 0}),
    "again_in_line": ({"rematerialize": "layers", "scan": False}, {"kept_bytes": 0}),
    "again_dropout": ({"rematerialize": "layers", "dropout": 0.1}, {}),
    "by_jax": ({"attention": "xla"}, {}),
    "by_jax_ops": ({"attention": "xla"}, {"fused": False}),
    "loop_again_by_jax": ({"rematerialize": "layers", "attention": "xla"}, {}),
}
# The choices of one example nearly cancel, so that these ways have float32's own error there, and loops that are not computed again too.
ALONE = [family for family in FAMILIES if not family.endswith("_choices")]
AGAIN = ("again", "again_ops", "loop_again_without_memory", "again_in_line", "again_dropout")
BY_JAX = ("by_jax", "by_jax_ops", "loop_again_by_jax")
METHODS = ("book_keeping", "ghost", "vmap")
# Pairs of memory, of computing again and of attention meet in the loops; cells of one family share its gradients in float64. Of the other
# ways, single ops are in test_clipped_sum.py, dropout in test_units.py, a traced sum in test_traced_method.py; adapters of a llama are in
# tests/models/test_new_rows.py, and a classifier's head in tests/mechanism/test_rgp.py.
DEFAULT = [
    ("bert_untied", "all", "book_keeping", "loop_again_without_memory"),
    ("bert_untied", "top", "book_keeping", "blocks"),
    ("bert_untied", "bias", "book_keeping", "loop"),
    ("mean_choices", "all", "book_keeping", "blocks"),
    ("decoder", "all", "ghost", "loop_again_by_jax"),
    ("gemma3", "all", "book_keeping", "blocks"),
]
# One layer each in the default suite: what is their own is outside of the layers, or in each of them. Both layers of other cells differ.
ONE_LAYER = {("mean_choices", "all")}
SHALLOW = {cell for cell in DEFAULT if cell[:2] in ONE_LAYER}
CELLS = [
    *product(FAMILIES, ["all"], METHODS, ["blocks"]),
    *product(FAMILIES, ["all"], METHODS[:1], ["ops"]),
    *product(("bert_untied", "roberta", "bert_classifier", "roberta_classifier", "decoder_choices"), ["all"], METHODS[:1], ["dropout"]),
    *product(("bert", "decoder"), ["all"], METHODS[:1], ["in_line", "loop"]),
    *product(("bert", "roberta", "decoder"), SELECTIONS, METHODS, ["blocks"]),
    *product(["roberta"], SELECTIONS, METHODS[:1], ["ops"]),
    *product(("bert", "decoder"), ("bias", "kernels", "lora", "top"), METHODS[:2], ["loop_without_memory"]),
    *product(("bert", "decoder"), SELECTIONS, METHODS[:1], ["dropout"]),
    *product(ROTARY, ("all", "lora", "lora_ffa", "top", "last_layer"), (*METHODS, "traced"), ["blocks"]),
    *product(("llama", "qwen2"), ["bias"], (*METHODS[:1], "traced"), ["blocks"]),
    *product(ROTARY, ("all", "lora"), METHODS[:1], ["ops", "loop_without_memory", "adapter_dropout"]),
    *product(("bert", "decoder", "roberta_choices"), ("lora", "lora_ffa"), METHODS[:1], ["adapter_dropout", "adapter_dropout_ops"]),
    *product(ALONE, ["all"], METHODS[:1], ["loop_again_without_memory", "loop_again_by_jax"]),
    *product(("bert", "decoder"), ["all"], METHODS, [*AGAIN, *BY_JAX]),
    *product(ROTARY, ("all", "lora"), (*METHODS[:1], "traced"), ["again"]),
    *product(("llama", "qwen3"), ("all", "lora"), METHODS[:1], ["by_jax", "loop_again_by_jax"]),
    *product(("bert", "decoder"), ["all"], ["traced"], ["again", "by_jax", "loop_again_by_jax"]),
    *product(("bert", "decoder"), SELECTIONS, METHODS[:2], ["loop_again_without_memory"]),
    *product(("bert", "decoder"), ("lora", "top"), METHODS[:1], ["again", "again_ops", "again_in_line", "again_dropout"]),
]


def cells():
    """Those of every list once, with the number of layers; cells that are not in `DEFAULT` are slow, and two layers of shallow ones."""
    slow = [*(cell for cell in dict.fromkeys(CELLS) if cell not in DEFAULT), *(cell for cell in DEFAULT if cell in SHALLOW)]
    fast = [(*cell, 1 if cell in SHALLOW else 2) for cell in DEFAULT]
    return [*fast, *(pytest.param(*cell, 2, marks=pytest.mark.slow) for cell in slow)]


@pytest.mark.parametrize(("family", "trained", "method", "way", "layers"), cells())
def test_clips_exactly(family, trained, method, way, layers, monkeypatch):
    changes, options = WAYS[way]
    if way.startswith("loop"):
        monkeypatch.setattr(fused_layers, "MOST_IN_LINE", 0)
    # Those of two selections share the gradients of "all"; in the others adapters are trained, or frozen beside what is.
    with_adapters = trained not in ("all", "top", "bias")
    given = case(family, with_adapters=with_adapters, **changes, **({} if layers == 2 else {"layers": layers}))
    assert_exact(given, SELECTIONS.get(trained), method, **options)


def test_the_default_cells_hold_each_method_way_and_kind():
    kinds = {family.split("_")[0] for family, *_ in DEFAULT} | {family.split("_")[-1] for family, *_ in DEFAULT}
    assert {"bert", "decoder", "gemma3", "choices", "untied"} <= kinds
    assert {way for *_, way in DEFAULT} >= {"blocks", "loop", "loop_again_without_memory", "loop_again_by_jax"}
    assert {"all", "bias", "top"} <= {trained for _, trained, *_ in DEFAULT}
    assert {method for _, _, method, _ in DEFAULT} == {"book_keeping", "ghost"}
