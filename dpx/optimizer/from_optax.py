"""Finds, checks and makes optax's optimisers by name. An optimiser that cannot be used is refused in one line, before an array exists."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from dpx.declaration import ConfigError, require
from dpx.optimizer.arguments import LEARNING_RATE, checked, nearest

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
