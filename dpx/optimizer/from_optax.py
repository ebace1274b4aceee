"""Finds, checks and makes optax's optimisers by name. An optimiser that cannot be used is refused in one line, before an array exists.

Declared arguments are checked against the function's signature, with errors in the user's terms. Optax's annotations are wide (a number may
be an array, a schedule or a flag), and a config holds only numbers, flags, texts and lists: the kinds of values that an argument takes are
found from its annotation together with its default.
"""

import difflib
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dpx.declaration import ConfigError, require

LEARNING_RATE = "learning_rate"
_PATH = "optimizer.arguments"
_TYPE = "the name of a type, such as bfloat16"

# The name of the mask in a config.
BERT = "bert"

# Official BERT code exempts LayerNorm parameters and every bias from decay.
_EXEMPT = ("bias", "scale", "output_bias")


def decay_mask(params: Any) -> Any:
    """Returns true for each parameter that weight decay applies to under the mask `bert`: all but LayerNorm parameters and biases.

    A parameter may be a leaf of `params`, or a tuple of its layers.
    """

    def is_decayed(path: Any, _: Any) -> bool:
        return next((key.key for key in reversed(path) if isinstance(key, jax.tree_util.DictKey)), None) not in _EXEMPT

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def checked(function: Callable[..., Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which to call `function`. Raises `ConfigError` for an unknown, a missing or a mistyped argument."""
    parameters = {name: one for name, one in inspect.signature(function).parameters.items() if name != LEARNING_RATE}
    for name in declared:
        require(name in parameters, f"{_PATH}.{name}", "unknown key", nearest(name, parameters, f"{_PATH}."))
    for name, one in parameters.items():
        is_needed = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        fix = f"Add {_PATH}.{name}=..." if _kinds(one) else "A config cannot hold such a value: use another optimiser"
        require(not is_needed or name in declared, f"{_PATH}.{name}", "no value given", fix)
    return {name: _value(parameters[name], value) for name, value in declared.items()}


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the fix for an unknown name: the known name that is closest to it, or all known names."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {prefix}{close[0]}?" if close else f"Known here: {', '.join(known)}"


def _parts(hint: Any) -> list[Any]:
    """Returns the alternatives of a union, or the hint itself."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [part for argument in typing.get_args(hint) for part in _parts(argument)]
    return [hint]


def _is_mask(name: str) -> bool:
    return name == "mask" or name.endswith("_mask")


def _kinds(parameter: inspect.Parameter) -> tuple[str, ...]:
    """Returns the kinds of values that an argument takes, as words for a message; empty if a config cannot hold such a value."""
    parts, default, name = _parts(parameter.annotation), parameter.default, parameter.name
    texts = tuple(value for part in parts if typing.get_origin(part) is typing.Literal for value in typing.get_args(part))
    is_flag = isinstance(default, bool) or parts == [bool]
    is_number = not is_flag and (float in parts or type(default) is float)
    found = {
        "true or false": is_flag,
        "a whole number": not is_flag and not is_number and (int in parts or type(default) is int),
        "a number": is_number,
        BERT: _is_mask(name),
        _TYPE: "dtype" in name,
        " or ".join(texts) or "text": bool(texts) or (str in parts and "dtype" not in name),
        "a list": any(typing.get_origin(part) in (tuple, list) for part in parts),
        "null": default is None or type(None) in parts,
    }
    return tuple(word for word, is_taken in found.items() if is_taken)


def _value(parameter: inspect.Parameter, value: Any) -> Any:
    """Returns `value` as optax takes it. Raises `ConfigError` if it is of another kind."""
    kinds, shown = _kinds(parameter), f"{_PATH}.{parameter.name}={value}"
    is_number = type(value) in (int, float)
    require(not is_number or math.isfinite(value), shown, "not a finite number", "Correct the value")
    fits = {
        "true or false": isinstance(value, bool),
        "a whole number": type(value) is int,
        "a number": is_number,
        BERT: value == BERT,
        _TYPE: isinstance(value, str) and _is_type(value),
        "text": isinstance(value, str),
        "a list": isinstance(value, list | tuple),
        "null": value is None,
    }
    fix = "Leave it out" if kinds in ((), ("null",)) else "Correct the value"
    if not any(fits.get(kind, isinstance(value, str) and value in kind.split(" or ")) for kind in kinds):
        raise ConfigError(shown, f"expected {' or '.join(kinds) or 'a value that a config cannot hold'}", fix)
    if _is_mask(parameter.name) and value == BERT:
        return decay_mask
    if type(value) is int and type(parameter.default) is float:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def _is_type(value: str) -> bool:
    try:
        jnp.dtype(value)
    except TypeError:
        return False
    return True


_READS_LOSS = "its update reads the loss of the examples, which is not released"
_EVALUATES_OTHERS = "the parameters to evaluate differ from the ones that it updates"
_IS_MECHANISM = "it clips and adds noise itself, and mechanism=dp_sgd does that"
# Optimisers that a trial (`_try`) cannot refuse, or could refuse only with a less clear reason.
_REFUSED = {
    "lbfgs": "its line search evaluates the loss of the examples, which is not released",
    "momo": _READS_LOSS,
    "momo_adam": _READS_LOSS,
    "polyak_sgd": _READS_LOSS,
    "reduce_on_plateau": _READS_LOSS,
    "sophia": "its update evaluates the loss of the examples for its second derivatives, which are not released",
    "hutchinson_estimator_diag_hessian": "it evaluates the loss of the examples for its second derivatives, which are not released",
    "sam": "it takes further gradients within a step, which are not released",
    "lookahead": _EVALUATES_OTHERS,
    "schedule_free": _EVALUATES_OTHERS,
    "schedule_free_adamw": _EVALUATES_OTHERS,
    "schedule_free_sgd": _EVALUATES_OTHERS,
    "dpsgd": _IS_MECHANISM,
    "differentially_private_aggregate": _IS_MECHANISM,
}
_USE_ANOTHER = "Use an optimiser whose update takes gradient, state and parameters, such as adamw, lion or sgd"
# Shapes of a trial: a matrix that is large enough to be factored, a vector, and a parameter of two layers.
_MATRIX, _VECTOR = jax.ShapeDtypeStruct((256, 128), jnp.float32), jax.ShapeDtypeStruct((128,), jnp.float32)
_TRIAL = {"head": {"kernel": _MATRIX, "bias": _VECTOR}, "layers": {"dense": {"kernel": (_MATRIX, _MATRIX)}}}


def transformation(name: str, arguments: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
    """Returns the optimiser `name` with its learning rate in its state, as `hyperparams["learning_rate"]`, and all other arguments fixed.

    Only the learning rate is injected: any other argument would become an array, and the same formula would give other bits.
    Raises `ConfigError` for a name or an argument that optax does not have, and for an update that needs more than gradient, state and
    parameters.
    """
    value = f"optimizer.name={name}"
    require(name not in _REFUSED, value, _REFUSED.get(name, ""), _USE_ANOTHER)
    function = getattr(optax, name, None) or getattr(contrib, name, None)
    require(function is not None and not name.startswith("_"), value, "neither optax nor optax.contrib has it", nearest(name, names()))
    assert function is not None
    reason = "not an optimiser with a learning rate, which lr_schedule could give"
    require(_is_optimizer(name, function), value, reason, nearest(name, names()))
    given = checked(function, arguments)
    fixed = [argument for argument in inspect.signature(function).parameters if argument != LEARNING_RATE]
    made = optax.inject_hyperparams(function, static_args=fixed)
    _try(name, functools.partial(made, **{LEARNING_RATE: 1.0}, **given))
    return made(**{LEARNING_RATE: 1.0}, **given)


def names() -> list[str]:
    """Returns the optimisers of `optax` and `optax.contrib` that can be named.

    They have a learning rate, and are not among the names that are always refused.
    """
    found = {name for module in (optax, contrib) for name in vars(module) if _is_optimizer(name, getattr(module, name))}
    return sorted(found - set(_REFUSED))


def _is_optimizer(name: str, value: Any) -> bool:
    is_function = inspect.isfunction(value) or isinstance(value, functools.partial)
    # A part of an optimiser may take a learning rate too.
    is_part = name.startswith(("_", "scale_by_"))
    return is_function and not is_part and LEARNING_RATE in inspect.signature(value).parameters


def _try(name: str, make: Callable[[], optax.GradientTransformationExtraArgs]) -> None:
    """Traces one update on shapes alone. Raises `ConfigError` if it fails, or changes the form of its state or of the parameters."""
    value = f"optimizer.name={name}"
    try:
        made = make()
        state = jax.eval_shape(made.init, _TRIAL)
        updates, after = jax.eval_shape(lambda *given: made.update(*given), _TRIAL, state, _TRIAL)
    except ConfigError:
        raise
    except Exception as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise ConfigError(value, f"optax cannot make an update with these arguments ({lines[0]})", _USE_ANOTHER) from error
    is_stable = _form(after) == _form(state) and _form(updates) == _form(_TRIAL)
    require(is_stable, value, "its update changes the form of its state or of the parameters", _USE_ANOTHER)


def _form(tree: Any) -> Any:
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
