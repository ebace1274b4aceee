"""The rate of matrix products that this device reaches, measured beside the steps: what a step's share is a share of."""

import jax
import jax.numpy as jnp

from dpx.benchmark.setting import Program, Setting

# Square factors, and so many products in a row that starting them costs nothing: large enough for an accelerator, quick on a CPU.
SIZES = {"cpu": (1024, 2)}
LARGE = (8192, 8)


def matrix_rate(setting: Setting, dtype: str) -> Program:
    """Products of square matrices in `dtype`, at the precision that the steps' products have by default."""
    size, count = SIZES.get(jax.default_backend(), LARGE)
    values = jax.random.normal(jax.random.PRNGKey(0), (size, size)).astype(dtype)
    # Products of such factors keep their size, however many follow one another.
    factor = (values.astype(jnp.float32) / jnp.sqrt(size)).astype(dtype)

    @jax.jit
    def products(values: jax.Array, factor: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, count, lambda _, current: current @ factor, values)

    compiled = products.lower(values, factor).compile()
    device = jax.devices()[0].device_kind
    facts = {"kind": "rate", "dtype": dtype, "mesh": setting.experiment.mesh.name, "device": device, "flops": 2 * count * size**3}
    return Program(facts, lambda: jax.block_until_ready(compiled(values, factor)))
