"""Declares what is protected, the neighbouring relation, and the accountant that computes epsilon."""

from typing import Any, Literal

from dpx.declaration import declaration, require

Adjacency = Literal["zero_out", "zero_out_text", "add_remove", "replace_one"]


@declaration
class Privacy:
    """The unit of privacy, its neighbouring relation and delta.

    Under `group` single rows are drawn and clipped, and the accountant charges for all rows of a unit at once. Under `sample_units` whole
    units are, so the batch size, the divisor and N all count units. Under `one_row` units are as well, but only one row of each is read, a
    function of the unit and the nominal epoch of the step (`dpx.data.store.Store.examples`).

    Attributes:
        delta: Probability with which the bound of epsilon may fail; keep it below one over the number of units.
        adjacency: How two neighbouring corpora differ: one unit's content zeroed out, its text alone zeroed out, one unit more or less,
            or one replaced.
        unit: What is protected: a row, a document, or all documents of an author.
        rows_per_unit_max: Enforced maximum number of prepared rows per unit; surplus rows are dropped at preparation.
        unit_mode: What is drawn and clipped: single rows (group), whole units (sample_units), or units of which one row is read
            (one_row).
        allow_large_delta: Whether a delta that is not below one over the number of units is accepted.
        assumed: Config keys whose values are assumptions, such as data.declared_size; with any of them the run has no guarantee.
    """

    delta: float
    adjacency: Adjacency = "zero_out"
    unit: Literal["row", "document", "author"] = "row"
    rows_per_unit_max: int = 1
    unit_mode: Literal["group", "sample_units", "one_row"] = "group"
    allow_large_delta: bool = False
    assumed: tuple[str, ...] | list[str] = ()

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, f"privacy.delta={self.delta}", "delta is a probability above 0 and below 1", "Use a value below 1/N")
        require(
            self.rows_per_unit_max >= 1,
            f"privacy.rows_per_unit_max={self.rows_per_unit_max}",
            "a unit has at least one row",
            "Use 1 or more",
        )
        require(
            self.unit != "row" or self.rows_per_unit_max == 1,
            f"privacy.rows_per_unit_max={self.rows_per_unit_max}",
            "with privacy.unit=row a unit has exactly one row",
            "Use privacy.rows_per_unit_max=1, or privacy.unit=document",
        )
        require(
            self.unit != "row" or self.unit_mode == "group",
            f"privacy.unit_mode={self.unit_mode} with privacy.unit=row",
            "with privacy.unit=row each row is already drawn separately",
            "Use privacy.unit=document, or privacy.unit_mode=group",
        )

    @property
    def rows_per_example(self) -> int:
        """Returns the number of rows in one example, padding rows included.

        An example is what is drawn and clipped as one, and what `batch_schedule.size` and `microbatch` count.
        """
        return self.rows_per_unit_max if self.unit_mode == "sample_units" else 1

    @property
    def drawn(self) -> str:
        """Returns the name of the units that the sampler draws, and that the batch size and N count."""
        return "row" if self.unit_mode == "group" else self.unit

    def population(self, manifest: Any) -> int:
        """Returns the number of rows or units from which the sampler draws, for the `manifest` of a prepared store."""
        return manifest.rows["protected"] if self.unit_mode == "group" else manifest.units["protected"]


@declaration
class LossGrid:
    """The grid of privacy loss distributions that an accountant composes, or that are composed beside it (`epsilon/pld`).

    Attributes:
        value_discretization_interval: Largest width of the grid, above 0 and at most 1; null means the default of `dpx.privacy.loss_grid`.
            A wider grid takes less time and can only raise epsilon; a finer one changes nothing.
    """

    value_discretization_interval: float | None = None

    def __post_init__(self) -> None:
        width = self.value_discretization_interval
        require(
            width is None or 0 < width <= 1,
            f"accountant.value_discretization_interval={width}",
            "the width of the grid of privacy losses is above 0 and at most 1",
            "Use 1e-3, or null for the default",
        )


@declaration
class Pld(LossGrid):
    """The accountant that composes privacy loss distributions numerically, rounded pessimistically (dp-accounting)."""

    name: Literal["pld"] = "pld"


@declaration
class Rdp(LossGrid):
    """The accountant that adds up Renyi divergences, with the improved conversion (Canonne et al. 2020).

    Attributes:
        orders: Renyi orders that are tried; null takes dp-accounting's orders.
    """

    orders: tuple[float, ...] | list[float] | None = None
    name: Literal["rdp"] = "rdp"


@declaration
class Deterministic(LossGrid):
    """The accountant of exact Gaussian profiles, without amplification by sampling (Balle and Wang 2018)."""

    name: Literal["deterministic"] = "deterministic"


@declaration
class GdpClt(LossGrid):
    """The central limit of Gaussian DP, an approximation that can be too small. The run's epsilon is then proved by `pld`."""

    name: Literal["gdp_clt"] = "gdp_clt"


Accountant = Pld | Rdp | Deterministic | GdpClt
