"""Greedy completions and beam searches are those of `generate` of transformers (extra `parity`)."""

from pathlib import Path

import jax
import numpy as np
import pytest

from dpx.files.weights import nested
from dpx.generation.decoding import Decoding, Rule
from dpx.interop.checkpoint import Checkpoint
from dpx.models.networks import AnyDecoder
from dpx.task.declared_task import CausalLanguageModel
from tests.interop.cases import VOCABULARY, Case

LENGTHS, NEW = (3, 7, 5), 8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_lm_a", "llama_lm_b", "mistral_lm_a", "qwen3_lm_a", "gemma2_lm_a", "gemma3_text_lm_a", "gpt2_lm_a"])
def test_completions_are_those_of_transformers(name: str, tmp_path: Path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    checkpoint = Checkpoint(str(Case.read(name).write(tmp_path)))
    model = checkpoint.model
    assert isinstance(model, AnyDecoder)
    params = nested(checkpoint.leaves(checkpoint.select(CausalLanguageModel().parameter_shapes(model, VOCABULARY))))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(tmp_path), attn_implementation="eager", dtype=torch.float32).eval()
    drawn = np.random.default_rng(4)
    texts = [drawn.integers(5, VOCABULARY, length).tolist() for length in LENGTHS]
    tokens, keys = np.array([text + [0] * (8 - len(text)) for text in texts], np.int32), jax.random.split(jax.random.key(0), 3)
    ended = 0
    with jax.default_matmul_precision("highest"):
        free = Decoding(model, VOCABULARY, Rule(NEW, (VOCABULARY,))).complete(params, tokens, np.array(LENGTHS, np.int32), keys)
        for beams, ends in ((1, (int(free.tokens[0, 2]),)), (4, (int(free.tokens[1, 3]),)), (3, tuple(map(int, free.tokens[2, 1:3])))):
            found = Decoding(model, VOCABULARY, Rule(NEW, ends, beams=beams)).complete(params, tokens, np.array(LENGTHS, np.int32), keys)
            for row, text in enumerate(texts):
                options = {"num_beams": beams, "eos_token_id": list(ends), "pad_token_id": 0, "do_sample": False, "max_new_tokens": NEW}
                options |= {"length_penalty": 1.0, "early_stopping": False} if beams > 1 else {}
                with torch.no_grad():
                    said = theirs.generate(torch.tensor([text]), return_dict_in_generate=True, output_scores=True, **options)
                count = int(found.count[row])
                mine, whole = found.tokens[row, :count].tolist(), said.sequences[0, len(text) :].tolist()
                assert mine == whole[:count] and bool(found.is_ended[row]) == (mine[-1] in ends) and not any(whole[count:])
                ended += bool(found.is_ended[row])
                if beams > 1:
                    assert float(found.log_probability[row]) / count == pytest.approx(float(said.sequences_scores[0]), abs=1e-5)
    assert ended > 0
