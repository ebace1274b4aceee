"""Bounds what the interpolations of a config may become: each `${b}` is a copy, so a few lines that name each other twice take all memory.

The sizes are added up without resolving the values. Only a computed part of a key, as in `${sizes.${model.name}}`, is resolved, once it is
known to be small.

The points that the axes of a sweep give are counted likewise, before Hydra lists them all.
"""

import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from omegaconf import DictConfig, ListConfig, Node
from omegaconf._utils import split_key
from omegaconf.errors import GrammarParseError
from omegaconf.grammar_parser import parse

from dpx.declaration import ConfigError, require

# Characters of a resolved config; those of dpx's recipes have at most some ten thousand.
MOST = 1_000_000
MOST_INTERPOLATIONS = 10_000
# What it takes to resolve one interpolation, in characters.
_COST = MOST // MOST_INTERPOLATIONS
# OmegaConf needs some ten of Python's calls for each.
_MOST_LEVELS = 50

# Resolvers whose first argument is the key of what they return.
_OF_A_KEY = ("oc.select", "oc.dict.keys", "oc.dict.values")
# What the resolvers of `dpx.config.identity` read.
READS = {
    "of_checkpoint": ("init.path",),
    "without_checkpoint": ("init.path",),
    "at_most_positions": ("model._target_", "model.path", "model.positions"),
    "none_if_causal": ("task._target_",),
    "number_of_labels": ("data.source.labels", "data.source.label_names"),
    "no_labels_of_completions": tuple(
        f"data.source.{name}" for name in ("prompt_field", "completion_field", "messages_field", "target_field", "label_names")
    ),
    "by_trained": ("train._target_",),
}


def require_bounded(root: DictConfig) -> None:
    """Raises `ConfigError` for a value of `root`, Hydra's own node aside, that would become too large, or that leads to itself."""
    sizes, total = _Sizes(), 0
    for key in root:
        if key != "hydra":
            total += sizes.of(root._get_node(key))
            _require_few(total, str(key))


def interpolations(tree: Any) -> Iterator[Any]:
    """Yields the interpolations in a parsed text or in a part of one, each after those within it."""
    for part in tree.getChildren() if hasattr(tree, "getChildren") else ():
        yield from interpolations(part)
    if type(tree).__name__ in ("InterpolationNodeContext", "InterpolationResolverContext"):
        yield tree


def _require_few(size: int, name: str) -> None:
    reason = f"its interpolations copy more than {MOST:,} characters, or {MOST_INTERPOLATIONS:,} values"
    require(size <= MOST, name, reason, "Write the value itself, or name other values less often")


class _Sizes:
    """The sizes of nodes, each found once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._open: set[int] = set()
        self._texts: dict[int, tuple[Any, str]] = {}
        self._spent = 0

    def of(self, node: Any) -> int:
        """Returns at least the number of characters that `node` becomes, with the cost to resolve it; 1 without a node."""
        if node is None or id(node) in self._known:
            return self._known.get(id(node), 1)
        name = str(node._get_full_key(None))
        require(id(node) not in self._open, name, "this interpolation leads to itself", "Write the value itself")
        reason = f"more than {_MOST_LEVELS} values lead from one to the next"
        require(len(self._open) < _MOST_LEVELS, name, reason, "Write the value itself")
        self._open.add(id(node))
        value, size, children = node._value(), 1, list[Any]()
        if not node._is_none() and not node._is_missing():
            if isinstance(node, DictConfig):
                children = [node._get_node(key) for key in node.keys()]
            elif isinstance(node, ListConfig):
                children = [node._get_node(number) for number in range(len(node))]
        for part in self._of_text(value, node) if isinstance(value, str) else map(self.of, children):
            size += part
            _require_few(size, name)
        self._open.remove(id(node))
        self._known[id(node)] = size
        return size

    def _of_text(self, text: str, node: Any) -> Iterator[int]:
        yield len(text)
        try:
            found = [*interpolations(parse(text))] if "${" in text else ()
        except (GrammarParseError, RecursionError):
            # OmegaConf refuses it where it is read.
            return
        yield from (self._of_one(one, node) for one in found)

    def _of_one(self, interpolation: Any, node: Any) -> int:
        return _COST + sum(self.of(self._target(key, node)) for key in self._keys(interpolation, node))

    def _keys(self, interpolation: Any, node: Any) -> tuple[str, ...]:
        """Returns the keys whose values one interpolation of `node` reads."""
        if type(interpolation).__name__ == "InterpolationNodeContext":
            return (self._written(interpolation, node)[2:-1],)
        name, arguments = self._written(interpolation.resolverName(), node), interpolation.sequence()
        if name not in _OF_A_KEY or arguments is None:
            return READS.get(name, ())
        return (self._written(arguments.getChild(0), node).strip(" '\""),)

    def _written(self, tree: Any, node: Any) -> str:
        """Returns the text of a part of an interpolation of `node`, in which interpolations within it are resolved."""
        if type(tree).__name__ == "InterpolationContext":
            return self._resolved(tree, node)
        parts = tree.getChildren() if hasattr(tree, "getChildren") else ()
        return "".join(self._written(part, node) for part in parts) or tree.getText()

    def _resolved(self, tree: Any, node: Any) -> str:
        """Returns the value of an interpolation of `node` as text, empty if it has none yet."""
        if id(tree) not in self._texts:
            self._spend(sum(self._of_one(one, node) for one in interpolations(tree)), node)
            try:
                found = node._get_parent_container().resolve_parse_tree(tree, node=node, key=node._key())
            except Exception:
                # Where it is read, OmegaConf says why.
                found = ""
            text = str(found._value() if isinstance(found, Node) else found)
            # Kept with its tree, so that no other tree has this identity.
            self._texts[id(tree)] = tree, text
        return self._texts[id(tree)][1]

    def _target(self, key: str, node: Any) -> Any:
        """Returns the node that `key`, in an interpolation of `node`, leads to; `None` if it is missing."""
        try:
            at, rest = node._get_parent_container()._resolve_key_and_root(key)
            for part in split_key(rest):
                if at._is_interpolation():
                    self._spend(self.of(at), node)
                    at = at._dereference_node()
                at = at._get_node(int(part) if isinstance(at, ListConfig) else part)
        except ConfigError:
            raise
        except Exception:
            return None
        return at

    def _spend(self, size: int, node: Any) -> None:
        self._spent += size
        _require_few(self._spent, str(node._get_full_key(None)))


MOST_POINTS = 100_000


def require_few_points(overrides: Iterable[Override], *, is_grid: bool) -> None:
    """Raises `ConfigError` if the axes among `overrides`, or one of them, give more than `MOST_POINTS` points.

    Each axis is bounded, since Hydra lists its values, and the product of those that are the last of their key. Without `is_grid` a search
    draws the points, and only values that are listed count.
    """
    counts: dict[str, int] = {}
    for axis in overrides:
        key = axis.get_key_element()
        counts[key] = count = _count(axis, is_grid=is_grid) if axis.is_sweep_override() else 1
        shown = str(axis.input_line)[:80]
        require(count <= MOST_POINTS, shown, f"{key} has {_in_digits(count)} values, and a sweep at most {MOST_POINTS:,} points", _FIX)
    points = math.prod(counts.values()) if is_grid else 1
    several = ", ".join(key for key, count in counts.items() if count > 1)
    require(points <= MOST_POINTS, several, f"give {_in_digits(points)} points, and a sweep has at most {MOST_POINTS:,}", _FIX)


_FIX = "List fewer values, or launch parts of the sweep one after another"


def _in_digits(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"about 10^{len(str(count)) - 1}"


def _count(axis: Override, *, is_grid: bool) -> int:
    value = axis.value()
    if isinstance(value, IntervalSweep):
        return 1
    if isinstance(value, RangeSweep):
        if not is_grid and not value.shuffle:
            return 1
        # The values of a range, without listing them.
        start, stop, step = (Decimal(0 if one is None else one) for one in (value.start, value.stop, value.step))
        if not all(one.is_finite() for one in (start, stop, step)) or step == 0:
            raise ConfigError(str(axis.input_line)[:80], "this range has no end", "Give it finite numbers, and a step that is not 0")
        return max(0, math.ceil((stop - start) / step))
    if isinstance(value, ChoiceSweep):
        return len(value.list)
    # The options that a pattern matches.
    return sum(1 for _ in axis.sweep_string_iterator())
