"""Which parameters weight decay applies to."""

from typing import Any

import jax

# The name of the mask in a config.
BERT = "bert"

# Official BERT code exempts LayerNorm parameters and every bias from decay.
_EXEMPT = ("bias", "scale", "output_bias")


def decay_mask(params: Any) -> Any:
    """True where weight decay applies under the mask `bert`: everything but LayerNorm parameters and biases. A parameter may be a leaf of
    `params`, or a tuple of its layers."""
    return jax.tree_util.tree_map_with_path(lambda path, _: _name(path) not in _EXEMPT, params)


def _name(path: Any) -> Any:
    return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None)
