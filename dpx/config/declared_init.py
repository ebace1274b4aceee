"""Declares the parameters that a run starts from (`init=...`). No jax.

Trained parameters depend on their training data, so the claim of a run includes the runs and files that it starts from
(`dpx.privacy.origins`).
"""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from dpx.declaration import declaration, require


@declaration
class RandomStart:
    """Draws the parameters at random."""

    kind: Literal["random"] = "random"
    is_random: ClassVar[bool] = True


@declaration
class FromRun:
    """Starts from the parameters of another run.

    They are the parameters that it released at its end, or with `step` those of a checkpoint, which only its own folder holds.
    `disjoint_from` may name `run` itself and runs that it started from. All runs that are not named are charged here too.

    Attributes:
        run: Its folder, its name, or a copy of its release/.
        step: Steps after which its checkpoint was saved; null takes what it released.
        disjoint_from: Runs, by name or by eight or more digits of their ledger's name, of whose data you vouch that they share no unit
            with this run's.
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
    """Starts from an external file.

    Attributes:
        file: An .npz that holds each parameter as float32 under its path, such as layers/qkv/kernel.
        provenance: public vouches that no protected data was used to make the weights; null gives no guarantee.
    """

    file: str
    provenance: Literal["public"] | None = None
    kind: Literal["file"] = "file"
    is_random: ClassVar[bool] = False


@declaration
class FromCheckpoint:
    """Starts from a checkpoint in the layout of Hugging Face (`dpx.interop`).

    A head that the checkpoint does not have is drawn at random. If this run's data may be among what it was trained on, the run has no
    guarantee.

    Attributes:
        path: Folder with config.json and safetensors, or an id on the hub.
        trained_on: Names of data that it was trained on, in addition to the data that its model card lists.
        provenance: public vouches that no protected data was used to make the weights; null gives no guarantee.
    """

    path: str
    trained_on: Sequence[str] = ()
    provenance: Literal["public"] | None = None
    kind: Literal["hf"] = "hf"
    is_random: ClassVar[bool] = False


@declaration
class MeasuredTable:
    """The measured runs by which settings of this run were chosen (`job=design`).

    Attributes:
        name: Its name in the statement.
        identity: Random name of the choice.
        provenance: public vouches that no protected data was read to measure it; null gives no guarantee.
    """

    name: str
    identity: str
    provenance: Literal["public"] | None = None


def chosen_by(table: Path) -> dict[str, Any]:
    """Returns the node `chosen_by` of a config for settings that the user's own measured runs at `table` chose."""
    target = f"{MeasuredTable.__module__}.{MeasuredTable.__qualname__}"
    return {"_target_": target, "name": table.name, "identity": secrets.token_hex(8), "provenance": None}


Init = RandomStart | FromRun | FromFile | FromCheckpoint
