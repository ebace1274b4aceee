"""Computes the ratio of batch sizes (A13) and the size of the model (A3) of Anil et al. 2021, sections 1.1, 4 and 5.3. Arithmetic only."""

from dpx.cost.flops import published_flops
from dpx.declaration import declaration, require
from dpx.models.shape import Bert
from dpx.table import Table

LARGE = Bert(name="large", layers=24, width=1024, heads=16, feed_forward=4096)
STEPS, LENGTH = 20_000, 128


@declaration
class AnilSgd32xRef:
    """Divides the paper's batch size by that of the largest private language-model batch before it.

    Attributes:
        batch_size: The paper's largest batch.
        reference_batch_size: The largest private language-model batch before it.
    """

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
        batches = Table("batch_ratio", columns, ((self.batch_size, self.reference_batch_size, ratio, 32),), "how much larger the batch is")
        return [batches, self._sizes()]

    def _sizes(self) -> Table:
        """Returns the parameters of BERT-Large by vocabulary, their bytes, and the FLOPs of all steps at the larger batch."""
        rows = []
        for vocabulary in (30_522, 32_000):
            parameters = LARGE.parameters(vocabulary, next_sentence=True)
            flops = float(published_flops(parameters, LENGTH)) * self.batch_size * STEPS
            rows.append((vocabulary, parameters, parameters * 4 / 2**30, flops))
        return Table("model_size", ("vocabulary", "parameters", "GiB of float32", "FLOPs"), tuple(rows), "BERT-Large")
