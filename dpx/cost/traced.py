"""Counts matrix-product FLOPs and temporary memory of a traced or compiled program, without time measurements."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import partial_eval


def matmul_flops(function: Callable, *arguments: Any, platform: str | None = None, dtype: Any = None) -> int:
    """Returns the FLOPs of matrix products and convolutions in one call, after dead-code elimination, with loops multiplied out.

    Of a branch the most expensive side counts, of a loop of unknown length one round, and of a choice by platform the side for `platform`
    (`None`: the side for accelerators, which no platform name selects). With `dtype` only products of a factor of that type count.
    Arguments may be `ShapeDtypeStruct`s.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    live, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return _count(live, (platform, dtype))


def _count(jaxpr: core.Jaxpr, wanted: tuple[str | None, Any]) -> int:
    return sum(_cost(eqn, wanted) for eqn in jaxpr.eqns)


def _cost(eqn: Any, wanted: tuple[str | None, Any]) -> int:
    name, params = eqn.primitive.name, eqn.params
    platform, dtype = wanted
    if name in ("dot_general", "conv_general_dilated") and dtype not in (None, *(factor.aval.dtype for factor in eqn.invars[:2])):
        return 0
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        inner = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2 * inner * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        kernel, places = eqn.invars[1].aval.shape, params["dimension_numbers"].rhs_spec
        return 2 * math.prod(kernel) // kernel[places[0]] * math.prod(eqn.outvars[0].aval.shape)
    if name == "cond":
        costs = [_count(branch.jaxpr, wanted) for branch in params["branches"]]
        by_platform = params.get("branches_platforms")
        if by_platform is None:
            return max(costs)
        named = [place for place, platforms in enumerate(by_platform) if platforms and platform in platforms]
        return costs[(named or [place for place, platforms in enumerate(by_platform) if platforms is None])[0]]
    times = params["length"] if name == "scan" else 1
    bodies = [params[name] for name in ("jaxpr", "call_jaxpr", "body_jaxpr") if name in params]
    return times * sum(_count(body.jaxpr if isinstance(body, core.ClosedJaxpr) else body, wanted) for body in bodies)


def temporary_bytes(function: Callable, *arguments: Any) -> int:
    """Returns the bytes of the compiler's own temporary buffers of the jitted function, on this machine's first device."""
    return compiled_temporaries(jax.jit(function).lower(*arguments).compile())


def compiled_temporaries(compiled: Any) -> int:
    """Returns the bytes of temporary buffers of a compiled program, on one device."""
    return compiled.memory_analysis().temp_size_in_bytes
