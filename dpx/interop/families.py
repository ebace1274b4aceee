"""Registers the families of models: by the `model_type` of a checkpoint, the layout of its tensors, and who reads its config.

A decoder with rotary positions is registered by adding its class to `ROTARY`: it holds its fields, what it computes, its config in both
directions, and its layout.
"""

from dpx.interop.layouts import BERT, DISTILBERT, GPT2, ROBERTA, Layout
from dpx.models.gemma import Gemma
from dpx.models.llama import Llama
from dpx.models.qwen import Qwen

Rotary = Llama | Qwen | Gemma
ROTARY: dict[str, type[Rotary]] = {model_type: kind for kind in (Llama, Qwen, Gemma) for model_type in kind.CLASSES}
LAYOUTS: dict[str, Layout] = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT, "gpt2": GPT2}
LAYOUTS |= {model_type: kind.LAYOUT for model_type, kind in ROTARY.items()}
