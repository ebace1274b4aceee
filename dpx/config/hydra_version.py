"""What differs between Hydra 1.3 with OmegaConf 2.3 and Hydra 1.4 with OmegaConf 2.4: here and nowhere else."""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from omegaconf import OmegaConf, __version__

IS_NEXT = not __version__.startswith("2.3.")
# The defaults of Hydra that are meant: 1.4 has one kind, and warns of a choice.
VERSION_BASE: dict[str, Any] = {} if IS_NEXT else {"version_base": "1.3"}


def register_resolver(name: str, resolver: Callable[..., Any]) -> None:
    """Registers a resolver of YAML, in place of one of the same name."""
    # Of the other version, `register_resolver` is the function that 2.0 had.
    register: Any = OmegaConf.register_resolver if IS_NEXT else OmegaConf.register_new_resolver
    register(name, resolver, replace=True)


def user_may_run_anything() -> AbstractContextManager[Any]:
    """Inside the block Hydra makes what its own node names: files cannot name anything there (`dpx.config.hydra_node`), and the user may.

    Hydra 1.4 asks for a list of what may be made, and warns without one.
    """
    if not IS_NEXT:
        return contextlib.nullcontext()
    # Not in Hydra 1.3.
    import hydra.utils as of_next

    names: Any = of_next
    return names.execution_whitelist(names.UNSAFE_DISABLE_EXECUTION_CHECKS)
