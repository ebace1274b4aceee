"""What is protected, between which neighbours, and who computes epsilon, as declared."""

from typing import Literal

from dpx.declaration import declaration, require

Adjacency = Literal["zero_out", "add_remove", "replace_one"]


@declaration
class Privacy:
    """The unit of privacy, its neighbouring relation and delta.

    `rows_per_unit_max` is the enforced cap of prepared rows one unit may have: surplus rows are dropped at preparation.
    """

    delta: float
    adjacency: Adjacency = "zero_out"
    unit: Literal["row", "document", "author"] = "row"
    rows_per_unit_max: int = 1
    allow_large_delta: bool = False

    def __post_init__(self) -> None:
        require(0 < self.delta < 1, f"privacy.delta={self.delta}", "delta is a probability above 0 and below 1", "Use a value below 1/N")
        require(
            self.rows_per_unit_max >= 1,
            f"privacy.rows_per_unit_max={self.rows_per_unit_max}",
            "a unit holds at least one row",
            "Use 1 or more",
        )
        require(
            self.unit != "row" or self.rows_per_unit_max == 1,
            f"privacy.rows_per_unit_max={self.rows_per_unit_max}",
            "a row is one row",
            "Use privacy.rows_per_unit_max=1, or privacy.unit=document",
        )


@declaration
class Pld:
    """Numerical composition of privacy loss distributions, rounded pessimistically (dp-accounting)."""

    name: Literal["pld"] = "pld"


@declaration
class Rdp:
    """Renyi accounting with the improved conversion; `orders=None` takes dp-accounting's grid."""

    orders: tuple[float, ...] | list[float] | None = None
    name: Literal["rdp"] = "rdp"


@declaration
class Deterministic:
    """Exact Gaussian profiles without amplification by sampling."""

    name: Literal["deterministic"] = "deterministic"


@declaration
class GdpClt:
    """The Gaussian-DP central limit: an approximation that can under-report. `pld` proves the run's epsilon beside it."""

    name: Literal["gdp_clt"] = "gdp_clt"


Accountant = Pld | Rdp | Deterministic | GdpClt
