"""Maps between tensors of a checkpoint and parameters of dpx, in both directions: the form of a layout, and those of four families.

Here layers are stacked on a leading axis, a dense map is [inputs, outputs], and query, key and value are one map in these four families.
PyTorch's dense maps are [outputs, inputs]; GPT-2's are not.

L: layers, p: inputs, d: outputs of a dense map.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Part:
    """Describes one parameter: its `path` here, and the tensors that are joined along its outputs, `{}` being the layer's number."""

    path: str
    names: tuple[str, ...]
    is_transposed: bool = False

    @property
    def is_of_layers(self) -> bool:
        return "{}" in self.names[0]

    def tensors(self, layers: int) -> list[str]:
        """Returns the names of all tensors that the parameter is read from."""
        return [name.format(layer) for layer in range(layers) for name in self.names] if self.is_of_layers else list(self.names)

    def shape(self, shapes: Mapping[str, tuple[int, ...]], layers: int) -> tuple[int, ...] | None:
        """Returns the parameter's shape in dpx, from the shapes of the tensors; `None` if they do not fit one another."""
        each_shape = [shapes[name][::-1] if self.is_transposed else shapes[name] for name in self.tensors(layers)]
        if len(set(each_shape)) != 1:
            return None
        joined = (*each_shape[0][:-1], sum(one[-1] for one in each_shape[: len(self.names)]))
        return (layers, *joined) if self.is_of_layers else joined

    def ours(self, read_tensor: Callable[[str], np.ndarray], layers: int) -> np.ndarray:
        """Returns the parameter, joined from the tensors that `read_tensor` returns."""
        place = lambda name: read_tensor(name).T if self.is_transposed else read_tensor(name)  # noqa: E731
        joined = lambda names: np.concatenate([place(name) for name in names], axis=-1)  # noqa: E731
        if not self.is_of_layers:
            return np.ascontiguousarray(joined(self.names))
        return np.stack([joined([name.format(layer) for name in self.names]) for layer in range(layers)])

    def theirs(self, leaf: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the tensors of a parameter; `ours` returns the same bits."""
        layers = range(leaf.shape[0]) if self.is_of_layers else [None]
        tensors = {}
        for layer in layers:
            one = leaf if layer is None else leaf[layer]
            for name, values in zip(self.names, np.split(one, len(self.names), axis=-1), strict=True):
                tensors[name if layer is None else name.format(layer)] = np.ascontiguousarray(values.T if self.is_transposed else values)
        return tensors


def table(path: str, name: str) -> list[Part]:
    return [Part(path, (f"{name}.weight",))]


def norm(path: str, name: str) -> list[Part]:
    return [Part(f"{path}/scale", (f"{name}.weight",)), Part(f"{path}/bias", (f"{name}.bias",))]


def dense(path: str, *names: str, is_transposed: bool = True) -> list[Part]:
    kernel = Part(f"{path}/kernel", tuple(f"{name}.weight" for name in names), is_transposed)
    return [kernel, Part(f"{path}/bias", tuple(f"{name}.bias" for name in names))]


@dataclass(frozen=True)
class Layout:
    """Lists the tensors of one family. The names of `body` begin with `prefix` in a model with a head; the names of `heads` never do.

    `ignored` are ends of names that hold no parameter. `decoder` is the head's separate embedding table, if it is not tied. `bias` are two
    names of the head's bias: an untied head of transformers reads the second.
    """

    prefix: str
    body: tuple[Part, ...]
    heads: tuple[Part, ...]
    decoder: Part
    ignored: tuple[str, ...] = ()
    bias: tuple[str, str] | None = None

    def parts(self, prefix: str) -> dict[str, Part]:
        """Returns the body's names with `prefix`, by path."""
        body = [Part(one.path, tuple(prefix + name for name in one.names), one.is_transposed) for one in self.body]
        return {one.path: one for one in (*body, *self.heads, self.decoder)}


_BERT_EMBEDDINGS = [
    *table("embeddings/word", "embeddings.word_embeddings"),
    *table("embeddings/position", "embeddings.position_embeddings"),
    *norm("embeddings/norm", "embeddings.LayerNorm"),
]
_BERT_BODY = (
    *_BERT_EMBEDDINGS,
    *table("embeddings/segment", "embeddings.token_type_embeddings"),
    *dense("layers/qkv", *(f"encoder.layer.{{}}.attention.self.{name}" for name in ("query", "key", "value"))),
    *dense("layers/attention_out", "encoder.layer.{}.attention.output.dense"),
    *norm("layers/attention_norm", "encoder.layer.{}.attention.output.LayerNorm"),
    *dense("layers/up", "encoder.layer.{}.intermediate.dense"),
    *dense("layers/down", "encoder.layer.{}.output.dense"),
    *norm("layers/output_norm", "encoder.layer.{}.output.LayerNorm"),
    *dense("pooler", "pooler.dense"),
)
BERT = Layout(
    prefix="bert.",
    body=_BERT_BODY,
    heads=(
        *dense("mlm/transform", "cls.predictions.transform.dense"),
        *norm("mlm/norm", "cls.predictions.transform.LayerNorm"),
        Part("mlm/output_bias", ("cls.predictions.bias",)),
        *dense("next_sentence", "cls.seq_relationship"),
        *dense("classifier", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("cls.predictions.decoder.weight",)),
    ignored=("position_ids",),
    bias=("cls.predictions.bias", "cls.predictions.decoder.bias"),
)
ROBERTA = Layout(
    prefix="roberta.",
    body=_BERT_BODY,
    heads=(
        *dense("mlm/transform", "lm_head.dense"),
        *norm("mlm/norm", "lm_head.layer_norm"),
        Part("mlm/output_bias", ("lm_head.bias",)),
        *dense("classifier/dense", "classifier.dense"),
        *dense("classifier/out", "classifier.out_proj"),
        # The tensors of RobertaForMultipleChoice.
        *dense("classifier", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("lm_head.decoder.weight",)),
    ignored=("position_ids",),
    bias=("lm_head.bias", "lm_head.decoder.bias"),
)
DISTILBERT = Layout(
    prefix="distilbert.",
    body=(
        *_BERT_EMBEDDINGS,
        *dense("layers/qkv", *(f"transformer.layer.{{}}.attention.{name}_lin" for name in "qkv")),
        *dense("layers/attention_out", "transformer.layer.{}.attention.out_lin"),
        *norm("layers/attention_norm", "transformer.layer.{}.sa_layer_norm"),
        *dense("layers/up", "transformer.layer.{}.ffn.lin1"),
        *dense("layers/down", "transformer.layer.{}.ffn.lin2"),
        *norm("layers/output_norm", "transformer.layer.{}.output_layer_norm"),
    ),
    heads=(
        *dense("mlm/transform", "vocab_transform"),
        *norm("mlm/norm", "vocab_layer_norm"),
        Part("mlm/output_bias", ("vocab_projector.bias",)),
        *dense("classifier/dense", "pre_classifier"),
        *dense("classifier/out", "classifier"),
    ),
    decoder=Part("mlm/decoder", ("vocab_projector.weight",)),
    ignored=("position_ids",),
)
GPT2 = Layout(
    prefix="transformer.",
    body=(
        *table("embeddings/word", "wte"),
        *table("embeddings/position", "wpe"),
        *norm("layers/attention_norm", "h.{}.ln_1"),
        *dense("layers/qkv", "h.{}.attn.c_attn", is_transposed=False),
        *dense("layers/attention_out", "h.{}.attn.c_proj", is_transposed=False),
        *norm("layers/feed_forward_norm", "h.{}.ln_2"),
        *dense("layers/up", "h.{}.mlp.c_fc", is_transposed=False),
        *dense("layers/down", "h.{}.mlp.c_proj", is_transposed=False),
        *norm("final_norm", "ln_f"),
    ),
    heads=(Part("classifier/kernel", ("score.weight",), is_transposed=True),),
    decoder=Part("decoder", ("lm_head.weight",)),
    ignored=(".attn.bias", ".attn.masked_bias"),
)
