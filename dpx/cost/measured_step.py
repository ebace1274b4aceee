"""The record of a measured step, which `plan.json` holds where it was asked for (`plan.measure=true`)."""

from dpx.records import described, record


@record
class MeasuredRun:
    """The time of a run on the machine that made the plan, from some of its steps. It has read no protected text."""

    device: str = described("Kind of the devices that ran the steps.")
    devices: int = described("Number of the devices.")
    rows: str = described("Where the rows of the steps come from: public, or synthetic (most of them full).")
    microbatch: int = described("Rows or units that were computed at once.")
    batch_size: int = described("Expected rows or units of a measured step; a step of another size takes time in proportion.")
    steps: int = described("How many steps were timed, after one that compiles.")
    step_s: float = described("Seconds of a step, padding included: the median.")
    compile_s: float = described("Seconds to compile the step and the evaluation.")
    evaluations: int = described("How often the run evaluates.")
    evaluation_s: float = described("Seconds of one evaluation.")
    read_once_s: float = described("Seconds to read every text once before the first step; 0 where the run does not do so.")
    saves: int = described("How often the run saves a checkpoint.")
    save_s: float = described("Seconds to save a checkpoint.")
    run_s: float = described("Seconds of the whole run: its sum. Preparing the data and solving for the noise are not in it.")
