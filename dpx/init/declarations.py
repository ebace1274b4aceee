"""Which parameters a run starts from, as declared (`init=...`). No jax.

Parameters that were trained before carry what they were trained on, so a run answers for what it starts from (`dpx.privacy.origins`).
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from dpx.declaration import declaration, require


@declaration
class RandomStart:
    """Parameters are drawn at random."""

    kind: Literal["random"] = "random"
    is_random: ClassVar[bool] = True


@declaration
class FromRun:
    """Parameters of the run `run`: its folder, its name, or a copy of its `release/`.

    They are what it released at its end, or with `step` those of its checkpoint after so many steps, which only its own folder holds.
    `disjoint_from` names runs, by name or by eight or more digits of their ledger's name: the user's word that no unit of this run's
    protected data is in any split of their data. They are the run itself, and runs that it started from. All others are charged here too.
    """

    run: str
    step: int | None = None
    disjoint_from: Sequence[str] = ()
    kind: Literal["run"] = "run"
    is_random: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require(self.step is None or self.step > 0, f"init.step={self.step}", "nothing was learnt by then", "Use 1 or more, or init=random")


@declaration
class FromFile:
    """Parameters from elsewhere: `file` is an .npz that holds each as float32 under its path, such as `layers/qkv/kernel`.

    `provenance="public"` is the user's word that nothing of the protected data went into them; without it there is no guarantee.
    """

    file: str
    provenance: Literal["public"] | None = None
    kind: Literal["file"] = "file"
    is_random: ClassVar[bool] = False


@declaration
class FromCheckpoint:
    """Weights of the checkpoint in the folder `path`, or of the hub id of that name: `config.json` and safetensors (`dpx.interop`).

    A head that the checkpoint does not have is drawn at random. `provenance="public"` is the user's word, as for a file. `trained_on`
    names data that it was trained on, beside what its model card lists; where this run's data may be among it, there is no guarantee.
    """

    path: str
    trained_on: Sequence[str] = ()
    provenance: Literal["public"] | None = None
    kind: Literal["hf"] = "hf"
    is_random: ClassVar[bool] = False


Init = RandomStart | FromRun | FromFile | FromCheckpoint
