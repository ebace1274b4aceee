"""A chain as declared: its stages, in which each names the stages that feed it. Starts no jax and composes nothing."""

import dataclasses
import math
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from dpx.config.instantiate import make
from dpx.config.interpolations import MOST_POINTS
from dpx.declaration import ConfigError, declaration, require

_NAME = re.compile(r"[a-z][a-z0-9_]*")
# Groups that a stage's own keys decide, or that make a run part of something else.
_NOT_OPTIONS = {"job": "Use the key job of the stage", "tune": "Launch the search by itself", "init": "Remove init of the stage"}


@declaration
class Shared:
    """What every stage begins with; the values of a stage come after these."""

    options: dict[str, str | None] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)


@declaration
class Stage:
    """One run of a chain: what `python -m dpx <group>=<option> ...` with these `options` and `values` would run.

    `init` names the stage whose weights it starts from, `vocabulary` the one whose vocabulary it reads, by default the same. A stage with
    `job=prepare` cuts text into rows and fits a vocabulary, and trains nothing. `disjoint_from` names stages: the user vouches that no unit
    of one is in any data of the other. With `provenance=public` the user vouches that none of its text needs protection. `sweep` holds
    lists of values by key: every combination runs, and the best by `choose_by` of its held-out rows is chosen. Chains that give a stage one
    `name` share its run where its config is the same; with `shared_by_replicates` all repeats of a chain share it as well.
    """

    options: dict[str, str | None] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    job: Literal["train", "prepare"] = "train"
    init: str | None = None
    vocabulary: str | None = None
    disjoint_from: list[str] | tuple[str, ...] = ()
    provenance: Literal["public"] | None = None
    sweep: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    choose_by: str | None = None
    name: str | None = None
    shared_by_replicates: bool = False

    @property
    def feeds(self) -> dict[str, str]:
        """The stages that feed this one, by key."""
        return {key: fed for key, fed in (("init", self.init), ("vocabulary", self.vocabulary)) if fed is not None}


@declaration
class Chain:
    """Stages by name. Raises `ConfigError` for a stage that is missing, for stages in a circle, and for one that cannot feed another."""

    stages: dict[str, Stage]
    common: Shared = Shared()

    def __post_init__(self) -> None:
        require(bool(self.stages), "chain.stages", "a chain has at least one stage", "Declare chain.stages.<name>")
        for value, part in (("chain.common", self.common), *((f"chain.stages.{name}", stage) for name, stage in self.stages.items())):
            for key in (*part.options, *part.values, *getattr(part, "sweep", ())):
                root = re.split(r"\W", key.lstrip("+~"))[0]
                require(root != "hydra", f"{value}: {key}", "Hydra's node belongs to the command, not to a stage", "Remove it")
                reason = "a recipe does not choose what leaves this machine"
                require(root not in ("logger", "callbacks"), f"{value}: {key}", reason, "Set it in conf/local/default.yaml")
        for name, stage in self.stages.items():
            value = f"chain.stages.{name}"
            require(bool(_NAME.fullmatch(name)), value, "is not a name of small letters, digits and _", "Rename the stage")
            named = [*stage.feeds.items(), *(("disjoint_from", other) for other in stage.disjoint_from)]
            for key, other in named:
                known = [one for one in self.stages if one != name]
                fix = f"Name one of {', '.join(known) or 'more stages'}"
                require(other in known, f"{value}.{key}={other}", "no other stage has this name", fix)
            for group, fix in _NOT_OPTIONS.items():
                is_own = stage.options.get(group) is not None and (group != "init" or stage.init is not None)
                require(not is_own, f"{value}.options.{group}={stage.options.get(group)}", "this stage decides it by another key", fix)
            if stage.init is not None:
                parent = self.stages[stage.init]
                require(parent.job == "train", f"{value}.init={stage.init}", "this stage trains no weights", "Name it under vocabulary")
                reason = "this stage has several points, and which one is chosen is not known beforehand"
                require(not parent.sweep, f"{value}.init={stage.init}", reason, "Declare the chosen values, and remove its sweep")
            repeated = [fed for fed in stage.feeds.values() if not self.stages[fed].shared_by_replicates]
            fed = "".join(repeated[:1])
            reason = f"it is fed by {fed}, which every repeat runs again, so that this stage would be another one each time"
            fix = f"Set {value.rpartition('.')[0]}.{fed}.shared_by_replicates=true as well"
            require(not (stage.shared_by_replicates and repeated), f"{value}.shared_by_replicates", reason, fix)
            empty = [key for key, values in stage.sweep.items() if not values]
            require(not empty, f"{value}.sweep.{''.join(empty[:1])}", "lists no value", "List values, or remove the key")
            points = math.prod(map(len, stage.sweep.values()))
            require(
                points <= MOST_POINTS,
                f"{value}.sweep",
                f"gives {points:,} points, and a sweep has at most {MOST_POINTS:,}",
                "List fewer values",
            )
        self.in_order()

    def in_order(self) -> list[str]:
        """Returns the names of the stages, each after the stages that feed it. Raises `ConfigError` for a circle."""
        try:
            TopologicalSorter({name: list(stage.feeds.values()) for name, stage in self.stages.items()}).prepare()
        except CycleError as error:
            circle = " <- ".join(reversed(error.args[1]))
            raise ConfigError("chain.stages", f"they feed each other in a circle ({circle})", "Remove one init or vocabulary") from None
        ordered: list[str] = []
        while len(ordered) < len(self.stages):
            ready = (name for name, one in self.stages.items() if name not in ordered and set(one.feeds.values()) <= set(ordered))
            ordered.append(next(ready))
        return ordered

    def before(self, name: str) -> Iterator[str]:
        """Returns the stages whose weights `name` starts from, nearest first."""
        while (parent := self.stages[name].init) is not None:
            yield (name := parent)

    def are_disjoint(self, one: str, other: str) -> bool:
        """Returns whether the user vouches that two stages share no unit."""
        first, second = self.stages[one], self.stages[other]
        return other in first.disjoint_from or one in second.disjoint_from or "public" in (first.provenance, second.provenance)


def declared(node: Any) -> Chain:
    """Returns the chain that the key `chain` of a config declares. Raises `ConfigError`, naming the key, for anything else."""
    require(isinstance(node, dict), "chain", "is not a mapping", "Declare chain.stages.<name>")
    require(isinstance(node.get("stages", {}), dict), "chain.stages", "is not a mapping of names to stages", "Write chain.stages.<name>")
    stages = {name: _of(Stage, one or {}, f"chain.stages.{name}") for name, one in (node.get("stages") or {}).items()}
    common = _of(Shared, node.get("common") or {}, "chain.common")
    rest = {key: value for key, value in node.items() if key not in ("stages", "common")}
    return _of(Chain, {"stages": stages, "common": common, **rest}, "chain")


def _of(kind: type, node: Any, path: str) -> Any:
    require(isinstance(node, dict), path, "is not a mapping", "Give it options and values")
    return make({"_target_": f"{kind.__module__}.{kind.__qualname__}", **node}, path)
