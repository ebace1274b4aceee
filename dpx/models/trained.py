"""Declares which parameters of a model are trained (`train=...`). It imports no jax.

All other parameters are frozen: they have no gradient, noise or moments.

`trainable.py` turns a declaration into two trees of parameters, `lora.py` makes adapters.

Parameters are selected by path, with functions of names alone, so that a declaration is checked before jax starts.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from dpx.declaration import declaration, require
from dpx.models.shape import NEW_ROWS

LAYERS = "layers"


class Selection(NamedTuple):
    """A selection of parameters by path.

    Each of `parts` is (its name in an error, a function that tells whether it selects a path). `top` is the number of layers from the top,
    or all.
    """

    parts: tuple[tuple[str, Callable[[str], bool]], ...]
    top: int | None = None

    def picks(self, path: str) -> bool:
        """Returns whether any part selects the parameter at `path`."""
        return any(is_picked(path) for _, is_picked in self.parts)


def _is_above(path: str) -> bool:
    return path.split("/")[0] not in ("embeddings", LAYERS)


def top(layers: int) -> Selection:
    """Selects the top layers, and the head."""
    require(layers > 0, f"top {layers} layers", "is not a number of layers", "Use 1 or more, or the selection last_layer")
    return Selection(((f"top {layers} layers", lambda path: _is_above(path) or path.split("/")[0] == LAYERS),), layers)


def matching(*patterns: str) -> Selection:
    """Selects paths such as "layers/qkv/bias". In a pattern * matches any part of a name, and ** any number of names."""
    return Selection(tuple((pattern, lambda path, pattern=pattern: _matches(pattern.split("/"), path.split("/"))) for pattern in patterns))


def either(*selections: Selection) -> Selection:
    """Selects what any of the selections selects; a selection with `top` selects nothing in the layers below its top ones."""
    tops = sorted({one.top for one in selections if one.top is not None})
    require(len(tops) < 2, f"top {tops} layers", "are two numbers", "Choose one")
    return Selection(tuple(part for one in selections for part in one.parts), tops[0] if tops else None)


def _matches(pattern: list[str], names: list[str]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        return any(_matches(pattern[1:], names[start:]) for start in range(len(names) + 1))
    return bool(names) and fnmatchcase(names[0], pattern[0]) and _matches(pattern[1:], names[1:])


ALL = Selection((("all", lambda path: True),))
# Of dense maps, LayerNorms and the decoder (Ben Zaken et al. 2022; with privacy: Bu et al. 2022).
BIAS = Selection((("bias", lambda path: path.split("/")[-1] in ("bias", "output_bias")),))
# The head: everything above the layers. The table of a tied decoder is an embedding, and is frozen.
LAST_LAYER = Selection((("last_layer", _is_above),))
# The last map of a classifier: what it reads is a function of the text and of frozen parameters alone.
OUTPUT = Selection((("output", lambda path: path.split("/")[:2] in [["classifier", one] for one in ("kernel", "bias", "out")]),))
# Adapters (lora.py), and only their second factor.
LORA = matching("layers/lora/*/a", "layers/lora/*/b")
LORA_FFA = matching("layers/lora/*/b")


# The rows of new tokens, in the table and in an untied head (new_rows.py).
ROWS = Selection((("train.rows=new", lambda path: path in NEW_ROWS),))


class Part:
    """The base class of the declarations: which parameters are trained, and from which parameters they are chosen."""

    if TYPE_CHECKING:

        @property
        def kind(self) -> str: ...

    is_all: ClassVar[bool] = False
    selected: ClassVar[Selection]

    def selection(self) -> Selection:
        """Returns the selection of the parameters that are trained, by path."""
        return self.selected

    def prepared(self, params: Any, key: Any) -> Any:
        """Returns a model's parameters together with the parameters that training adds, which are drawn from `key`."""
        del key
        return params

    def stated(self, model: Any) -> str:
        """Returns the kind, and how many rows of new tokens of `model` are trained: alone, or beside adapters."""
        rows = "" if getattr(self, "rows", None) is None else f"rows: {model.new_rows:,} of new tokens"
        return rows if self.kind == "rows" else "; ".join(filter(None, (self.kind, rows)))

    def require_fits(self, model: Any) -> None:
        """Raises `ConfigError` for rows of new tokens that a model does not have."""
        has_rows = getattr(self, "rows", None) is None or getattr(model, "new_rows", 0) > 0
        reason, fix = "the table has no rows for new tokens", "Add model.new_tokens=mean, with model=hf and a tokenizer with more tokens"
        require(has_rows, "train.rows=new", reason, fix)


@declaration
class Everything(Part):
    """Trains every parameter."""

    kind: Literal["all"] = "all"
    is_all: ClassVar[bool] = True
    selected: ClassVar[Selection] = ALL


@declaration
class Biases(Part):
    """Trains biases of dense maps, of LayerNorms and of the decoder (Ben Zaken et al. 2022; with privacy: Bu et al. 2022).

    Attributes:
        head: Whether everything above the layers is trained too; a newly initialised head must be.
    """

    head: bool = False
    kind: Literal["bias"] = "bias"

    def selection(self) -> Selection:
        return _with_head(BIAS, self.head)


@declaration
class LastLayer(Part):
    """Trains the head: everything above the layers."""

    kind: Literal["last_layer"] = "last_layer"
    selected: ClassVar[Selection] = LAST_LAYER


@declaration
class OutputLayer(Part):
    """Trains a classifier's last map alone, without the pooler or another dense map before it.

    A mechanism whose noise is added to the input of this map trains these parameters with `train=last_layer`.
    """

    kind: Literal["output_layer"] = "output_layer"
    selected: ClassVar[Selection] = OUTPUT


@declaration
class TopLayers(Part):
    """Trains the top layers, and the head.

    Attributes:
        layers: How many layers.
    """

    layers: int
    kind: Literal["top"] = "top"

    def __post_init__(self) -> None:
        require(self.layers > 0, f"train.layers={self.layers}", "at least one layer must be trained", "Use 1 or more, or train=last_layer")

    def selection(self) -> Selection:
        return top(self.layers)


@declaration
class Matching(Part):
    """Trains parameters whose path matches a pattern.

    Attributes:
        paths: Patterns of paths such as layers/qkv/bias (* within a name, ** for any names).
        layers: How many layers from the top are trained; null means all.
    """

    paths: Sequence[str]
    layers: int | None = None
    kind: Literal["matching"] = "matching"

    def __post_init__(self) -> None:
        require(bool(self.paths), "train.paths=[]", "no parameter would be trained", "Name a path, such as '**/bias'")
        require(
            self.layers is None or self.layers > 0,
            f"train.layers={self.layers}",
            "is not a valid number of layers",
            "Use 1 or more, or null",
        )

    def selection(self) -> Selection:
        return matching(*self.paths)._replace(top=self.layers)


@declaration
class Adapters(Part):
    """Trains low-rank adapters of dense maps (LoRA: Hu et al. 2022).

    Attributes:
        rank: Rank of an adapter.
        alpha: Scale: an adapter's product is multiplied by alpha over rank.
        targets: Dense maps that get an adapter: query, key, value, attention_out, up, down.
        dropout: Dropout rate of an adapter's input.
        head: Whether everything above the layers is trained too; a newly initialised head must be.
        rows: Which rows of the table are trained too: those of new tokens (new), or none.
        kind: lora trains both factors of an adapter, lora_ffa only the second (FFA-LoRA: Sun et al. 2024).
    """

    rank: int
    alpha: float
    targets: Sequence[str] = ("query", "value")
    dropout: float = 0.0
    head: bool = False
    rows: Literal["new"] | None = None
    kind: Literal["lora", "lora_ffa"] = "lora"

    def __post_init__(self) -> None:
        require(self.rank > 0, f"train.rank={self.rank}", "adapters need a rank of at least 1", "Use 1 or more")
        require(
            self.alpha > 0,
            f"train.alpha={self.alpha}",
            "the adapters would have no effect",
            "Use a positive number, such as twice the rank",
        )
        require(0 <= self.dropout < 1, f"train.dropout={self.dropout}", "is not a dropout rate", "Use a value of at least 0 and below 1")
        require(
            bool(self.targets),
            "train.targets=[]",
            "no matrix would get an adapter",
            "Name some of query, key, value, attention_out, up, down, and in a gated model gate",
        )

    def selection(self) -> Selection:
        picked = LORA if self.kind == "lora" else LORA_FFA
        return _with_head(picked if self.rows is None else either(picked, ROWS), self.head)

    def prepared(self, params: Any, key: Any) -> Any:
        """Returns the parameters with adapters drawn from `key`; the model's outputs do not change."""
        from dpx.models.lora import add_adapters

        return add_adapters(params, key, rank=self.rank, alpha=self.alpha, targets=tuple(self.targets), dropout=self.dropout)


@declaration
class Rows(Part):
    """Trains rows of the table of words, and of an untied head.

    Attributes:
        rows: Which rows: those of new tokens.
        head: Whether everything above the layers is trained too; a newly initialised head must be.
    """

    rows: Literal["new"] = "new"
    head: bool = False
    kind: Literal["rows"] = "rows"

    def selection(self) -> Selection:
        return _with_head(ROWS, self.head)


def _with_head(picked: Selection, head: bool) -> Selection:
    return either(picked, LAST_LAYER) if head else picked


Trained = Everything | Biases | LastLayer | OutputLayer | TopLayers | Matching | Adapters | Rows
