"""Shapes that cannot be built are refused at their edges."""

import dataclasses

import pytest

from dpx.declaration import ConfigError

from .declared import declared


@pytest.mark.parametrize("model", ["tiny", "decoder_tiny"])
@pytest.mark.parametrize(
    "changes, words",
    [
        ({"dropout": -1e-9}, "model.dropout=-1e-09: is not a rate"),
        ({"dropout": 1.0}, "model.dropout=1.0: is not a rate"),
        ({"layers": 0}, "sizes must be positive"),
        ({"width": 0}, "sizes must be positive"),
        ({"heads": 0}, "sizes must be positive"),
        ({"feed_forward": 0}, "sizes must be positive"),
        ({"positions": 0}, "sizes must be positive"),
        ({"heads": 3}, "model.heads=3: does not divide width 128"),
        ({"attention": "xla", "dropout": 0.1}, "model.attention=xla, model.dropout=0.1: jax.nn.dot_product_attention drops no"),
        ({"attention": "cudnn"}, "model.attention=cudnn, model.dtype=float32, 64 numbers a head: cuDNN's attention needs bfloat16"),
        ({"attention": "cudnn", "dtype": "bfloat16", "heads": 32}, "4 numbers a head: cuDNN's attention needs"),
    ],
)
def test_a_shape_that_cannot_be_built_is_refused(model, changes, words):
    with pytest.raises(ConfigError, match=words):
        dataclasses.replace(declared(model), **changes)


@pytest.mark.parametrize("model", ["tiny", "decoder_tiny"])
@pytest.mark.parametrize("changes", [{"dropout": 0.0}, {"dropout": 0.999}, {"layers": 1}, {"heads": 128}, {"feed_forward": 1}])
def test_the_edges_are_built(model, changes):
    found = dataclasses.replace(declared(model), **changes)
    assert all(getattr(found, name) == value for name, value in changes.items())
