"""Determines the start of a run before any array of the model exists: its parameters and their privacy cost."""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dpx.config.declared_init import FromCheckpoint, FromFile, FromRun, Init
from dpx.config.experiment_parts import Receiver
from dpx.data import tokenizer
from dpx.data.declared_data import Data
from dpx.data.learnt_from import learnt_from
from dpx.data.prepare import vocabulary_place
from dpx.data.protected_units import unit_facts, unit_mismatch
from dpx.data.store import Store
from dpx.declaration import ConfigError, require
from dpx.files import weights
from dpx.files.weights import called, folder_of
from dpx.init.parent import Parent, of_fork, open_parent, parameters_of, require_no_known_release
from dpx.init.relation import are_same, contradictions, declared_disjoint, learnt_from_protected, relation
from dpx.interop.card import among, is_card_of_dpx, named_by_card
from dpx.interop.checkpoint import Checkpoint
from dpx.models.shape import AnyModel, with_means
from dpx.models.trained import OutputLayer, Trained
from dpx.privacy.declared_privacy import Privacy
from dpx.privacy.lines import Plan
from dpx.privacy.origins import UNREAD, CheckpointFacts, Origin, merged, require_same_relation
from dpx.statement import received
from dpx.task.task_protocol import Pooled

ADAPTERS = "layers/lora/"


@dataclasses.dataclass(frozen=True)
class Start:
    """Describes the start of a run. `origins` are the runs and files of the starting parameters, nearest first; empty for random ones.

    `parameters` are nested dicts on the host, `None` to draw them; a part above the layers may be missing, and is then drawn. `private` is
    the private tree that describes the origins' data, if any. `messages` tell the user what was loaded. A fork resumes from the whole state
    of its parent after `step` steps, in `private`, and must follow the `plan` that its parent declared.
    """

    origins: tuple[Origin, ...] = ()
    parameters: Any = None
    private: Path | None = None
    messages: tuple[str, ...] = ()
    step: int | None = None
    plan: Plan | None = None


RANDOM = Start()


def planned_start(init: Init, receiver: Receiver, store: Store | None = None, fork: str | None = None) -> Start:
    """Returns the start of a run that has not begun, without its weights. No jax.

    Raises `ConfigError` if `start` or `start_of_fork` would. `store` is its prepared data; without it no data can be compared, and all data
    counts as shared.
    """
    require_one_start(init, fork)
    if fork is None:
        return Start(_decided(init, receiver, store)[0])
    origins, parent = _of_run(of_fork(fork), receiver, store, f"fork={fork}")
    return Start(origins, step=parent.step, plan=parent.plan or Plan())


def require_one_start(init: Init, fork: str | None) -> None:
    """Raises `ConfigError` for a fork that also declares another start."""
    require(
        fork is None or init.is_random,
        f"fork={fork} with init={init.kind}",
        "a fork already begins from the checkpoint of its parent, and inherits the origins of its parent",
        "Remove one of them",
    )


def start_of_fork(fork: str, receiver: Receiver, store: Store, own_private: Path) -> Start:
    """Returns the start of a fork, whose state stays on disk; `own_private` is the fork's private tree.

    Raises `ConfigError` as `start` does.
    """
    asked = f"fork={fork}"
    origins, parent = _of_run(of_fork(fork), receiver, store, asked)
    told = tuple(contradictions(origins, store, parent.private, own_private))
    return Start(origins, private=parent.private, messages=told, step=parent.step, plan=parent.plan or Plan())


def start(init: Init, receiver: Receiver, store: Store, outputs: Iterable[Path], own_private: Path | None = None) -> Start:
    """Returns the start of a run, weights included.

    `outputs` are folders of runs whose releases a file may not hold; `own_private` is the run's private tree. Raises `ConfigError` for a
    parent that is missing, incomplete, being trained or in disagreement with its ledger, for weights that are cut short or of another model
    or type, for another vocabulary, and for charges that cannot be composed.
    """
    origins, parent = _decided(init, receiver, store)
    if isinstance(init, FromFile):
        leaves = weights.read_file(Path(init.file))
        return _from_elsewhere(f"init.file={init.file}", origins, leaves, outputs)
    if isinstance(init, FromCheckpoint):
        checkpoint = Checkpoint(init.path)
        selected = checkpoint.select(receiver.shapes, receiver.model)
        leaves, told = with_means(checkpoint.leaves(selected), receiver.shapes), selected.in_words()
        if count := getattr(receiver.model, "new_rows", 0):
            told += (f"the table of {checkpoint.asked} has {count} rows more, for new tokens: each is the mean of its rows",)
        return _from_elsewhere(checkpoint.asked, origins, leaves, outputs, told)
    if parent is None:
        return Start(origins, messages=tuple(contradictions(origins, store, own_private, own_private)))
    assert isinstance(init, FromRun)

    taken, whole = taken_from(parent, receiver), parameters_of(parent, receiver.train)
    leaves = {path: leaf for path, leaf in whole.items() if path in taken or path.startswith(ADAPTERS)}
    unchanged = open_parent(init, parent.asked).origins == parent.origins
    require(unchanged, parent.asked, "continued to train while its weights were read", "Wait for it to end")
    own = {path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items() if not path.startswith(ADAPTERS)}
    weights.require_shapes(parent.asked, {path: receiver.shapes[path] for path in taken}, own)
    weights.require_finite(parent.asked, leaves)
    first = dataclasses.replace(origins[0], weights=weights.checksum(leaves), step=parent.step)
    made_new = [path for path in receiver.shapes if path not in taken]
    told = [f"of {parent.asked} {len(leaves)} parameters were loaded; made new: {', '.join(sorted(made_new))}"] if made_new else []
    told += contradictions(origins, store, parent.private, own_private)
    return Start((first, *origins[1:]), weights.nested(leaves), parent.private, tuple(told))


def taken_from(parent: Parent, receiver: Receiver, is_fork: bool = False) -> tuple[str, ...]:
    """Paths of the parameters that `receiver` takes from a run: all of them in a fork or from a run of the same task, else its body and the
    heads that both have. Raises `ConfigError` where they do not fit, and where a parameter that is drawn at random would be frozen."""
    if is_fork or type(parent.task) is type(receiver.task):
        weights.require_shapes(parent.asked, receiver.shapes, {path: (shape, "float32") for path, shape in parent.shapes.items()})
        return tuple(receiver.shapes)
    taken = weights.of_another_task(parent.asked, receiver.shapes, parent.shapes)
    _require_trained([path for path in receiver.shapes if path not in taken], receiver.train)
    return taken


def _from_elsewhere(
    asked: str, origins: Sequence[Origin], leaves: weights.Leaves, outputs: Iterable[Path], messages: tuple[str, ...] = ()
) -> Start:
    """Returns the start from weights without a known training run, the first of `origins`."""
    require_no_known_release(asked, leaves, outputs)
    weights.require_finite(asked, leaves)
    digest = weights.checksum(leaves)
    first = dataclasses.replace(origins[0], identity=digest, weights=digest)
    return Start((first, *origins[1:]), weights.nested(leaves), messages=messages)


@dataclasses.dataclass(frozen=True)
class Held:
    """The data that a run protects; `checksums` are those of its prepared data, as far as they are known."""

    data: Data
    privacy: Privacy
    checksums: tuple[str | None, ...] = ()


def held_by(receiver: Receiver, store: Store | None) -> Held:
    """Returns the data of a run; `store` is `None` before they are prepared."""
    return Held(receiver.data, receiver.privacy, () if store is None else (store.manifest.checksum,))


def related(origin: Origin, held: Held, disjoint: Iterable[str], is_holders_data: bool) -> Origin:
    """Returns `origin` with its relation to the data of a run that starts from it, or whose release is seen beside it.

    `disjoint` are the identities that the run declares to share no unit with it; `is_holders_data` says that it draws from the same
    prepared data as the run that held this record before.
    """
    if origin.kind == "table":
        return origin
    if origin.kind == "file":
        # External weights may have been trained on this run's data, by what they were trained on, or by their name.
        facts, against = origin.checkpoint, list(origin.against)
        if may_hold := among(held.data.known_as, facts.trained_on if facts else ()):
            against.append(f"{origin.name} was trained on {', '.join(may_hold)}, which may contain this run's data")
        if named := among(held.data.known_as, facts.names if facts else ()):
            against.append(f"{origin.name} has the name {named[0]}, which suggests that it was trained on this run's data")
        return dataclasses.replace(origin, against=tuple(dict.fromkeys(against)))
    origin = dataclasses.replace(origin, relation=relation(origin, disjoint, is_holders_data), against=())
    mismatch = unit_mismatch(origin, held.data, held.privacy, are_same(origin.data, held.checksums))
    learnt = learnt_from_protected(origin, unit_facts(held.data, held.privacy), held.checksums)
    return dataclasses.replace(origin, against=tuple(reason for reason in (mismatch, learnt) if reason))


def related_again(noted: Sequence[Origin], receiver: Receiver, init: Init, store: Store, drawn_from: Sequence[str | None]) -> list[Origin]:
    """Returns the origins in a run's ledger with their relation computed again, for a run that resumes.

    Its data (`drawn_from` so far) may have been prepared again.
    """
    known = merged(noted, beside_weights(receiver))
    disjoint = _declared(init, receiver, known)
    held = held_by(receiver, store)
    return [related(origin, held, disjoint, are_same(drawn_from, held.checksums)) for origin in known]


def beside_weights(receiver: Receiver) -> tuple[Origin, ...]:
    """Returns the origins of a run that no weights bring: texts that its vocabulary is from, and measured runs that chose settings."""
    chosen, texts = receiver.chosen_by, vocabulary_of(receiver.data)
    if chosen is None:
        return texts
    return *texts, Origin(kind="table", name=chosen.name, identity=chosen.identity, provenance=chosen.provenance)


def vocabulary_of(data: Data) -> tuple[Origin, ...]:
    """Returns the texts that a given vocabulary was learnt from, as far as dpx knows; empty for one that the run fits."""
    place = None if data.vocabulary.path is None else vocabulary_place(data.vocabulary.path)
    return learnt_from(place, Path(data.directory)) if place is not None and place.exists() else ()


def _declared(init: Init, receiver: Receiver, origins: Sequence[Origin]) -> frozenset[str]:
    """Returns the identities of the origins that the run declares to share no unit with it."""
    by_vocabulary = declared_disjoint(origins, receiver.data.vocabulary.disjoint_from, "data.vocabulary.disjoint_from")
    return by_vocabulary | (declared_disjoint(origins, init.disjoint_from) if isinstance(init, FromRun) else frozenset())


def _decided(init: Init, receiver: Receiver, store: Store | None) -> tuple[tuple[Origin, ...], Parent | None]:
    """Returns the origins of a run that has not begun, those of its weights first, and the run that it starts from, if any."""
    if isinstance(init, FromRun):
        return _of_run(init, receiver, store, f"init.run={init.run}")
    if store is not None:
        tokenizer.require_read_elsewhere(store.tokenizer(), getattr(receiver.model, "family", ""))
    beside = beside_weights(receiver)
    disjoint = _declared(init, receiver, beside)
    learnt = [related(one, held_by(receiver, store), disjoint, False) for one in beside]
    if isinstance(init, FromFile):
        weights.require_shapes(f"init.file={init.file}", receiver.shapes, weights.of_file(Path(init.file)))
        return (Origin(kind="file", name=Path(init.file).name, identity=UNREAD, provenance=init.provenance), *learnt), None
    if isinstance(init, FromCheckpoint):
        return (_of_checkpoint(init, receiver, store), *learnt), None
    return tuple(learnt), None


def _of_run(init: FromRun, receiver: Receiver, store: Store | None, asked: str) -> tuple[tuple[Origin, ...], Parent]:
    """Checks a run that another run starts from, by a fork or by its weights; returns its origins, and the run as `Parent`."""
    parent, is_fork = open_parent(init, asked), asked.startswith("fork=")
    if is_fork:
        # Its state is of the same parameters, and of an optimizer of the same formula, whose arguments may differ; the states of dpx's Adam
        # and optax's Adam have different forms.
        own, theirs = ((type(one), one.name) for one in (receiver.optimizer, parent.optimizer))
        for key, of_parent, is_same in (
            ("train", parent.train.kind, parent.train == receiver.train),
            ("optimizer", parent.optimizer.name, own == theirs),
        ):
            fix = f"Use {key}={of_parent} as its parent, or init=run init.run=... init.step=..., which uses only the weights"
            require(is_same, parent.asked, f"its checkpoint was made with {key}={of_parent}, and this run uses another {key}", fix)
    head = ("classifier", "pool") if isinstance(receiver.task, Pooled) else ()
    _require_same_function(parent.asked, parent.model, receiver.model, f"model={parent.model.name}", head)
    taken_from(parent, receiver, is_fork)
    its_data, held = parent.origins[0].data, held_by(receiver, store)
    # Whether a run is a fork says something of that run alone, and not of one that begins from it.
    come_from = parent.origins if is_fork else [dataclasses.replace(one, is_fork=False) for one in parent.origins]
    first, *further = merged(come_from, beside_weights(receiver))
    disjoint = _declared(init, receiver, (first, *further))
    origins = (
        related(dataclasses.replace(first, is_fork=is_fork), held, disjoint, False),
        *(related(origin, held, disjoint, are_same(its_data, held.checksums)) for origin in further),
    )
    # Weights have no meaning under another vocabulary, and data is compared by it; it is unknown before the data is prepared.
    if store is not None and not are_same(origins[0].data, (store.manifest.checksum,)):
        theirs = origins[0].vocabulary.sha256
        if theirs is None:
            fix = "Begin from its original folder and with the same prepared data, or train it again"
            raise ConfigError(parent.asked, "does not state the vocabulary that it was trained with", fix)
        fix = "Set data.vocabulary.path to its vocabulary.txt, which is in the folder of its data"
        _require_vocabulary_of(store, parent.asked, theirs, fix)
    if receiver.is_private:
        require_same_relation(origins, receiver.privacy)
    return origins, parent


def _of_checkpoint(init: FromCheckpoint, receiver: Receiver, store: Store | None) -> Origin:
    require_not_exported(init)
    checkpoint = Checkpoint(init.path)
    _require_same_function(checkpoint.asked, checkpoint.model, receiver.model, "model=hf")
    selected = checkpoint.select(receiver.shapes, receiver.model)
    _require_trained(selected.made_new, receiver.train)
    if store is not None:
        # Weights have no meaning under another vocabulary, or another normalisation of text before it.
        fix = f"Add data.vocabulary.path={checkpoint.folder}"
        if not getattr(receiver.model, "new_rows", 0):
            _require_vocabulary_of(store, checkpoint.asked, tokenizer.vocabulary_checksum(checkpoint.folder), fix)
        theirs = tokenizer.of_path(checkpoint.folder, store.manifest.vocabulary_size)
        old = theirs.vocabulary[: checkpoint.model.vocabulary_size]
        reason = "has other tokens in its rows than the tokenizer of this run's data, which may only have more behind them"
        require(store.vocabulary()[: len(old)] == old, checkpoint.asked, reason, fix)
        reason = "treats case, accents or Chinese characters differently from the tokenizer of this run's data"
        require(_normalised(store.tokenizer()) == _normalised(theirs), checkpoint.asked, reason, fix)
    # The config of fine-tuned weights often still has the name of the weights that they began from, so it does not name these weights.
    name, in_config = called(init.path), checkpoint.config.get("_name_or_path")
    facts = CheckpointFacts(
        loaded=tuple(sorted(selected.parts)),
        made_new=tuple(selected.made_new),
        left_out=tuple(selected.left_out),
        trained_on=tuple(dict.fromkeys([*init.trained_on, *named_by_card(checkpoint.folder)])),
        names=tuple(sorted({name, *([called(str(in_config))] if in_config else ())})),
    )
    origin = Origin(kind="file", name=name, identity=UNREAD, provenance=init.provenance, checkpoint=facts)
    return related(origin, held_by(receiver, store), (), False)


def _require_trained(made_new: Iterable[str], train: Trained) -> None:
    """Raises `ConfigError` if a newly drawn, random parameter would be frozen: the output of the model would then depend on random
    numbers."""
    frozen = [path for path in made_new if not train.selection().picks(path)]
    fix = "Add train.head=true" if train.kind in ("lora", "lora_ffa", "bias", "rows") else "Train it too, or use train=last_layer"
    fix = "Begin from weights that hold it, or use model.classifier=linear" if isinstance(train, OutputLayer) else fix
    require(not frozen, f"train={train.kind}", f"{', '.join(frozen[:2])} would be initialised at random and never trained", fix)


def require_not_exported(init: FromCheckpoint) -> None:
    """Raises `ConfigError` for weights that a run of dpx trained, or that were saved again from such weights: their privacy cost must be
    charged. Adapters that PEFT merged and saved without the export's tokenizer and card have no mark of dpx left."""
    folder, asked = folder_of(init.path), f"init.path={init.path}"
    received.require_not_of_dpx(folder, asked, is_card_of_dpx(folder))


def _normalised(own: tokenizer.TextTokenizer) -> str:
    text, normaliser = "A\u00e9\u4e2d\u56fd", own.tokenizer.normalizer
    return text if normaliser is None else normaliser.normalize_str(text)


def _require_vocabulary_of(store: Store, asked: str, checksum: str, fix: str) -> None:
    is_same = checksum == store.manifest.vocabulary_checksum
    require(is_same, asked, "was trained with another vocabulary than the vocabulary of this run's data", fix)


# Settings of a decoder with rotary positions that no shape shows.
_OF_ROTARY = ("family", "key_value_heads", "rms_norm_eps", "rotary_base", "rotary_scaling", "rotary_factor", "rotary_low_frequency")
_OF_ROTARY += ("rotary_high_frequency", "rotary_original_positions", "window", "full_every", "window_rotary_base", "query_scale")
_OF_ROTARY += ("attention_cap", "logit_cap", "unturned_every")


def _require_same_function(asked: str, theirs: AnyModel, model: AnyModel, named: str, further: Sequence[str] = ()) -> None:
    """Raises `ConfigError` if two models of the same shapes compute different functions of their parameters."""
    for name in ("causal", "heads", "gelu", "layer_norm_eps", "position_offset", *_OF_ROTARY, *further):
        one, other = getattr(theirs, name, None), getattr(model, name, None)
        require(one == other, f"model.{name}={other}", f"{asked} contains a model with {one}", f"Use {named}, or other weights")


def same_weights(origins: Iterable[Origin], noted: Iterable[Origin]) -> bool:
    """Returns whether a run that is started again reads the same weights as those in its ledger."""
    known = {(origin.identity, origin.weights) for origin in noted if origin.weights}
    return all((origin.identity, origin.weights) in known for origin in origins if origin.weights)
