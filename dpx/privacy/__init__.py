"""Privacy accounting: events, accountants, the ledger, and functions of them.

It uses NumPy only, and imports neither jax nor an experiment.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpx.privacy.accounting import compose, epsilon
    from dpx.privacy.solve import noise_multiplier

__all__ = ["compose", "epsilon", "noise_multiplier"]

_HOMES = {"compose": "dpx.privacy.accounting", "epsilon": "dpx.privacy.accounting", "noise_multiplier": "dpx.privacy.solve"}


def __getattr__(name: str) -> Any:
    # dp-accounting takes two seconds to import: an import of declarations alone must not take that time.
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
