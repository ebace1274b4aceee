"""Declares `sampler=cyclic_poisson`: groups of rows take turns, so that a row is not drawn again for a fixed number of steps."""

from typing import Any, ClassVar, Literal

import numpy as np

from dpx.declaration import declaration, require
from dpx.privacy.declared_privacy import Accountant, Privacy
from dpx.processes.place import WHOLE, Part
from dpx.sampler import poisson
from dpx.sampler.sampler_protocol import GeneratorFor, Sampler


@declaration
class CyclicPoisson(Sampler):
    """Draws each row of the step's group independently, with probability `cycle` q_t.

    Row i belongs to group i mod `cycle`, and step t draws from group t mod `cycle`.

    A row's steps are at least `cycle` apart, which correlated noise needs (Choquette-Choo et al. 2023, section 4). The proof assumes that
    the row's group is the same in both neighbours, so rows keep their numbers, and a unit is one row.

    Attributes:
        cycle: Number of groups of rows: a row takes part at most once in so many steps.
    """

    cycle: int
    assumed: None = None
    name: Literal["cyclic_poisson"] = "cyclic_poisson"
    needs_one_batch_size: ClassVar[bool] = True
    needs_fixed_numbers: ClassVar[bool] = True
    explanation: ClassVar[str] = (
        "rows are divided into groups that take turns; each row of the group is drawn independently, and the draw must stay secret"
    )

    def __post_init__(self) -> None:
        require(self.cycle >= 1, f"sampler.cycle={self.cycle}", "there must be at least one group", "Use 1 or more")

    @property
    def steps_apart(self) -> int:
        return self.cycle

    def draw(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int) -> np.ndarray:
        return self.draw_part(size, sampling_probability, generator_for, step, WHOLE)

    def draw_part(self, size: int, sampling_probability: float, generator_for: GeneratorFor, step: int, part: Part) -> np.ndarray:
        group = step % self.cycle
        members, q = len(range(group, size, self.cycle)), min(1.0, sampling_probability * self.cycle)
        return group + self.cycle * poisson.independent(members, q, generator_for, step, part)

    def largest_batch(self, size: int) -> int:
        return size // self.cycle

    def check(self, privacy: Privacy, accountant: Accountant) -> None:
        name = "sampler=cyclic_poisson"
        require(
            privacy.rows_per_unit_max == 1,
            f"{name}, privacy.rows_per_unit_max={privacy.rows_per_unit_max}",
            "rows of one unit may be in several groups",
            "Use privacy.unit=row",
        )
        require(
            accountant.name != "gdp_clt",
            f"{name}, accountant=gdp_clt",
            "the central limit theorem is known for plain Poisson sampling only",
            "Use accountant=pld",
        )

    def ledger_fields(self, size: int, batch: int) -> dict[str, Any]:
        """Returns q of plain sampling: `cycle` determines how often a row's group has its turn, and the probability in that turn."""
        return super().ledger_fields(size, batch) | {"cycle": self.cycle}
