"""Declares what a run measures of the time of its steps (`profile=none`, `steps` or `trace`). It imports no jax."""

from collections.abc import Sequence

from dpx.declaration import declaration, require


@declaration
class StepProfile:
    """Sets which measurements of time a run makes; the parameters and the claim are the same with and without them.

    Both are private, because time depends on the data.

    Attributes:
        shares: Whether every line of metrics says which share of the time went where.
        trace_steps: Steps, numbered as in metrics.jsonl, of which jax.profiler writes a trace; neighbours share one.
    """

    shares: bool = False
    trace_steps: Sequence[int] = ()

    def __post_init__(self) -> None:
        for step in self.trace_steps:
            require(step >= 1, f"profile.trace_steps=[{step}]", "steps are numbered from 1", "Use 1 or more")

    @property
    def is_on(self) -> bool:
        return self.shares or bool(self.trace_steps)

    def require_fits(self, steps: int) -> None:
        """Raises `ConfigError` for a step that the run, which has `steps` steps, never reaches."""
        for step in self.trace_steps:
            require(step <= steps, f"profile.trace_steps=[{step}]", f"the run has {steps} steps", f"Use {steps} or less")
