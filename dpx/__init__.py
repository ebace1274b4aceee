"""dpx: declare a private-training experiment in YAML; get a model and a true privacy statement."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the jobs that only plan or account must not import jax.
    if name in ("clipped_sum", "plain_sum"):
        from dpx.clipping import clipped_sum as module

        return getattr(module, name)
    if name == "ClippedSum":
        from dpx.clipping.result import ClippedSum

        return ClippedSum
    if name == "clipped_grad":
        from dpx.clipping.clipped_grad import clipped_grad

        return clipped_grad
    if name == "load":
        from dpx.load_run import load

        return load
    raise AttributeError(f"module 'dpx' has no attribute {name!r}")
