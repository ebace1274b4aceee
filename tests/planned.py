"""The plan of a config as the JSON that `plan.json` holds."""

from typing import Any

from dpx.config.experiment import Experiment
from dpx.files.records import to_json
from dpx.job.run_plan import plan_of_run


def plan(experiment: Experiment, fork: str | None = None) -> dict[str, Any]:
    return to_json(plan_of_run(experiment, fork))
