"""Every option and every recipe composes, builds and equals its golden config; invalid configs are refused in one line.

`golden/main.yaml` holds the default composition. Every other file holds what differs: from the default, or from the options and the shared
recipe that `from` names, so that a changed value touches the file of the one that declares it. An option that composes to the content of
its file needs no second copy of it. `DPX_UPDATE_GOLDEN=1` rewrites golden files.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf, open_dict

from dpx import config, packages
from dpx.config import identity, recipes
from dpx.config.experiment import Experiment
from dpx.config.identity import composed
from dpx.declaration import ConfigError
from dpx.models import checkpoint_shape
from dpx.optimizer.lr_schedule import in_steps

GOLDEN = Path(__file__).parent / "golden"
SMALL_CHECKPOINT = Path(__file__).parent / "interop" / "checkpoint"
SMALL_ROWS = ("data.sequence_length=16", "data.vocabulary.size=64")

# What an option needs beside it: the user's files, pairs for a task over pairs, a decoder's task and a decoder for it, rows with labels.
GIVEN = {
    "data=text": ["data.source.paths=[corpus.txt]"],
    "train=matching": ["train.paths=[layers/qkv/*]"],
    "train=rows": ["model=llama_micro", "task=causal_lm", "+model.new_rows=2"],
    "init=run": ["init.run=outputs/another"],
    "init=file": ["init.file=weights.npz"],
    "init=hf": ["init.path=checkpoint", "model=tiny", "data.vocabulary.size=1024"],
    "model=hf": ["init=hf", f"init.path={SMALL_CHECKPOINT}", "task=classification", "data=random", *SMALL_ROWS],
    "task=mlm_nsp": ["data.pairs=same_document"],
    "data=e2e": ["model=decoder_tiny"],
    "task=causal_lm": ["model=decoder_tiny"],
    "task=classification": ["data=random"],
    "task=multiple_choice": ["data=random"],
    "task=regression": ["data=random", "task.mean=2.5", "task.scale=1.5"],
    "task=multi_label": ["data=random"],
    "data=table": ["data.source.paths=rows.csv", "data.source.labels=[no,yes]"],
    "job=predict": ["job.input=rows.csv", "job.output=predictions"],
    "job=generate": ["generate.prompts=prompts.jsonl"],
    "model=decoder": ["task=causal_lm"],
    "model=gemma": ["task=causal_lm"],
    "model=llama": ["task=causal_lm"],
    "model=olmo": ["task=causal_lm"],
    "model=qwen": ["task=causal_lm"],
    "model=smollm2": ["task=causal_lm"],
    "optimizer=optax": ["optimizer.name=yogi", "+optimizer.arguments.b1=0.8"],
    "model=vaultgemma": ["task=causal_lm"],
}

# Those that recipes inherit first; the others only change a recipe that is listed before them.
BASES = ("anil", "anil_private", "mckenna")
# The sizes of recipes for laptops are those of one another and of the default, not those of the recipes that they inherit.
FIRST_ON_LAPTOPS = {"laptop/anil_": "laptop/anil_table1_best", "laptop/mckenna_": "laptop/mckenna_grid"}


def _given(option: str) -> list[str]:
    return next((beside for start, beside in GIVEN.items() if option.startswith(start)), [])


def _options() -> list[str]:
    found = (path.relative_to(conf).with_suffix("") for conf in packages.own_folders() for path in conf.glob("*/*.yaml"))
    return sorted(f"{path.parent}={path.name}" for path in found if path.parent.name not in ("experiment", "local", "base", "debug"))


def _written_out(option: str) -> dict[str, Any] | None:
    """What the option's own file says, where composing should add nothing to it: no other option, no reference, no value from `GIVEN`."""
    group, _, name = option.partition("=")
    text = packages.option_file(group, name).read_text()
    written: Any = OmegaConf.to_container(OmegaConf.create(text))
    # What an option chooses in other groups is not in its own node.
    inside = [one for one in written.pop("defaults", []) if isinstance(one, dict) and not next(iter(one)).startswith("override ")]
    is_whole = not inside and "${" not in text and not any(given.startswith(f"{group}.") for given in _given(option))
    return written if is_whole else None


@functools.cache
def _resolved(*overrides: str) -> dict[str, Any]:
    # A recipe may name a sweeper that is not installed here.
    return config.resolved(recipes.compose([*overrides, "hydra/sweeper=basic"]))


def _defaults_of(file: str) -> list[Any]:
    """The `defaults` of a file of conf."""
    return (OmegaConf.to_container(OmegaConf.load(packages.option_file(*file.split("/", 1)))) or {}).get("defaults", [])  # pyright: ignore


def _base_of(file: str) -> list[str]:
    """The first recipe or base that a recipe or base of conf inherits from, as an override; for laptops the first one of its paper."""
    if file.startswith("experiment/laptop/"):
        first = next((one for start, one in FIRST_ON_LAPTOPS.items() if file.startswith(f"experiment/{start}")), None)
        return [f"+experiment={first}"] if first and file != f"experiment/{first}" else []
    inherited = (one for one in _defaults_of(file) if isinstance(one, str) and one.startswith(("/experiment/", "/base/")))
    # `base/analysis` composes under the name of a recipe alone.
    named = (one.strip("/").partition("/") for one in inherited if one != "/base/analysis")
    return next(([f"+{group}={name}"] for group, _, name in named), [])


@functools.cache
def _choices(*overrides: str) -> dict[str, Any]:
    return dict(recipes.compose([*overrides, "hydra/sweeper=basic"], with_hydra=True).hydra.runtime.choices)


def _chosen_otherwise(choices: dict[str, Any], base: list[str]) -> list[str]:
    """The options that are chosen otherwise than in the config of `base`, as overrides."""
    before = _choices(*base)
    groups = [group for group in choices if packages.is_group(group) and group not in ("experiment", "base", "job")]
    return [f"{group}={choices[group]}" for group in sorted(groups) if choices[group] not in (None, before.get(group))]


def _from(overrides: list[str], plain: dict[str, Any]) -> dict[str, Any]:
    """What `plain` has otherwise than `overrides` compose to, under their names."""
    return ({"from": overrides} if overrides else {}) | _difference(plain, _resolved(*overrides))


def _inside(option: str, found: Any) -> Any:
    """`found` with what differs from it in place of each option of a group inside its own."""
    group, _, name = option.partition("=")
    chosen = [one for one in _defaults_of(f"{group}/{name}") if isinstance(one, dict)]
    for key, inner in (pair for one in chosen for pair in one.items()):
        if packages.is_own(f"{group}/{key}", inner):
            written: Any = OmegaConf.to_container(OmegaConf.load(packages.option_file(f"{group}/{key}", inner)))
            found = found | {key: {"from": [f"{group}/{key}={inner}"]} | _difference(found[key], written)}
    return found


def _difference(node: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """What `node` has otherwise than `default`; under `~` the keys that it has not. A declaration of another class is held whole."""
    changed: dict[str, Any] = {}
    for key, value in node.items():
        of_default = default.get(key)
        if isinstance(value, dict) and isinstance(of_default, dict) and value.get("_target_") == of_default.get("_target_"):
            inner = _difference(value, of_default)
            changed |= {key: inner} if inner else {}
        elif key not in default or value != of_default:
            changed[key] = value
    gone = sorted(set(default) - set(node))
    return changed | ({"~": gone} if gone else {})


def _agrees(golden: Path, plain: dict[str, Any]) -> None:
    text = OmegaConf.to_yaml(OmegaConf.create(plain))
    if os.environ.get("DPX_UPDATE_GOLDEN"):
        golden.parent.mkdir(parents=True, exist_ok=True)
        golden.write_text(text)
    assert golden.is_file(), f"{golden.name}: no golden config. Run once with DPX_UPDATE_GOLDEN=1 and read the difference."
    # Releases of OmegaConf differ in the order of keys that YAML's `<<` merges.
    assert yaml.safe_load(text) == yaml.safe_load(golden.read_text())


def test_a_golden_file_holds_what_differs_and_nothing_else() -> None:
    default = {"noise": {"_target_": "a", "epsilon": 8}, "steps": 120, "sizes": [1, 2], "seed": None}
    node = {"noise": {"_target_": "b", "epsilon": 8}, "steps": 120, "sizes": [1, 3], "new": None}
    assert _difference(default, default) == {}
    assert _difference(node, default) == {"noise": {"_target_": "b", "epsilon": 8}, "sizes": [1, 3], "new": None, "~": ["seed"]}
    assert _difference({"clip": {"_target_": "c", "norm": 2}}, {"clip": {"_target_": "c", "norm": 1, "rate": 3}}) == {
        "clip": {"norm": 2, "~": ["rate"]}
    }


@pytest.mark.parametrize("option", _options())
def test_option_builds_into_what_is_written(option: str) -> None:
    group, _, name = option.partition("=")
    cfg = recipes.compose([option, *_given(option)])
    experiment, job = config.build(cfg)
    assert isinstance(experiment, Experiment) and callable(job)
    found, written = config.resolved(cfg)[group], _written_out(option)
    if written is not None:
        assert found == written
    else:
        _agrees(GOLDEN / group / f"{name}.yaml", _difference({group: _inside(option, found)}, {group: _resolved().get(group)}))


def test_main_job_equals_golden() -> None:
    cfg = recipes.compose([])
    assert config.build(cfg)[0].is_private
    _agrees(GOLDEN / "main.yaml", config.resolved(cfg))


@pytest.mark.parametrize("name", BASES)
def test_base_of_recipes_equals_golden(name: str) -> None:
    _agrees(GOLDEN / "base" / f"{name}.yaml", _from([*_base_of(f"base/{name}"), "job=plan"], _resolved(f"+base={name}", "job=plan")))


@pytest.mark.parametrize("name", recipes.names())
def test_recipe_builds_and_equals_golden(name: str) -> None:
    cfg = recipes.compose([f"+experiment={name}", "hydra/sweeper=basic", "job=plan"], with_hydra=True)
    # The last value of every axis; a recipe of three axes has hundreds of points, and all of them are composed when slow.
    last, base = recipes.points_of(cfg)[-1], [*_base_of(f"experiment/{name}"), "job=plan"]
    base += _chosen_otherwise(dict(cfg.hydra.runtime.choices), base)
    with open_dict(cfg):
        del cfg["hydra"]
    experiment, _ = config.build(cfg)
    assert experiment.name == name.replace("/", "_"), "the run folder would not carry the recipe's name"
    _agrees(GOLDEN / "experiment" / f"{name}.yaml", _from(base, config.resolved(cfg)))
    if last:
        config.build(recipes.plan_config(name, last))


# Each with its warm-up in steps, which no paper and no result in the repository gives as a fraction.
WARM_UPS = {
    "anil_2m_batch": 7500,
    "anil_nonprivate_baseline": 7500,
    "legal_nonprivate_full": 1642,
    "legal_fig1b_snr_lr": 25,
    "laptop/anil_batch_schedule": 112,
    "laptop/anil_batch_sweep": 60,
    "laptop/anil_schedule_variants": 75,
    "laptop/anil_weight_decay": 240,
    "laptop/legal_clip_sweep": 8,
}


@pytest.mark.parametrize(("name", "warm_up"), WARM_UPS.items())
def test_a_recipe_that_is_made_shorter_has_a_shorter_warm_up(name: str, warm_up: int) -> None:
    whole, shorter = (
        config.build(recipes.compose([f"+experiment={name}", "hydra/sweeper=basic", *more]))[0] for more in ((), ("steps=20",))
    )
    assert in_steps(whole.lr_schedule.warmup_steps, whole.steps) == warm_up
    # More than half of the steps of one recipe are warm-up.
    assert 1 <= in_steps(shorter.lr_schedule.warmup_steps, shorter.steps) <= 11


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes.names())
def test_every_point_of_a_recipe_builds_into_a_folder_of_its_own(name: str) -> None:
    folders, points = set(), recipes.points(name)
    for point in points:
        cfg = recipes.compose([f"+experiment={name}", "hydra/sweeper=basic", *point], with_hydra=True)
        config.build(cfg)
        folders.add(cfg.hydra.sweep.subdir)
    assert len(folders) == len(points)


def test_no_golden_config_is_left_over() -> None:
    expected = {GOLDEN / "main.yaml"} | {
        GOLDEN / f"{option.replace('=', '/')}.yaml" for option in _options() if _written_out(option) is None
    }
    expected |= {GOLDEN / "experiment" / f"{name}.yaml" for name in recipes.names()} | {GOLDEN / "base" / f"{name}.yaml" for name in BASES}
    if os.environ.get("DPX_UPDATE_GOLDEN"):
        for stray in set(GOLDEN.rglob("*.yaml")) - expected:
            stray.unlink()
    assert set(GOLDEN.rglob("*.yaml")) <= expected, "a golden config of something that is gone"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["+stepz=3"], "stepz: unknown key. Did you mean steps?"),
        (["+optimizer.bta1=0.1"], "optimizer.bta1: unknown key. Did you mean optimizer.beta1?"),
        (["steps=2.5"], "steps=2.5: expected a whole number. Correct the value."),
        (
            ["steps='4'"],
            "steps='4': expected a whole number, and this is text, as from quotes or an environment variable. "
            "Write steps=4 without quotes, or steps=$NAME, which the shell fills in.",
        ),
        (
            ["noise=multiplier", "noise.noise_multiplier=inf"],
            "noise.noise_multiplier=inf: no sum can be released with infinite noise. Give a finite value.",
        ),
        (
            ["clip.clipping_norm=inf"],
            "clip.clipping_norm=inf: is larger than the largest number of float32. Give a norm of 3.40282e+38 or less.",
        ),
        (["lr_schedule.learning_rate=inf"], "lr_schedule.learning_rate=inf: is not a finite number. Give a finite number."),
        (["privacy.delta=nan"], "privacy.delta=nan: delta is a probability above 0 and below 1. Use a value below 1/N."),
        (["optimizer.eps=.inf"], "optimizer.eps=inf: is not a finite number. Give a finite number."),
        (["noise.epsilon=inf"], "noise.epsilon=inf: no noise has this epsilon. Write mechanism=none to train without privacy."),
        (["steps=true"], "steps=True: expected a whole number. Correct the value."),
        (["microbatch=many"], "microbatch=many: expected a whole number or auto. Correct the value."),
        (["clip.clipping_norm=abc"], "clip.clipping_norm=abc: expected a number. Correct the value."),
        (["data=text"], "data.source.paths: this key has no value. Add data.source.paths=..."),
        (["noise.epsilon=0"], "noise.epsilon=0.0: epsilon must be positive. Give a target above 0."),
        (["noise.epsilon=-1"], "noise.epsilon=-1.0: epsilon must be positive. Give a target above 0."),
        (
            ["mechanism._target_=os.system"],
            "mechanism._target_=os.system: os is not an installed package for dpx (installed are: dpx, dpx_papers). "
            "Install the package that provides it, or name another one.",
        ),
        (
            ["mechanism._target_=dpx.mechanism.noise.add_noise"],
            "mechanism._target_=dpx.mechanism.noise.add_noise: is not a declaration. Name a class made by dpx.declaration.declaration.",
        ),
        (
            ["model._target_=dpx.nothing.B"],
            "model._target_=dpx.nothing.B: cannot be loaded (No module named 'dpx.nothing'). Name a declaration of dpx.",
        ),
        (["steps=${stepz}"], "steps: Interpolation key 'stepz' not found. Correct the interpolation."),
        (["privacy.delta=0"], "privacy.delta=0.0: delta is a probability above 0 and below 1. Use a value below 1/N."),
        (["fork=5"], "fork=5: is not of the form <run folder>@<step>. Write fork=outputs/<run>@<step>."),
        (["job=plan", "+plan.complie=true"], "plan.complie: unknown key. Did you mean plan.compile?"),
        (["replicate=-1"], "replicate=-1: repeats are numbered from 0. Use 0 or more."),
        (
            ["data=text", "data.source.paths=a.jsonl", "model=micro", "data.sequence_length=128"],
            "data.sequence_length=128: model micro has 64 positions. Use data.sequence_length=64, or a model with more positions.",
        ),
        (
            ["model.attention=cudnn", "+model.dtype=bfloat16", "mesh=cpu8"],
            "model.attention=cudnn, mesh=cpu8: cuDNN needs a GPU. Use model.attention=xla.",
        ),
        (["+model.gradient_checkpointing=true"], "model.gradient_checkpointing: unknown key. Write model.rematerialize=layers."),
        (["~optimizer.eps"], "optimizer.eps: this key has no value. Add optimizer.eps=..."),
        (
            ["noise=noise_batch_ratio", "batch_schedule=linear_7500"],
            "noise=noise_batch_ratio: the ratio is noise over one batch size, but the batch size varies. "
            "Use batch_schedule=constant or noise=multiplier.",
        ),
    ],
)
def test_bad_config_is_refused_with_value_reason_and_fix(overrides: list[str], line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.build(recipes.compose(overrides))
    assert str(refused.value) == line


@pytest.mark.parametrize("spelling", [".inf", "inf", ".Inf", "+.inf", "'.inf'"])
def test_an_infinity_is_read_in_every_spelling_that_yaml_and_the_command_line_have(spelling: str) -> None:
    built, _ = config.build(recipes.compose(["tune=search", f"tune.shape={spelling}"]))
    assert built.tune is not None and built.tune.shape == float("inf")
    _, job = config.build(recipes.compose(["job=design", f"design.epsilon={spelling}"]))
    assert getattr(job, "epsilon", None) == float("inf")


def test_an_infinity_of_a_file_is_read_where_a_number_or_a_list_of_numbers_is_wanted(tmp_path: Path) -> None:
    option = tmp_path / "search.yaml"
    for spelling in (".inf", "inf"):
        option.write_text(f"_target_: dpx.config.declared_tuning.Tune\nshape: {spelling}\n")
        assert config.declare(option, "tune").shape == float("inf")
    composed = recipes.compose(["job=analyse", "analysis=mckenna_fig3c_token_ratio", "analysis.epsilons=[1,.inf,inf]"])
    job: Any = config.build(composed)[1]
    assert list(job.analysis.epsilons) == [1.0, float("inf"), float("inf")]


def test_text_that_only_looks_like_an_infinity_stays_text() -> None:
    built, _ = config.build(recipes.compose(["data.split_salt=.inf"]))
    assert built.data.split_salt == ".inf"
    with pytest.raises(ConfigError, match="tune.shape=-inf: no distribution has that shape"):
        config.build(recipes.compose(["tune=search", "tune.shape=-.inf"]))


def test_a_default_warm_up_is_a_share_of_the_run() -> None:
    for schedule in ("constant", "linear", "exponential", "quadratic", "fine_tuning"):
        declared = config.build(recipes.compose([f"lr_schedule={schedule}", "steps=5"]))[0].lr_schedule
        assert 0 < declared.warmup_steps < 1


TABLE = ("data=table", "data.source.paths=rows.csv", "data.source.labels=[no,maybe,yes]")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of 25 word pieces, of 16 positions, and a GPT-2."""
    folder = tmp_path_factory.mktemp("checkpoints")
    small = json.loads((SMALL_CHECKPOINT / "config.json").read_text())
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 25}
    for name, values in (("bert", small | {"vocab_size": 25, "max_position_embeddings": 16}), ("gpt2", gpt2)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(values))
    return str(folder)


def _built(*overrides: str) -> Experiment:
    return config.build(recipes.compose(list(overrides)))[0]


def test_four_decisions_are_enough_for_own_labels(checkpoint: str) -> None:
    path = f"init.path={checkpoint}/bert"
    found = _built("init=hf", path, "init.provenance=public", *TABLE)
    assert (found.model.vocabulary_size, found.data.vocabulary.size, found.data.vocabulary.path) == (25, 25, f"{checkpoint}/bert")
    assert (found.data.public_fraction, found.data.sequence_length, found.task.name, found.task.pooled_outputs) == (
        0.0,
        16,
        "classification",
        3,
    )
    assert found.train.kind == "last_layer" and found.lr_schedule.learning_rate == 1e-2
    assert found.optimizer.knobs["weight_decay"] == 0.0


@pytest.mark.parametrize("turn", range(4))
def test_what_the_user_chooses_wins_in_every_order(checkpoint: str, turn: int) -> None:
    own = ["init=hf", "model=micro", "optimizer=adamw", "lr_schedule=cosine", "train=bias", "train.head=true", "task.classes=3"]
    own += [f"init.path={checkpoint}/bert", "data=table", "data.public_fraction=0.1", "data.vocabulary.size=70", "task=classification"]
    own += [*TABLE[1:], "lr_schedule.learning_rate=0.5", "data.sequence_length=8"]
    order = own[turn::4] + [one for number, one in enumerate(own) if number % 4 != turn]
    found = _built(*(reversed(order) if turn % 2 else order))
    assert (found.model.name, found.optimizer.knobs["optimizer"], found.train.kind) == ("micro", "adamw", "bias")
    assert (found.lr_schedule.learning_rate, found.data.public_fraction, found.data.vocabulary.size) == (0.5, 0.1, 70)
    assert (found.data.sequence_length, found.task.pooled_outputs) == (8, 3)


def test_a_language_model_of_a_checkpoint_trains_everything_on_plain_rows(checkpoint: str) -> None:
    found = _built("task=causal_lm", "init=hf", f"init.path={checkpoint}/gpt2", "data=text", "data.source.paths=a.txt")
    assert (found.data.pairs, found.data.sequence_length, found.train.kind) == ("none", 16, "all")
    assert found.lr_schedule.learning_rate == 5e-4
    assert _built("task=causal_lm", "model=decoder_micro", "data=text", "data.source.paths=a.txt").data.sequence_length == 64


def test_a_recipe_of_a_paper_keeps_its_values_with_a_checkpoint(checkpoint: str) -> None:
    before = _built("+experiment=dpfp_table2_nonprivate")
    after = _built("+experiment=dpfp_table2_nonprivate", "init=hf", f"init.path={checkpoint}/bert")
    changed = [field for field in before.__dataclass_fields__ if getattr(before, field) != getattr(after, field)]
    assert changed == ["data", "init"] and after.data.vocabulary.size == before.data.vocabulary.size


def test_a_checkpoint_that_is_not_there_is_named(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=f"^init.path={checkpoint}/none: no such folder"):
        _built("init=hf", f"init.path={checkpoint}/none", *TABLE)


def test_all_missing_values_are_listed_at_once() -> None:
    with pytest.raises(ConfigError, match="data.source.paths, steps"):
        config.build(recipes.compose(["data=text", "steps=???"]))


HOW_AND_WHERE = [
    "model.rematerialize=layers",
    "model.attention=xla",
    "mesh=cpu8",
    "clipping_method.name=vmap",
    "schedule.evaluate_every=7",
    "microbatch=4",
    "job=plan",
    "list.match=a",
]


@pytest.mark.parametrize("override", HOW_AND_WHERE)
def test_run_name_ignores_how_and_where(override: str) -> None:
    overrides = ["job=list"] if override.startswith("list") else []
    assert _name([*overrides, override]) == _name(overrides)


@pytest.mark.parametrize("override", ["replicate=1", "seed=1", "steps=7", "noise.epsilon=3", "data.sequence_length=48"])
def test_run_name_follows_the_claim(override: str) -> None:
    assert _name([override]) != _name([])


def test_composing_a_config_and_naming_its_run_opens_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text((SMALL_CHECKPOINT / "config.json").read_text())
    given = ["init=hf", f"init.path={tmp_path}", "model=hf", "task=classification", "data=random"]
    for folder in (tmp_path, tmp_path / "missing"):
        with monkeypatch.context() as patched:
            for reader in ("folder_of", "config_of"):
                patched.setattr(identity, reader, lambda *_: pytest.fail("a checkpoint was read"))
                patched.setattr(checkpoint_shape, reader, lambda *_: pytest.fail("a checkpoint was read"))
            overrides = [*given, f"init.path={folder}"]
            # Also of a search: its launch reads the shape, a part of what its trials are drawn from (`dpx.launch.search.declared`).
            search = ["tune=search", "tune.charge=repeat_and_select"]
            for more in ([], search):
                cfg = recipes.compose([*overrides, *more], with_hydra=True)
                assert config.run_name(cfg) and composed(cfg)["model"]["_target_"] == checkpoint_shape.TARGET
    with pytest.raises(ConfigError, match=f"^init.path={tmp_path}/missing: no such folder"):
        config.build(recipes.compose(overrides))
    experiment, _ = config.build(recipes.compose([*given, f"init.path={tmp_path}"]))
    assert experiment.data.vocabulary.size == experiment.model.vocabulary_size


def test_a_joint_account_is_not_in_the_folder_of_the_default_run() -> None:
    names = []
    for ledgers in ("[first,second]", "[first,third]", "[]"):
        cfg = recipes.compose(["job=account", f"job.ledgers={ledgers}"], with_hydra=True)
        names.append(config.run_name(cfg))
    assert len(set(names)) == 3 and [name.startswith("jobs/account-") for name in names] == [True, True, False]


def test_a_doctor_is_not_in_the_folder_of_the_default_run() -> None:
    names = [config.run_name(recipes.compose(["job=doctor", *more], with_hydra=True)) for more in ([], ["steps=7"], ["mesh=h100"])]
    assert names[0] == names[1] != names[2] and all(name.startswith("jobs/doctor-") for name in names)


def _name(overrides: list[str]) -> str:
    cfg = recipes.compose([*overrides], with_hydra=True)
    # `job=list` has its own folder; here only the claim's part of the name is compared.
    cfg.hydra.runtime.choices.job = "train"
    return config.run_name(cfg)
