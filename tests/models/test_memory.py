"""Bytes of a step against sums worked out by hand from the shapes."""

import dataclasses

import pytest

from dpx.models.memory import Memory, activations, step_memory

from .declared import declared

TINY_BERT = declared("tiny")

# L = 2, H = 128, F = 512, A = 2; T = 8 tokens, M = 3 slots, V = 100 words, P = 1,000 parameters, b = 5 examples.
SIZES = {"parameters": 1000, "vocabulary_size": 100, "sequence_length": 8, "masked_slots": 3, "microbatch": 5}
# 2 (8 (1280 + 1536) + 2 * 2 * 64) + 3 * 8 * 128 + 3 (200 + 256)
KEPT = 2 * (22_528 + 256) + 3_072 + 1_368
# 2 * 8 (256 + 512)
COTANGENTS = 12_288


def test_activations_of_one_example():
    assert activations(TINY_BERT, 100, 8, 3) == KEPT == 50_008


@pytest.mark.parametrize(
    "method, example", [("plain", 4 * KEPT), ("ghost", 4 * KEPT), ("vmap", 4 * KEPT + 4000), ("book_keeping", 4 * (KEPT + COTANGENTS))]
)
def test_each_use_on_one_device(method, example):
    found = step_memory(TINY_BERT, fsdp=1, method=method, **SIZES)
    assert found == Memory(at_rest=12_000, gathered=0, accumulator=4000, microbatch=4000 + 5 * example, update=12_000)
    assert found.peak == 12_000 + 4000 + 4000 + 5 * example


def test_what_is_shared_and_what_is_narrow():
    narrow = dataclasses.replace(TINY_BERT, dtype="bfloat16")
    shared = step_memory(narrow, fsdp=4, method="plain", **SIZES)
    assert shared == Memory(at_rest=3000, gathered=2000, accumulator=4000, microbatch=4000 + 5 * 2 * KEPT, update=3000)
    assert step_memory(narrow, fsdp=1, method="plain", **SIZES).gathered == 2000
    assert step_memory(TINY_BERT, fsdp=4, method="plain", **SIZES).gathered == 4000


def test_the_larger_of_a_microbatch_and_the_update_counts():
    assert Memory(at_rest=1, gathered=2, accumulator=4, microbatch=8, update=16).peak == 23
