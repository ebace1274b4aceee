"""Trains a private model from an experiment declared in YAML, and states the privacy that its run really has."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Imported on first use: jobs that only plan or account must not import jax.
_MODULES = {
    "clipped_sum": "dpx.clipping.clipped_sum",
    "plain_sum": "dpx.clipping.clipped_sum",
    "ClippedSum": "dpx.clipping.groups",
    "clipped_grad": "dpx.clipping.clipped_grad",
    "weighted_grad": "dpx.clipping.clipped_grad",
    "ClippedGradients": "dpx.clipping.clipped_grad",
    "add_noise": "dpx.mechanism.tree_noise",
    "Ledger": "dpx.claim.own_loop",
    "load": "dpx.pages.run_table",
    "runs": "dpx.pages.run_table",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "privacy", "sampler"})


def __getattr__(name: str) -> Any:
    if name in ("privacy", "sampler"):
        return importlib.import_module(f"dpx.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'dpx' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
