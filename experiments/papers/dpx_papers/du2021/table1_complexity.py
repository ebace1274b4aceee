"""Compares the published orders of memory, computation and perturbed values with compiled and traced programs (Du and Mi 2021, Table 1)."""

from collections.abc import Sequence
from typing import Any

from dpx.declaration import declaration, require
from dpx.table import Table

# The program that shows a method's order. DP-FP is plain training with noise on one vector of a row: it is timed by SGD's program.
_PROGRAMS = {"DP-SGD": "vmap", "DP-SGD, book-keeping": "book_keeping", "DP-FP": "autodiff", "SGD": "autodiff"}
_MEMORY = {"DP-SGD": "O(md)", "DP-SGD, book-keeping": None, "DP-FP": "O(d)", "RGP": "O(mrw)", "SGD": "O(d)"}
_TIME = {"DP-SGD": "O(md)", "DP-SGD, book-keeping": None, "DP-FP": "O(md)", "RGP": "O(md + Krd + Kr^2 w)", "SGD": "O(md)"}


@declaration
class OfTable1:
    """The sizes of the analyses of Table 1.

    Attributes:
        models: Options of the group model.
        batches: Rows of a batch; slopes are between the smallest and the largest.
        sequence_length: Tokens of a row.
        vocabulary_size: Rows of the word table.
        rank: Rank of RGP's carriers.
        power_iterations: Rounds of RGP's power method.
        micro_batches: Micro-batches of DP-FP.
    """

    models: Sequence[str]
    batches: Sequence[int]
    sequence_length: int
    vocabulary_size: int
    rank: int
    power_iterations: int
    micro_batches: int

    def __post_init__(self) -> None:
        require(len(set(self.batches)) > 1, f"analysis.batches={self.batches}", "a slope needs two sizes", "Give two or more")


def sides(model: Any) -> int:
    """Returns the rows and columns of the matrices of all layers of an encoder."""
    return model.layers * (4 * model.width + 2 * model.width + 2 * (model.width + model.feed_forward))


@declaration
class DpfpTable1Complexity(OfTable1):
    """Compiles and traces models.

    RGP is given by its formula: its carriers of rank r are r w numbers, where w counts the rows and columns of the encoder's matrices.
    """

    def __call__(self) -> list[Table]:
        subjects = [self._measured(name) for name in self.models]
        return [self._memory(subjects), self._time(subjects), self._noise(subjects)]

    def _measured(self, name: str) -> dict[str, Any]:
        from dpx.config import recipes
        from dpx_papers.benchmark.traced import Traced

        model = recipes.option("model", name)
        small, large = (
            Traced.trace(model, self.sequence_length, self.vocabulary_size, size) for size in (min(self.batches), max(self.batches))
        )
        more = large.examples - small.examples
        # Grams alone, so that no gradient of an example is ever held.
        options = {program: {"kept_bytes": 0} if program == "book_keeping" else {} for program in _PROGRAMS.values()}
        held = {way: (large.temporary_bytes(way, **o) - small.temporary_bytes(way, **o)) / 4 / more for way, o in options.items()}
        products = {way: large.flops(way, **o) for way, o in options.items()}
        return {"name": name, "d": small.parameters, "k": model.width, "w": sides(model), "held": held, "products": products}

    def _memory(self, subjects: Sequence[dict[str, Any]]) -> Table:
        rows = []
        for one in subjects:
            for method, published in _MEMORY.items():
                held = self.rank * one["w"] if method == "RGP" else one["held"][_PROGRAMS[method]]
                rows.append((one["name"], one["d"], method, published, held, held / one["d"]))
        columns = ("model", "d", "method", "published", "numbers_per_example", "over_d")
        notes = (
            "numbers that one more example of a batch adds to the compiler's temporaries; activations, which Table 1 leaves out, are in",
            "RGP: its carriers alone, by formula; DP-FP: SGD's program, plus k numbers a row",
        )
        return Table("memory", columns, tuple(rows), "memory: published order in m, and what one more example adds", notes)

    def _time(self, subjects: Sequence[dict[str, Any]]) -> Table:
        rows = []
        for one in subjects:
            for method, published in _TIME.items():
                # The carriers are made once a step and need 2 products with every matrix for each round.
                further = 4 * self.power_iterations * self.rank * one["d"] / max(self.batches)
                plain = one["products"]["autodiff"]
                products = plain + further if method == "RGP" else one["products"][_PROGRAMS[method]]
                rows.append((one["name"], one["d"], method, published, float(products), products / plain))
        columns = ("model", "d", "method", "published", "products_per_example", "over_SGD")
        return Table("time", columns, tuple(rows), "time: published order, and matrix products of one example")

    def _noise(self, subjects: Sequence[dict[str, Any]]) -> Table:
        rows = []
        for one in subjects:
            rows.append((one["name"], "DP-SGD", "d", one["d"], "s^2", 1.0))
            rows.append((one["name"], "DP-FP", "k", one["k"], "s^2 / M", 1 / self.micro_batches))
            rows.append((one["name"], "RGP", "w", self.rank * one["w"], "s^2", 1.0))
        columns = ("model", "method", "published_coordinates", "coordinates", "published_power", "power_over_s2")
        notes = ("s^2 / M holds only as epsilon falls to 0: dpfp_prop3_noise_ratio",)
        return Table("noise", columns, tuple(rows), "noisy coordinates, and the noise power of each", notes)
