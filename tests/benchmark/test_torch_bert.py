"""The torch model of the peers is ours: losses and every gradient agree, so that a ratio compares the same work."""

import dataclasses

import numpy as np
import pytest

from tests.clipping.batches import batch, bert, objective

torch = pytest.importorskip("torch")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("next_sentence", [True, False])
def test_losses_and_gradients_are_ours(next_sentence):
    import jax
    import jax.numpy as jnp

    from dpx_papers.benchmark.torch_bert import TorchBert, inputs, losses, parameters

    subject, rows, drawn = objective(bert(), next_sentence=next_sentence), batch(), np.random.default_rng(0)
    shapes = jax.eval_shape(subject.init, jax.random.PRNGKey(0))
    values = jax.tree.map(lambda leaf: drawn.normal(0, 0.3, leaf.shape), shapes)
    with jax.enable_x64(True):
        wide = jax.tree.map(jnp.asarray, values)

        def total(params):
            losses_B = subject.losses(params, rows)[0]
            return losses_B.sum(), losses_B

        gradient, expected_B = jax.device_get(jax.jit(jax.grad(total, has_aux=True))(wide))
    model = TorchBert(dataclasses.replace(bert()), 50, next_sentence, is_tied=True).double()
    model.load_state_dict(parameters(values) | {"decoder.weight": torch.tensor(values["embeddings"]["word"])})
    tensors = {name: torch.tensor(np.asarray(value)) for name, value in rows.items()}
    found_B = losses(model(*inputs(tensors, torch.float64)), tensors)
    np.testing.assert_allclose(found_B.detach().numpy(), expected_B, rtol=1e-9)
    found_B.sum().backward()
    wanted = parameters(gradient)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.grad.numpy(), wanted[name].numpy(), rtol=1e-8, atol=1e-10, err_msg=name)
