"""Defines BERT with a masked-token decoder in torch: the same model and loss as in dpx, so that torch libraries can be compared with it.

Every parameter belongs to a Linear, an Embedding or a LayerNorm, the kinds whose per-example gradients those libraries know.

B: examples, T: tokens, H: width, N: heads, M: masked positions, V: vocabulary.
"""

# torch and opacus are in the extra `bench`.
# pyright: reportMissingImports=false

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpx.models.shape import Bert

MASKED_SCORE = -1.0e9


class Layer(nn.Module):
    """A post-LayerNorm encoder layer with fused query, key and value."""

    def __init__(self, model: Bert):
        super().__init__()
        self.heads = model.heads
        self.qkv = nn.Linear(model.width, 3 * model.width)
        self.attention_out = nn.Linear(model.width, model.width)
        self.attention_norm = nn.LayerNorm(model.width, eps=model.layer_norm_eps)
        self.up = nn.Linear(model.width, model.feed_forward)
        self.down = nn.Linear(model.feed_forward, model.width)
        self.output_norm = nn.LayerNorm(model.width, eps=model.layer_norm_eps)

    def forward(self, x_BTH: Tensor, bias_B11T: Tensor) -> Tensor:
        B, T, H = x_BTH.shape
        q, k, v = self.qkv(x_BTH).reshape(B, T, 3, self.heads, H // self.heads).permute(2, 0, 3, 1, 4)
        context_BNTD = F.scaled_dot_product_attention(q, k, v, attn_mask=bias_B11T)
        context_BTH = context_BNTD.transpose(1, 2).reshape(B, T, H)
        y_BTH = self.attention_norm(x_BTH + self.attention_out(context_BTH))
        return self.output_norm(y_BTH + self.down(F.gelu(self.up(y_BTH))))


class TorchBert(nn.Module):
    """BERT in torch: (tokens, segments, positions [B,T], bias [B,1,1,T], masked positions [B,M]) -> logits.

    The result is [B,M,V] and, with `next_sentence`, [B,2].

    `is_tied` shares the word table with the decoder, as BERT does.
    """

    def __init__(self, model: Bert, vocabulary_size: int, next_sentence: bool, is_tied: bool):
        super().__init__()
        self.word = nn.Embedding(vocabulary_size, model.width)
        self.position = nn.Embedding(model.positions, model.width)
        self.segment = nn.Embedding(model.segments, model.width)
        self.norm = nn.LayerNorm(model.width, eps=model.layer_norm_eps)
        self.layers = nn.ModuleList([Layer(model) for _ in range(model.layers)])
        self.transform = nn.Linear(model.width, model.width)
        self.transform_norm = nn.LayerNorm(model.width, eps=model.layer_norm_eps)
        self.decoder = nn.Linear(model.width, vocabulary_size)
        if is_tied:
            self.decoder.weight = self.word.weight
        self.pooler = nn.Linear(model.width, model.width) if next_sentence else None
        self.next_sentence = nn.Linear(model.width, 2) if next_sentence else None

    def forward(self, token_BT: Tensor, segment_BT: Tensor, position_BT: Tensor, bias_B11T: Tensor, masked_position_BM: Tensor) -> Any:
        x_BTH = self.norm(self.word(token_BT) + self.position(position_BT) + self.segment(segment_BT))
        for layer in self.layers:
            x_BTH = layer(x_BTH, bias_B11T)
        x_BMH = torch.gather(x_BTH, 1, masked_position_BM[:, :, None].expand(-1, -1, x_BTH.shape[2]))
        logits_BMV = self.decoder(self.transform_norm(F.gelu(self.transform(x_BMH))))
        if self.pooler is None or self.next_sentence is None:
            return logits_BMV, None
        return logits_BMV, self.next_sentence(torch.tanh(self.pooler(x_BTH[:, 0])))


Rows = dict[str, Tensor]


def inputs(rows: Rows, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns the model's arguments for a masked batch of dpx (tokens, masked_positions, segment_start, length, ...)."""
    B, T = rows["tokens"].shape
    position_BT = torch.arange(T).repeat(B, 1)
    is_real_BT = position_BT < rows["length"][:, None]
    segment_BT = ((position_BT >= rows["segment_start"][:, None]) & is_real_BT).long()
    bias_B11T = torch.where(is_real_BT, 0.0, MASKED_SCORE).to(dtype)[:, None, None, :]
    return rows["tokens"].long(), segment_BT, position_BT, bias_B11T, rows["masked_positions"].long()


def losses(outputs: Any, rows: Rows) -> Tensor:
    """Returns, for each example, mean cross-entropy over its masked positions plus next-sentence cross-entropy."""
    logits_BMV, next_B2 = outputs
    loss_BM = F.cross_entropy(logits_BMV.flatten(0, 1), rows["labels"].long().flatten(), reduction="none").view(rows["labels"].shape)
    weight_BM = rows["has_label"].to(loss_BM.dtype)
    losses_B = (loss_BM * weight_BM).sum(1) / weight_BM.sum(1).clamp(min=1)
    return losses_B if next_B2 is None else losses_B + F.cross_entropy(next_B2, rows["is_next"].long(), reduction="none")


def parameters(params: dict[str, Any]) -> dict[str, Tensor]:
    """Returns parameters (or gradients) of dpx, nested numpy arrays, under the names of `TorchBert`.

    The tied table occurs once, as `word.weight`.
    """
    flat = {f"{name}.weight": params["embeddings"][name] for name in ("word", "position", "segment")}
    flat |= _norm("norm", params["embeddings"]["norm"])
    for name, leaves in params["layers"].items():
        for number in range(len(leaves["bias"])):
            one = {key: leaf[number] for key, leaf in leaves.items()}
            flat |= _norm(f"layers.{number}.{name}", one) if "scale" in one else _linear(f"layers.{number}.{name}", one)
    head = params["mlm"]
    flat |= _linear("transform", head["transform"]) | _norm("transform_norm", head["norm"]) | {"decoder.bias": head["output_bias"]}
    for name in ("pooler", "next_sentence"):
        flat |= _linear(name, params[name]) if name in params else {}
    return {name: torch.tensor(value) for name, value in flat.items()}


def _linear(name: str, leaves: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.weight": leaves["kernel"].T, f"{name}.bias": leaves["bias"]}


def _norm(name: str, leaves: dict[str, Any]) -> dict[str, Any]:
    return {f"{name}.weight": leaves["scale"], f"{name}.bias": leaves["bias"]}
