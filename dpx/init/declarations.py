"""Declares the parameters that a run starts from (`init=...`). No jax.

Trained parameters depend on their training data, so the claim of a run includes the runs and files that it starts from
(`dpx.privacy.origins`).
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from dpx.declaration import declaration, require


@declaration
class RandomStart:
    """Draws the parameters at random."""

    kind: Literal["random"] = "random"
    is_random: ClassVar[bool] = True


@declaration
class FromRun:
    """Starts from the parameters of another run; `run` is its folder, its name, or a copy of its `release/`.

    They are the parameters that it released at its end, or with `step` those of its checkpoint after `step` steps, which only its own
    folder holds. `disjoint_from` names runs, by name or by eight or more digits of the name of their ledger: the user vouches that no unit
    of this run's protected data is in any split of their data. It may name `run` itself and runs that it started from. All runs that are
    not named are charged here too.
    """

    run: str
    step: int | None = None
    disjoint_from: Sequence[str] = ()
    kind: Literal["run"] = "run"
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(
            self.step is None or self.step > 0,
            f"init.step={self.step}",
            "at step 0 the parent has not learnt anything",
            "Use 1 or more, or init=random",
        )


@declaration
class FromFile:
    """Starts from an external file: `file` is an .npz that holds each parameter as float32 under its path, such as `layers/qkv/kernel`.

    With `provenance="public"` the user vouches that no protected data was used to make them; without it the run has no guarantee.
    """

    file: str
    provenance: Literal["public"] | None = None
    kind: Literal["file"] = "file"
    is_random: ClassVar[bool] = False


@declaration
class FromCheckpoint:
    """Starts from the checkpoint in the folder `path`, or of the hub id `path`: `config.json` and safetensors (`dpx.interop`).

    A head that the checkpoint does not have is drawn at random. With `provenance="public"` the user vouches as for a file. `trained_on`
    names data that it was trained on, in addition to the data that its model card lists; if this run's data may be among it, the run has no
    guarantee.
    """

    path: str
    trained_on: Sequence[str] = ()
    provenance: Literal["public"] | None = None
    kind: Literal["hf"] = "hf"
    is_random: ClassVar[bool] = False


Init = RandomStart | FromRun | FromFile | FromCheckpoint
