"""Anil et al. 2021, sections 1.1 and 5.3: how far apart the batch sizes are (A13). Arithmetic."""

from dpx.declaration import declaration, require
from dpx.table import Table


@declaration
class AnilSgd32xRef:
    """The headline's batch size over that of the largest private language-model batch before it."""

    batch_size: int
    reference_batch_size: int

    def __post_init__(self) -> None:
        require(
            self.reference_batch_size > 0,
            f"analysis.reference_batch_size={self.reference_batch_size}",
            "nothing to compare with",
            "Use 1 or more",
        )

    def __call__(self) -> list[Table]:
        ratio = self.batch_size / self.reference_batch_size
        columns = ("batch size", "reference", "ratio", "published ratio")
        return [Table("batch_ratio", columns, ((self.batch_size, self.reference_batch_size, ratio, 32),), "how much larger the batch is")]
