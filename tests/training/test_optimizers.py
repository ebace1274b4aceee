"""Each named optimiser in a run: optax's own update, canaries, adapters, frozen parameters, sharded state, and a restart to the bit."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import dpx
from dpx import config, packages
from dpx.audit.canaries import CANARIES, Audited
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.mechanism.noise import slice_keys
from dpx.models.trained import Adapters
from dpx.optimizer import Adam, Optax
from dpx.processes.mesh import Mesh
from dpx.randomness import RootSecret, path_name
from dpx.training import frozen, session, sharding, update
from dpx.training.step import StepInputs, as_chunk, make_step
from tests.composed import composed
from tests.processes import COARSE

from .conftest import declare, make_rows
from .sharing import run_job

NAMED = tuple(name for name in packages.names_in("optimizer") if name not in ("adam", "fine_tuning", "optax"))
# Optimisers that compute something over all parameters, or keep a state of another form.
OTHERS = (Optax(name="prodigy"), Optax(name="muon"), Optax(name="sgd", arguments={"momentum": 0.9, "nesterov": True}))
RATE = np.float32(1e-2)


def named(name: str) -> Optax:
    return config.build(recipes.compose([f"optimizer={name}"]))[0].optimizer


def quickly(names: tuple[str, ...], chosen: str) -> list:
    """One of `names` in the default suite, the others when slow: they compile a program each."""
    return [pytest.param(name, id=name, marks=[pytest.mark.slow] * (name != chosen)) for name in names]


needs_8 = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices")


def parameters(layers: int = 3) -> dict:
    """A table, a stack of layers, a bias; the last axes divide by two."""
    rng = np.random.default_rng(0)
    shapes = {"embeddings": {"kernel": (130, 128)}, "layers": {"dense": {"kernel": (layers, 256, 128), "bias": (layers, 4)}}, "bias": (4,)}
    return jax.tree.map(lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=lambda node: isinstance(node, tuple))


def gradients(params: dict, number: int = 3) -> list[dict]:
    rng = np.random.default_rng(1)
    return [jax.tree.map(lambda leaf: 1e-3 * rng.normal(size=leaf.shape).astype(np.float32), params) for _ in range(number)]


_FUNCTIONS: dict[str, tuple] = {}


def moved(optimizer, params: dict, each: list[dict], rates=(RATE, 2 * RATE, RATE)):
    """Parameters and state after a few updates, under jit; equal optimisers share what is compiled."""
    if repr(optimizer) not in _FUNCTIONS:
        made = update.make_update(optimizer)
        _FUNCTIONS[repr(optimizer)] = jax.jit(made.init), jax.jit(made.apply)
    init, apply = _FUNCTIONS[repr(optimizer)]
    state = init(params)
    for gradient, rate in zip(each, rates, strict=True):
        params, state = apply(params, state, gradient, rate)
    return params, state


def assert_same(found, wanted) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize("optimizer", [*map(named, NAMED), *OTHERS], ids=lambda optimizer: optimizer.name)
def test_an_update_is_optaxs_own_with_the_rate_of_each_step(optimizer):
    """Each layer of a stack is a separate parameter; the rate is optax's schedule of the same values."""
    params = parameters()
    rates = jnp.asarray([RATE, 2 * RATE, RATE])
    arguments = {name: update.decay_mask if value == "bert" else value for name, value in optimizer.arguments.items()}
    transform = getattr(optax, optimizer.name, None) or getattr(contrib, optimizer.name)
    transform = transform(learning_rate=lambda count: rates[count], **arguments)

    def apart(tree):
        return {f"{path_name(path)}": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(update._by_layer(tree))}

    flat = {path: {path.split("/")[-2 if path[-1].isdigit() else -1]: leaf} for path, leaf in apart(params).items()}
    form = jax.tree.structure(flat)
    state, step = transform.init(flat), jax.jit(transform.update)
    for gradient in gradients(params):
        updates, state = step(jax.tree.unflatten(form, [apart(gradient)[path] for path in sorted(flat)]), state, flat)
        flat = optax.apply_updates(flat, updates)
    found, _ = moved(optimizer, params, gradients(params))
    for path, leaf in apart(found).items():
        np.testing.assert_allclose(leaf, next(iter(flat[path].values())), rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", NAMED)
def test_a_layer_moves_as_it_would_alone(name):
    params = parameters()
    found, _ = moved(named(name), params, gradients(params))
    for layer in range(3):
        alone = jax.tree.map(lambda leaf, layer=layer: leaf[layer : layer + 1], params["layers"])
        each = [{"layers": jax.tree.map(lambda leaf, layer=layer: leaf[layer : layer + 1], one["layers"])} for one in gradients(params)]
        got, _ = moved(named(name), {"layers": alone}, each)
        jax.tree.map(
            lambda one, whole, layer=layer: np.testing.assert_allclose(one[0], whole[layer], rtol=1e-5), got["layers"], found["layers"]
        )


@pytest.mark.parametrize("optimizer", [*map(named, NAMED), *OTHERS], ids=lambda optimizer: optimizer.name)
def test_canaries_move_by_the_noisy_gradient_and_change_nothing_else(optimizer):
    params, canaries = parameters(), {CANARIES: {"table": np.zeros((2, 100), np.float32)}}
    each = [one | {CANARIES: {"table": np.full((2, 100), number, np.float32)}} for number, one in enumerate(gradients(params))]
    found, _ = moved(optimizer, params | canaries, each)
    alone, _ = moved(optimizer, params, gradients(params))
    np.testing.assert_array_equal(found.pop(CANARIES)["table"], np.full((2, 100), -3.0))
    assert_same(found, alone)
    only, state = moved(optimizer, canaries, [{CANARIES: one[CANARIES]} for one in each])
    np.testing.assert_array_equal(only[CANARIES]["table"], np.full((2, 100), -3.0))
    assert jax.tree.leaves(state) == []


@needs_8
@pytest.mark.parametrize("name", NAMED)
def test_a_sharded_state_gives_the_same_update(name):
    params, optimizer = parameters(), named(name)
    mesh = Mesh(name="m", data=2, fsdp=2, tensor=2, flops_per_s=1e10, memory_bytes=1 << 30)
    devices = mesh.make()
    made = update.make_update(optimizer)
    layouts = [sharding.storage_shardings(jax.eval_shape(of, params), devices) for of in (lambda params: params, made.init)]
    spread, state = jax.device_put(params, layouts[0]), jax.jit(made.init, out_shardings=layouts[1])(params)
    apply = jax.jit(made.apply, out_shardings=tuple(layouts), donate_argnums=(0, 1))
    held = {len(leaf.addressable_shards[0].data.ravel()) / leaf.size for leaf in jax.tree.leaves(state) if leaf.size > 10_000}
    assert held <= {1 / 4}
    on_one = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))
    assert on_one == update.state_bytes(optimizer, params, mesh)
    for gradient, rate in zip(gradients(params), (RATE, 2 * RATE, RATE), strict=True):
        spread, state = apply(spread, state, jax.device_put(gradient, layouts[0]), rate)
    wanted, _ = moved(optimizer, params, gradients(params))
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6), spread, wanted)


def test_bytes_of_a_state_are_those_of_its_shapes():
    params, mesh = parameters(), Mesh(name="one", flops_per_s=1e10, memory_bytes=1 << 30)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    found = {name: update.state_bytes(named(name), params, mesh) for name in NAMED}
    adam = update.state_bytes(Adam(beta1=0.9, beta2=0.98, eps=1e-11, weight_decay=0.1), params, mesh)
    # Beside the moments: Adam's count of steps; optax's learning rate and one or two counts.
    assert adam == 8 * count + 4
    assert found["adamw"] == found["lamb"] == 8 * count + 12
    assert found["lion"] == 4 * count + 12 and found["sgd"] == 4 * count + 8
    assert found["adafactor"] < count
    assert update.state_bytes(Optax(name="lion", arguments={"mu_dtype": "bfloat16"}), params, mesh) == 2 * count + 12


# Slow: adapters, canaries and a sharded state are each held to one device here.
@pytest.mark.slow
@needs_8
@pytest.mark.parametrize("name", quickly(NAMED, "lamb"))
def test_a_step_with_adapters_and_canaries_on_eight_devices(name, micro):
    """A whole step, with frozen parameters as a run keeps them: these have no state, adapters and canaries move, and the state stays
    sharded."""
    mesh = Mesh(name="m", data=4, fsdp=2, flops_per_s=1e10, memory_bytes=1 << 30)
    experiment = declare(optimizer=named(name), mesh=mesh, train=Adapters(rank=2, alpha=4.0))
    step = make_step(experiment.one_step, Audited(micro[1], 30, 1.0), mesh.make(), microbatch=1, chunk=2)
    key = np.zeros(2, np.uint32)
    state = step.init(key, None)
    before, placed = jax.tree.map(np.array, state.params), step.place_frozen(step.draw_frozen(key, None))
    form = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state.moments)
    chunk = as_chunk(make_rows(6) | {"canary": np.asarray([-1, -1, 3, -1, 29, -1], np.int32)}, step)
    sums = step.accumulate(step.zero(), chunk, StepInputs(step.gather(state.params), key, key, frozen=placed))
    keys = slice_keys(RootSecret.from_seed(0), 0, state.params)
    state, metrics = step.finish(state, step.reduce(sums, ()), keys, np.float32(0.05), np.float32(10), RATE)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), state.moments) == form
    assert state.params.keys() == {"layers", CANARIES}
    assert all("lora" in path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.params["layers"]))
    assert any(np.any(np.asarray(new) != old) for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(before), strict=True))
    assert np.isfinite(float(metrics["snr"])) and np.any(np.asarray(state.params[CANARIES]["table"]))
    trained, rest = frozen.shapes(experiment.train, micro[1])
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.moments))
    assert held == update.state_bytes(experiment.optimizer, trained, dataclasses.replace(mesh, data=1, fsdp=1)) and jax.tree.leaves(rest)


RUN = ("model=micro", "model.layers=2", "data=synthetic", "steps=4", "microbatch=8", "batch_schedule.size=16", "seed=7", "mesh=single")
RUN += ("schedule.evaluation_rows=32", "schedule.checkpoint_every=2", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp")
RUN += ("privacy.delta=1e-4", "lr_schedule=cosine", COARSE)


def released(path: Path) -> dict[str, bytes]:
    leaves = jax.tree_util.tree_leaves_with_path(dpx.load(path).params)
    return {path_name(path): np.asarray(leaf).tobytes() for path, leaf in leaves}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return f"data.directory={tmp_path_factory.mktemp('data')}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ("sgd", "lion", "adafactor"))
def test_a_private_run_that_was_killed_ends_with_the_same_bits(name, data, tmp_path):
    line = (*RUN, data, f"optimizer={name}")
    line += ("optimizer.arguments.min_dim_size_to_factor=8",) if name == "adafactor" else ()
    run = composed(*line)
    assert run_job(run, tmp_path / "whole")
    assert not run_job(run, tmp_path / "killed", until=3)
    assert run_job(run, tmp_path / "killed")
    whole, killed = released(tmp_path / "whole"), released(tmp_path / "killed")
    assert whole == killed and len(set(whole.values())) > 5
    stated = json.loads((tmp_path / "killed" / "release" / "privacy.json").read_text())
    assert stated["guarantee"] == "none" and len(stated["reasons"]) == 1 and "fixed_seed" in stated["reasons"][0]
    with pytest.raises(ConfigError, match="its checkpoint was made with optimizer=.*, and this run uses another optimizer. Use optimizer="):
        run_job(composed(*RUN, data, "optimizer=lamb"), tmp_path / "fork", fork=f"{tmp_path / 'whole'}@2")
    with pytest.raises(ConfigError, match="its checkpoint was made with optimizer="):
        run_job(composed(*RUN, data), tmp_path / "fork", fork=f"{tmp_path / 'whole'}@2")


def test_a_table_of_runs_holds_what_the_optimiser_declares():
    assert session._shown(named("sgd").knobs) == {"optimizer": "sgd", "momentum": 0.9, "nesterov": False}
    assert session._shown(Optax(name="muon", arguments={"ns_coeffs": [1.0, 2.0], "mu_dtype": None}).knobs) == {
        "optimizer": "muon",
        "ns_coeffs": "[1.0, 2.0]",
    }
    adam = session._shown(Adam(beta1=0.9, beta2=0.98, eps=1e-11, weight_decay=0.1).knobs)
    assert adam == {"optimizer": "adam", "beta1": 0.9, "beta2": 0.98, "eps": 1e-11, "weight_decay": 0.1, "decay_mask": "bert"}
