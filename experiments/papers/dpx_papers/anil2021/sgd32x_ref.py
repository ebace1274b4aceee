"""Computes the ratio of batch sizes (A13) and the size of the model (A3) of Anil et al. 2021, sections 1.1, 4 and 5.3. Arithmetic only."""

from typing import Any

from dpx.cost.memory import published_flops
from dpx.declaration import require
from dpx.models.shape import Bert
from dpx_papers.analysis import Made, analysis

LARGE = Bert(name="large", layers=24, width=1024, heads=16, feed_forward=4096)
STEPS, LENGTH = 20_000, 128


def _require_reference(declared: Any) -> None:
    reference = declared.reference_batch_size
    require(reference > 0, f"analysis.reference_batch_size={reference}", "nothing to compare with", "Use 1 or more")


@analysis(_require_reference)
def anil_sgd32x_ref(batch_size: int, reference_batch_size: int) -> Made:
    """Divides the paper's batch size by that of the largest private language-model batch before it.

    Attributes:
        batch_size: The paper's largest batch.
        reference_batch_size: The largest private language-model batch before it.
    """
    ratio = {"batch size": batch_size, "reference": reference_batch_size, "ratio": batch_size / reference_batch_size, "published ratio": 32}
    sizes = []
    for vocabulary in (30_522, 32_000):
        parameters = LARGE.parameters(vocabulary, next_sentence=True)
        flops = float(published_flops(parameters, LENGTH)) * batch_size * STEPS
        sizes.append({"vocabulary": vocabulary, "parameters": parameters, "GiB of float32": parameters * 4 / 2**30, "FLOPs": flops})
    return {"batch_ratio": [ratio], "model_size": sizes}
