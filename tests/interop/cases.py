"""Small checkpoints of every family. Their weights follow from names and shapes by whole-number arithmetic, so only logits are kept.

Made with transformers by `make_logits.py`; `logits/<case>.npz` holds what it computed, `logits/<case>.json` what it was asked.
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

LOGITS = Path(__file__).parent / "logits"
VOCABULARY, CLASSES = 64, 3
# (layers, width, heads, feed-forward)
SHAPES = {"a": (2, 16, 2, 24), "b": (3, 24, 4, 40)}


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Numbers in [-0.25, 0.25), those of a LayerNorm's scale around 1."""
    mixed = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(zlib.crc32(name.encode()))) * np.uint64(0x9E3779B97F4A7C15)
    drawn = ((mixed >> np.uint64(40)) % np.uint64(1 << 16)).astype(np.float32) / np.float32(1 << 17) - np.float32(0.25)
    is_scale = len(shape) == 1 and name.endswith("weight")
    return (drawn + np.float32(1.0) if is_scale else drawn).reshape(shape)


def inputs(model_type: str) -> dict[str, np.ndarray]:
    """Three texts: whole, short, and a pair; token ids stay clear of RoBERTa's padding."""
    draws = np.random.RandomState(3)
    length = np.array([9, 4, 7], np.int32)
    start = np.array([9, 4, 3], np.int32)
    pad = 1 if model_type == "roberta" else 0
    tokens = np.where(np.arange(9) < length[:, None], draws.randint(5, VOCABULARY, (3, 9)), pad).astype(np.int32)
    return {"tokens": tokens, "length": length, "segment_start": start}


@dataclass(frozen=True)
class Case:
    """A checkpoint (`config`, names and shapes of its `tensors`) and what transformers made of `inputs`."""

    name: str
    config: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]
    expected: dict[str, np.ndarray]

    @staticmethod
    def read(name: str) -> "Case":
        asked = json.loads((LOGITS / f"{name}.json").read_text())
        with np.load(LOGITS / f"{name}.npz") as held:
            expected = {key: held[key] for key in held.files}
        return Case(name, asked["config"], {key: tuple(shape) for key, shape in asked["tensors"].items()}, expected)

    def write(self, folder: Path) -> Path:
        """The checkpoint, as a folder."""
        from dpx.files import weights

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        weights.write(folder / "model.safetensors", {name: values(name, shape) for name, shape in self.tensors.items()})
        return folder


def names() -> list[str]:
    return sorted(path.stem for path in LOGITS.glob("*.json"))
