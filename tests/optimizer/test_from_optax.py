"""Optimisers of optax by name: which can be named, and what is refused in one line before an array exists."""

import subprocess
import sys

import optax
import pytest

from dpx import config, packages
from dpx.config import recipes
from dpx.declaration import ConfigError
from dpx.optimizer import Adam, Optax, from_optax
from tests.planned import plan
from tests.processes import environment

NAMED = [name for name in packages.names_in("optimizer") if name not in ("adam", "fine_tuning", "optax")]


def built(*overrides: str):
    return config.build(recipes.compose(list(overrides)))[0]


# Optax warns of names and defaults that it will drop.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", from_optax.names())
def test_every_name_that_is_offered_can_be_used(name):
    Optax(name=name).require_usable()


def test_noise_from_a_fixed_seed_is_postprocessing():
    Optax(name="noisy_sgd", arguments={"key": 3}).require_usable()


@pytest.mark.parametrize("name", NAMED)
def test_an_option_is_usable_and_the_claim_stays(name):
    experiment = built(f"optimizer={name}", "noise=multiplier", "noise.noise_multiplier=2.0", "accountant=rdp", "data.declared_size=100000")
    assert isinstance(experiment.optimizer, Optax) and experiment.optimizer.name == name
    experiment.optimizer.require_usable()
    assert plan(experiment)["guarantee"] == "dp"


def test_adam_is_the_papers_own():
    assert isinstance(built().optimizer, Adam) and set(NAMED) >= {"adamw", "sgd", "lamb", "lion", "adafactor"}


LINES = [
    ("lyon", {}, "optimizer.name=lyon: neither optax nor optax.contrib has it. Did you mean lion?"),
    ("_src", {}, "optimizer.name=_src: neither optax nor optax.contrib has it. "),
    ("chain", {}, "optimizer.name=chain: not an optimiser with a learning rate, which lr_schedule could give. Known here: acprop, "),
    ("scale_by_rprop", {}, "optimizer.name=scale_by_rprop: not an optimiser with a learning rate"),
    ("polyak_sgd", {}, "optimizer.name=polyak_sgd: its update reads the loss of the examples, which is not released. Use an optimiser"),
    ("lbfgs", {}, "optimizer.name=lbfgs: its line search evaluates the loss of the examples, which is not released. "),
    ("reduce_on_plateau", {}, "optimizer.name=reduce_on_plateau: its update reads the loss of the examples, "),
    ("schedule_free_adamw", {}, "optimizer.name=schedule_free_adamw: the parameters to evaluate differ from the ones that it updates. "),
    ("sophia", {}, "optimizer.name=sophia: its update evaluates the loss of the examples for its second derivatives"),
    ("momo", {}, "optimizer.name=momo: its update reads the loss of the examples"),
    ("dpsgd", {}, "optimizer.name=dpsgd: it clips and adds noise itself, and mechanism=dp_sgd does that. "),
    ("lion", {"b3": 0.9}, "optimizer.arguments.b3: unknown key. Did you mean optimizer.arguments.b2?"),
    ("lion", {"b1": "0.9x"}, "optimizer.arguments.b1=0.9x: expected a number. Correct the value."),
    ("lion", {"b1": True}, "optimizer.arguments.b1=True: expected a number. Correct the value."),
    ("lion", {"b1": None}, "optimizer.arguments.b1=None: expected a number. Correct the value."),
    ("lion", {"b1": float("nan")}, "optimizer.arguments.b1=nan: not a finite number. Correct the value."),
    ("lion", {"weight_decay": [1.0]}, "optimizer.arguments.weight_decay=[1.0]: expected a number. Correct the value."),
    ("lion", {"mask": "bart"}, "optimizer.arguments.mask=bart: expected bert or null. Correct the value."),
    ("sgd", {"nesterov": 1}, "optimizer.arguments.nesterov=1: expected true or false. Correct the value."),
    ("adamw", {"mu_dtype": "float17"}, "optimizer.arguments.mu_dtype=float17: expected the name of a type, such as bfloat16 or null. "),
    ("adafactor", {"min_dim_size_to_factor": 1.5}, "optimizer.arguments.min_dim_size_to_factor=1.5: expected a whole number. "),
    ("muon", {"preconditioning": "x"}, "optimizer.arguments.preconditioning=x: expected frobenius or spectral or aol or schatten. "),
    ("galore", {"base_optimizer": "adam"}, "optimizer.arguments.base_optimizer=adam: expected null. Leave it out."),
]


@pytest.mark.parametrize(("name", "arguments", "line"), LINES, ids=[f"{name}-{'-'.join(given)}" for name, given, _ in LINES])
def test_what_cannot_be_used_is_refused_with_value_reason_and_fix(name, arguments, line):
    with pytest.raises(ConfigError) as refused:
        Optax(name=name, arguments=arguments).require_usable()
    assert str(refused.value).startswith(line) and "\n" not in str(refused.value)


def test_the_learning_rate_is_not_an_argument():
    with pytest.raises(ConfigError, match=r"^optimizer.arguments.learning_rate: lr_schedule gives .* Set lr_schedule.learning_rate\.$"):
        built("optimizer=lion", "+optimizer.arguments.learning_rate=0.1")


@pytest.mark.parametrize("name", ["momo", "sophia", "lbfgs"])
def test_an_unlisted_optimiser_that_needs_more_is_found_by_a_trial(name, monkeypatch):
    monkeypatch.delitem(from_optax._REFUSED, name)
    with pytest.raises(ConfigError, match=f"^optimizer.name={name}: optax cannot make an update with these arguments .* Use an optimiser"):
        Optax(name=name).require_usable()


def test_an_update_that_changes_the_form_of_its_state_is_refused(monkeypatch):
    def growing(learning_rate):
        return optax.GradientTransformation(lambda params: (learning_rate,), lambda updates, state, params=None: (updates, (*state, 1.0)))

    monkeypatch.setattr(optax, "growing", growing, raising=False)
    with pytest.raises(ConfigError, match="^optimizer.name=growing: its update changes the form of its state"):
        Optax(name="growing").require_usable()


def test_an_argument_that_only_an_object_can_be_is_refused(monkeypatch):
    monkeypatch.setattr(optax, "wrapping", lambda inner, learning_rate: inner, raising=False)
    with pytest.raises(ConfigError, match=r"^optimizer.arguments.inner: no value given\. A config cannot hold such a value"):
        Optax(name="wrapping").require_usable()


def test_the_optimiser_is_part_of_the_identity_of_a_run():
    found = [
        built(*overrides).claim_checksum
        for overrides in ([], ["optimizer=adamw"], ["optimizer=lion"], ["optimizer=lion", "optimizer.arguments.b1=0.8"])
    ]
    assert len(set(found)) == len(found)
    assert built("optimizer=lion").claim_checksum == found[2]


def test_a_check_looks_for_no_devices(tmp_path):
    program = (
        "from dpx import config; from dpx.config import recipes; from dpx.processes.mesh import simulate_devices; import sys\n"
        "made = config.build(recipes.compose(['optimizer=lion', 'mesh=cpu8']))[0]; assert 'jax' not in sys.modules\n"
        "made.optimizer.require_usable(); simulate_devices(made.mesh, 8); import jax; print(len(jax.devices()))\n"
        "try: simulate_devices(made.mesh, 4)\nexcept ValueError as refused: print(refused)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, refused = done.stdout.splitlines()
    assert count == "8" and refused.startswith("mesh=cpu8: this process already uses another number of devices.")
