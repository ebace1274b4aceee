"""The records of `plan.json`: the plan of a run, and that of an analysis."""

from typing import Literal

from dpx.cost.compiled import CompiledStep, MeasuredRun
from dpx.data.left_out import LeftOut
from dpx.files.records import described, record
from dpx.privacy.origins import Beginning
from dpx.statement.chain_seal import ChainClaim, FedStage
from dpx.statement.statement_records import Epsilons, NotABound

PLAN = "plan.json"


@record
class UnitNoise:
    """The noise that one bound on the rows of a unit and one `unit_mode` would need."""

    rows_per_unit_max: int = described("The most rows of a unit.")
    unit_mode: str = described("What is drawn and clipped.")
    noise_multiplier: float | None = described("The noise multiplier; null where dpx has no accounting for the setting.")
    noise_per_part: float | None = described("The same divided by the clipped gradients of a unit that has all its rows.")


@record
class RunPlan:
    """What a run would cost and guarantee."""

    kind: Literal["run"] = "run"
    name: str = described("Name of the experiment.")
    model: str = described("Name of the model.")
    parameters: int = described("Number of parameters.")
    vocabulary_size: int = described("Number of word pieces, one row of the word table each.")
    rematerialize: str = described("What the backward pass computes again: none, or layers.")
    attention: str = described("How attention is computed: explicit, or by xla or cudnn.")
    trained_parameters: int = described("Number of parameters that are trained.")
    steps: int = described("The planned number of steps.")
    examples: int = described("Expected number of rows or units that all steps draw.")
    drawn: str = described("What a step draws: rows or units of a kind.")
    protected_rows: int = described("The public number N of rows or units to draw from.")
    epochs: float = described("`examples` divided by `protected_rows`.")
    flops: float = described("Floating-point operations of the whole run, 6 M S per example.")
    flops_of_products: float = described("Floating-point operations of its matrix products.")
    flops_by_type: dict[str, float] = described(
        "The same by the type of a product's factors, where a product in two parts counts twice: bfloat16, float32, and float32_highest "
        "(float32 at full precision)."
    )
    mesh: str = described("Name of the mesh.")
    devices: int = described("Number of devices.")
    device_hours: float = described("Hours of all devices together, at the declared speed: products alone, no compiling, no evaluation.")
    device_hours_by_type: float = described("Hours of all devices together, if each type of product runs at its own rate of the mesh.")
    hours: float = described("`device_hours` divided by the devices.")
    microbatch: int = described("Rows or units that are computed at once.")
    memory_bytes_per_device: int = described("Estimated peak of memory on a device.")
    device_memory_bytes: int = described("Memory of a device.")
    fits: bool = described("Whether the peak fits the device.")
    sampler: str = described("Name of the sampler.")
    adjacency: str = described("The neighbouring relation.")
    unit: str = described("What one protected unit is.")
    unit_mode: str = described(
        'Whether steps draw rows ("group"), whole units ("sample_units") or units of which one row is read ("one_row").'
    )
    canaries: int = described("Number of places of canaries among what is drawn.")
    noise_multiplier: float | None = described("Standard deviation of the noise relative to the clipping norm; null without privacy.")
    releases: tuple[str, ...] = described("What the run releases under the claim.")
    noise_batch_ratio: float | None = described("The noise multiplier divided by the largest expected batch size; null without privacy.")
    delta: float | None = described("The delta of the claim; null without privacy.")
    epsilon: Epsilons = described("Epsilon at the planned end, by accountant, runs that it starts from included; empty without a proof.")
    epsilon_of_this_run: Epsilons = described("Epsilon of the run's own steps alone, by accountant; empty without a proof.")
    init: Beginning = described("Where the starting parameters come from.")
    unsupported: tuple[NotABound, ...] = described("Numbers that are not bounds, each with its reason.")
    guarantee: str = described("As the statement of the run would have it.")
    reasons: tuple[str, ...] = described("Reasons against a guarantee; empty for a run with one.")
    assumptions: tuple[str, ...] = described("What must be true for the guarantee to hold, in sentences.")
    not_covered: tuple[str, ...] = described("What the guarantee does not cover, in sentences.")
    hints: tuple[str, ...] = described("What a reader of the plan should look at, in sentences.")
    noise_by_unit: tuple[UnitNoise, ...] = described(
        "The noise by rows of a unit and `unit_mode`; empty for units of one row and in a chain.", default=()
    )
    public_left_out: LeftOut | None = described(
        "What rows of the public split leave out of its texts; null without public rows, or where the data is not prepared.", default=None
    )
    measured: MeasuredRun | None = described("The time of the run on this machine; null unless asked for.", default=None)
    compiled: CompiledStep | None = described("What the compiled step holds, sends and multiplies; null unless asked for.", default=None)


@record
class AnalysisInput:
    """What an analysis reads."""

    path: str = described("Where it is.")
    exists: bool = described("Whether it is there.")


@record
class AnalysisPlan:
    """What an analysis would read; nothing is trained."""

    kind: Literal["analysis"] = "analysis"
    name: str = described("Name of the experiment.")
    analysis: str = described("Class of the analysis.")
    inputs: tuple[AnalysisInput, ...] = described("What it reads.")
    device_hours: float = described("Hours of all devices: none.")


@record
class StagePlan(FedStage):
    """What one run of a stage would cost and guarantee by itself."""

    state: Literal["finished", "to_run"] = described("Whether it has run to its end; what has is not run again.")
    stale: tuple[str, ...] = described("Folders of the stage that were fed by a stage before it as that was then; they are not used.")
    plan: RunPlan | None = described("Its plan, from random parameters before the stage that feeds it has run; null without training.")


@record
class ChainPlan:
    """What a chain would cost and guarantee."""

    kind: Literal["chain"] = "chain"
    name: str = described("Name of the chain.")
    device_hours: float = described("Hours of all devices, of the stages that have still to run.")
    claim: ChainClaim = described("What all stages together would protect.")
    stages: tuple[StagePlan, ...] = described("Every run of every stage, in the order in which they run.")


PlanDocument = RunPlan | AnalysisPlan | ChainPlan
