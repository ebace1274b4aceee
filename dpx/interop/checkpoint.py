"""Converts weights of a checkpoint to the parameters of a model: which are taken, which must be drawn, and which tensors are left out.

Parts above the layers (a pooler, a head, but no table of words) may be new. Any other part that is missing, or of another shape, is
refused by name: a misspelt or truncated file must not become a model that is random in parts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dpx.declaration import require, several
from dpx.files.weights import CONFIG, Leaves, Shapes, Tensors, config_of, folder_of
from dpx.models.checkpoint_shape import LAYOUTS, ROTARY, as_stored, model_of
from dpx.models.layouts import Layout, Part
from dpx.models.shape import NEW_ROWS, AnyModel, Bert, Model

# Early checkpoint files name the parameters of a LayerNorm this way.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


@dataclass(frozen=True)
class Taken:
    """Lists by path the `parts` of a model's parameters that a checkpoint holds, the parameters `made_new`, and the tensors `left_out`.

    `notes` are sentences on where its weights and its config disagree.
    """

    parts: Mapping[str, Part]
    made_new: tuple[str, ...]
    left_out: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def in_words(self) -> tuple[str, ...]:
        words = [f"loaded {len(self.parts)} parameters", *self.notes]
        words += [f"made new: {', '.join(self.made_new)}"] if self.made_new else []
        words += [f"left out: {several(self.left_out, 4)}"] if self.left_out else []
        return tuple(words)


class Checkpoint:
    """Reads a folder's `config.json` and the headers of its weights; values are read by `leaves`."""

    def __init__(self, path: str, key: str = "init.path"):
        self.asked = f"{key}={path}"
        self.folder = folder_of(path, key)
        declared = config_of(self.folder)
        self.config = as_stored(declared, self.folder)
        head = "" if self.config == declared else self.layout.decoder.names[0]
        self._notes = (f"{CONFIG} ties the head to the table, but the weights hold another {head}, which is used",) if head else ()

    @cached_property
    def model(self) -> Model:
        return model_of(self.config, str(self.folder / CONFIG))

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.config["model_type"]]

    @cached_property
    def _tensors(self) -> Tensors:
        return Tensors(self.folder)

    @cached_property
    def _stored(self) -> dict[str, str]:
        """The current name of each tensor, with its name in the file. Raises `ConfigError` if the file has both."""
        by_name = {}
        for name in self._tensors.shapes:
            old = next((old for old in _OLD_NAMES if name.endswith(old)), None)
            today = name if old is None else name.removesuffix(old) + _OLD_NAMES[old]
            reason = f"contains {today} also under its old name"
            require(today not in by_name, self.asked, reason, "Keep one of them, or copy the checkpoint again")
            by_name[today] = name
        if self.layout.bias is not None:
            one, other = self.layout.bias
            # Where a file has both, the head of transformers reads the second.
            by_name |= {one: by_name[other]} if other in by_name else {}
        return by_name

    def _notes_on_bias(self) -> tuple[str, ...]:
        """Returns a sentence if the weights hold two biases of the head. Raises `ConfigError` if one of them cannot be read."""
        if self.layout.bias is None:
            return ()
        (one, other), shapes = self.layout.bias, self._tensors.shapes
        is_declared_untied = not self._notes and not self.model.tied
        reason = f"does not tie the head to the table, but the weights lack {other}, which an untied head of transformers reads"
        there = other in shapes or one not in shapes or self.layout.decoder.names[0] not in shapes or not is_declared_untied
        require(there, self.folder / CONFIG, reason, _FIX_TIED)
        if not {one, other} <= set(shapes):
            return ()
        reason = f"contains {one} of shape {shapes[one]} and {other} of shape {shapes[other]}, which are one bias"
        require(shapes[one] == shapes[other], self.asked, reason, "Copy the checkpoint again")
        values = dict(self._tensors.read([one, other]))
        return () if np.array_equal(values[one], values[other]) else (f"the weights hold {one} and another {other}, which is used",)

    def select(self, expected: Shapes, model: AnyModel | None = None) -> Taken:
        """Returns the `expected` parameters that it holds for a model; without its classifier if `model` has a classifier of another
        form, and without the rows of new tokens.

        Raises `ConfigError` for the first parameter below the heads that it does not hold.
        """
        layers, stored = self.model.layers, self._stored
        expected = {path: shape for path, shape in expected.items() if path not in NEW_ROWS}
        prefix = self.layout.prefix if any(name.startswith(self.layout.prefix) for name in stored) else ""
        parts = self.layout.parts(prefix)
        shapes = {name: self._tensors.shapes[old] for name, old in stored.items()}
        # Two encoders' classifiers may have parameters of the same paths and compute different functions.
        own, new_groups = self.model, set[str]()
        if isinstance(own, Bert) and isinstance(model, Bert):
            kinds = {own.classifier, model.classifier}
            has_identity = len(kinds) > 1 and bool(kinds & {"linear_tanh", "linear_relu"})
            are_unlike = kinds in ({"dense", "relu"}, {"pooler", "linear"}) or has_identity
            new_groups = {"classifier"} if own.pool != model.pool or are_unlike else new_groups
        for path in sorted(expected):
            part, wanted = parts.get(path), tuple(expected[path])
            missing = [] if part is None else [name for name in part.tensors(layers) if name not in shapes]
            shape = None if part is None or missing else part.shape(shapes, layers)
            if shape == wanted:
                continue
            problem = "has nothing" if part is None else f"has {part.names[0].format(0)} of shape {shape}, not {wanted},"
            problem = f"lacks {missing[0]}" if missing else problem
            group = path.split("/")[0]
            has_head = path == "decoder" or any(part.path.startswith("mlm/") and part.names[0] in stored for part in self.layout.heads)
            is_lacking = path == self.layout.decoder.path and has_head and bool(missing)
            reason = f"does not tie the head to the table, but the weights lack {self.layout.decoder.names[0]}"
            require(not is_lacking, self.folder / CONFIG, reason, _FIX_TIED)
            require(group not in ("embeddings", "layers", "final_norm", "decoder"), self.asked, f"{problem} for {path}", _FIX)
            new_groups.add(group)
        used_parts = {path: parts[path] for path in expected if path.split("/")[0] not in new_groups}
        used = {name for part in used_parts.values() for name in part.tensors(layers)}
        # A tied table may be stored twice.
        ignored = (*self.layout.ignored, *(self.layout.decoder.names if self.model.tied else ()), *(self.layout.bias or ()))
        left_out = sorted(name for name in stored if name not in used and not name.endswith(ignored))
        # With all layers taken, a tensor of a layer that is left is one that the config does not declare.
        undeclared = [name for name in left_out if self.config["model_type"] in ROTARY and name.startswith(f"{prefix}layers.")]
        require(not undeclared, self.asked, f"contains {several(undeclared, 1)}, which its config does not declare", _FIX)
        notes = self._notes if self.layout.decoder.path in expected else ()
        if not any(path.split("/")[0] == "classifier" for path in expected):
            self._require_known_head(parts, left_out)
            notes += self._notes_on_bias()
        made_new = tuple(sorted(path for path in expected if path not in used_parts))
        return Taken(used_parts, made_new, tuple(left_out), notes)

    def _require_known_head(self, parts: Mapping[str, Part], left_out: list[str]) -> None:
        """Raises `ConfigError` for a tensor beside those of the head that gives words, which has no place in the family's model."""
        named = {name for part in parts.values() for name in part.tensors(self.model.layers)}
        of_head = [part for path, part in parts.items() if path.split("/")[0] in ("mlm", "decoder")]
        modules = {name.split(".")[0] for part in of_head for name in part.names}
        more = [name for name in left_out if name.split(".")[0] in modules and name not in named]
        reason = f"contains {several(more, 1)} of the head, for which its family has no place"
        require(not more, self.asked, reason, "Remove it from the weights if it is to be left out, or use another checkpoint")

    def leaves(self, selected: Taken) -> Leaves:
        """Returns the taken parameters, by path, as float32."""
        layers = self.model.layers
        names = [name for part in selected.parts.values() for name in part.tensors(layers)]
        values = dict(self._tensors.read(self._stored[name] for name in names))
        return {path: part.ours(lambda name: values[self._stored[name]], layers) for path, part in selected.parts.items()}


_FIX_TIED = "Set tie_word_embeddings to true in it if the head is the table, or copy the checkpoint again"
_FIX = "Use model=hf, or a checkpoint of this model; a file may be incomplete or contain tensors under other names"
