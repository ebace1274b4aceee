"""Statements of runs that never ran, whole as a writer demands them."""

import dataclasses
from typing import Any

from dpx.claim import spent
from dpx.privacy.ledger import Ledger
from dpx.privacy.origins import VocabularyFacts, facts
from dpx.statement.seals import FORMAT
from dpx.statement.statement_records import (
    DrawnTrials,
    LedgerFacts,
    MechanismFacts,
    PlainStatement,
    PlannedEpsilon,
    RecordFacts,
    RecordMark,
    RunStatement,
    Score,
    SpentEpsilon,
    StudyLedger,
    StudyStatement,
)

MECHANISM = MechanismFacts(
    name="dp_sgd",
    clip="flat",
    clipping_norm=1.0,
    noise_multiplier=1.0,
    noise_batch_ratio=0.1,
    rounding_margin=0.0,
    releases=("the parameters of every step",),
    grid_margin=0.0,
    generator="made up",
    generator_strength_bits=64,
    noise_reach_in_deviations=None,
)


def made_statement(entered: Ledger, **changes: Any) -> RunStatement:
    """A sound statement of what `entered` holds, with `changes`."""
    segments = tuple(entered.segments())
    line = spent.chain_facts(entered)
    fields: dict[str, Any] = {
        "format": FORMAT,
        "name": "made_up",
        "replicate": 0,
        "steps": 2,
        "outside_code": (),
        "train": None,
        "init": facts(entered.origins),
        "vocabulary": VocabularyFacts(),
        "tuning": None,
        "guarantee": "dp",
        "reasons": (),
        "epsilon": {},
        "not_covered": (),
        "unit": "row",
        "rows_per_unit_max": 1,
        "unit_mode": "group",
        "adjacency": "zero_out",
        "delta": 1e-5,
        "declared_size": 1000,
        "sampler": {"name": "poisson"},
        "mechanism": MECHANISM,
        "assumptions": (),
        "audit": None,
        "units": tuple(entered.units),
        "accountant": "rdp",
        "epsilon_is_of": "",
        "epsilon_at": (),
        "unsupported": (),
        "planned": PlannedEpsilon(steps=2, epsilon={}),
        "spent": SpentEpsilon(steps=0, charged_steps=sum(one.count for one in segments), epsilon={}, valid_only_if=""),
        "ledger": LedgerFacts(
            segments=segments, events=(), rates_rounded_up=None, identity=entered.identity, mark=line.mark, chain=line.chain
        ),
    }
    return RunStatement(**(fields | changes))


def made_plain(entered: Ledger) -> PlainStatement:
    """The statement of a run without privacy."""
    names = [field.name for field in dataclasses.fields(PlainStatement) if field.name not in ("kind", "ledger")]
    shared = {name: getattr(made_statement(entered), name) for name in names}
    return PlainStatement(**shared | {"guarantee": "not_private", "reasons": ("mechanism=none",)}, ledger=spent.chain_facts(entered))


def made_study() -> StudyStatement:
    """The statement of a search of a secret number of trials."""
    return StudyStatement(
        format=FORMAT,
        study="search",
        charge="repeat_and_select",
        trials=DrawnTrials(mean=3.0, shape="1.0"),
        guarantee="dp",
        reasons=(),
        unit="row",
        adjacency="zero_out",
        delta=1e-3,
        units=(),
        epsilon={"rdp": 1.0},
        unsupported=(),
        spent=None,
        budget=None,
        score=Score(name="accuracy", of="the trained parameters", reads="held-out rows", charged=False),
        winner="winner",
        assumptions=(),
        not_covered=(),
        draws_from=None,
        ledger=StudyLedger(repeated=()),
        record=RecordFacts(mark=RecordMark(chain="a", position=None, digest="b")),
    )
