"""dpx: declare a private-training experiment in YAML; get a model and a true privacy statement."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the jobs that only plan or account must not import jax.
    if name in ("clipped_sum", "plain_sum", "ClippedSum"):
        from dpx.clipping import clipped_sum as module

        return getattr(module, name)
    if name == "clipped_grad":
        from dpx.clipping.clipped_grad import clipped_grad

        return clipped_grad
    if name == "load":
        from dpx.loading import load

        return load
    raise AttributeError(f"module 'dpx' has no attribute {name!r}")
