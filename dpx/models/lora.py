"""Adds low-rank adapters to a model's dense maps: y = x W + (alpha / r) x A B with W frozen (LoRA: Hu et al. 2022).

Yu et al. 2022 train them with privacy.

Adapters are ordinary parameters, stacked like the layers: `layers/lora/<target>/a` [L, p, r], `b` [L, r, d] and `scale` [L],
alpha / r, a constant that no selection trains. `dropout` [L] is such a constant too, present if it is above 0: the rate of inverted dropout
on an adapter's input, each with separate masks (dropout.py), if the loss is given a key. If a tree holds adapters, a model adds them; B
starts at zero, and the model then computes the same as without them. `lora_ffa` (FFA-LoRA: Sun et al. 2024) trains B alone.

L: layers, B: examples, T: tokens, p: inputs, d: outputs of a dense map, c: outputs of one target alone, r: rank.
"""

import difflib
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dpx.clipping import ops
from dpx.declaration import ConfigError, require
from dpx.models import dropout as drop

# (what tokens hold, site, rate) -> the same with parts dropped, in one layer (dropout.of_tokens).
Drops = Callable[[Array, int, Any], Array]


class Target(NamedTuple):
    """The target of an adapter: one part, by its number, of the outputs of the dense map `weight`, which are divided into `parts`."""

    weight: str
    part: int = 0
    parts: int = 1

    def columns(self, x: Array) -> Array:
        """Returns the target's outputs among all outputs [..., d]."""
        own = x.shape[-1] // self.parts
        return x if self.parts == 1 else x[..., self.part * own : (self.part + 1) * own]

    def placed(self, x: Array) -> Array:
        """Returns `x` [..., c] among all outputs, with zeros for the other outputs."""
        own = x.shape[-1]
        around = (self.part * own, (self.parts - self.part - 1) * own)
        return x if self.parts == 1 else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [around])


TARGETS = {
    "query": Target("qkv", 0, 3),
    "key": Target("qkv", 1, 3),
    "value": Target("qkv", 2, 3),
    "attention_out": Target("attention_out"),
    "up": Target("up"),
    "down": Target("down"),
}
# What a stack of layers can add to: the targets of adapters, and all outputs of `qkv` together, as one matrix (`dpx.mechanism.carriers`).
ADDED = TARGETS | {"qkv": Target("qkv")}
# The targets of a layer with separate maps for query, key and value (shape.py).
APART = {name: Target(name) for name in (*TARGETS, "gate")}
# The place of an adapter decides its dropout's masks.
_PLACES = (*ADDED, "gate")


def targets_of(layers: Any) -> dict[str, Target]:
    """Returns the targets of adapters of a stack of layers, by name."""
    return TARGETS if "qkv" in layers else APART


def adapters_of(lora: Any, weight: str) -> Iterator[tuple[str, Target, Any]]:
    """Yields (name, target, its parameters) of each adapter of one dense map; `lora` holds the adapters of one layer, and may be empty."""
    of_weight = {name: target for name, target in ADDED.items() if target.weight == weight} or {weight: APART[weight]}
    for name, target in of_weight.items():
        if name in lora:
            yield name, target, lora[name]


def adapter_input(x_BTp: Array, name: str, p: Any, drops: Drops) -> Array:
    """Returns the input of the adapter `name`: x after its dropout.

    With a fixed mask it is linear and diagonal, so it also takes a cotangent of that input to one of x.
    """
    return drops(x_BTp, drop.ADAPTERS + _PLACES.index(name), p["dropout"]) if "dropout" in p else x_BTp


def adapted(y_BTd: Array, x_BTp: Array, lora: Any, weight: str, drops: Drops) -> Array:
    """Returns y plus the outputs of a dense map's adapters for its input, computed by ops."""
    for name, target, p in adapters_of(lora, weight):
        own_BTp = adapter_input(x_BTp, name, p, drops)
        y_BTd = y_BTd + target.placed(ops.low_rank(own_BTp, p["a"], p["b"]) * p["scale"].astype(y_BTd.dtype))
    return y_BTd


def forward(y_BTd: Array, x_BTp: Array, lora: Any, weight: str, drops: Drops) -> tuple[Array, dict[str, Array]]:
    """Returns (y plus the adapters' outputs for x, what `backward` needs: h_BTr of each adapter, (alpha / r) x A)."""
    saved = {}
    for name, target, p in adapters_of(lora, weight):
        saved[f"h_{name}"] = (adapter_input(x_BTp, name, p, drops) @ p["a"]) * p["scale"]
        y_BTd = y_BTd + target.placed(saved[f"h_{name}"] @ p["b"])
    return y_BTd, saved


def backward(g_BTd: Array, lora: Any, saved: Any, weight: str, factors: Any, drops: Drops) -> Array | None:
    """Returns the part of the cotangent of x that the adapters add, or None without adapters.

    For each adapter `factors["lora"]` gets h, the cotangents of x A and of its outputs (its gradients follow from these), and the function
    that makes its input from x.
    """
    total = None
    for name, target, p in adapters_of(lora, weight):
        g_BTc = target.columns(g_BTd)
        g_BTr = (g_BTc @ p["b"].T) * p["scale"]
        own_of = partial(adapter_input, name=name, p=p, drops=drops)
        factors.setdefault("lora", {})[name] = (saved.get(f"h_{name}"), g_BTr, g_BTc, own_of)
        own = own_of(g_BTr @ p["a"].T)
        total = own if total is None else total + own
    return total


def add_adapters(
    params: Any, key: Any, *, rank: int, alpha: float, targets: tuple[str, ...] = ("query", "value"), dropout: float = 0.0
) -> Any:
    """Returns a model's parameters with adapters of the targets that any of the patterns `targets` names ("*": all of `targets_of`).

    A is drawn from N(0, 1 / p) with `key`, B is zero. Raises `ConfigError` for a rank that a matrix cannot have, for a pattern that names
    no target, and for parameters that already have adapters or that have no layers.
    """
    require(
        "layers" in params and "lora" not in params["layers"],
        "parameters",
        "already have adapters, or have no layers",
        "Give the parameters of a model without adapters",
    )
    known = targets_of(params["layers"])
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in known):
            nearest = ", ".join(difflib.get_close_matches(pattern, known, 3, 0.0))
            raise ConfigError(pattern, "does not match any target of adapters", f"The nearest are {nearest}")
    adapters = {}
    for place, (name, target) in enumerate(known.items()):
        if any(fnmatchcase(name, pattern) for pattern in targets):
            L, p, d = params["layers"][target.weight]["kernel"].shape
            fits = 0 < rank <= min(p, d // target.parts)
            require(
                fits,
                f"rank={rank}",
                f"is not possible for a matrix of shape {(p, d // target.parts)}",
                "Use a rank of at least 1 and below both sizes",
            )
            a_Lpr = jax.random.normal(jax.random.fold_in(key, place), (L, p, rank)) * p**-0.5
            adapters[name] = {"a": a_Lpr, "b": jnp.zeros((L, rank, d // target.parts)), "scale": jnp.full((L,), alpha / rank)}
            adapters[name] |= {"dropout": jnp.full((L,), dropout)} if dropout else {}
    return params | {"layers": params["layers"] | {"lora": adapters}}


def merge_adapters(params: Any) -> Any:
    """Returns weights without adapters that compute the same: W + (alpha / r) A B.

    The model's layers must be in one stack (`trainable.whole`).
    """
    layers = {name: dict(leaf) for name, leaf in params["layers"].items() if name != "lora"}
    for name, p in params["layers"].get("lora", {}).items():
        target = targets_of(layers)[name]
        product_Lpc = jnp.einsum("l,lpr,lrc->lpc", p["scale"], p["a"], p["b"], precision="highest")
        layers[target.weight]["kernel"] = layers[target.weight]["kernel"] + target.placed(product_Lpc)
    return params | {"layers": layers}
