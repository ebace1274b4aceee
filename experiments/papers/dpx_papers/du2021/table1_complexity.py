"""Compares the published orders of memory, computation and perturbed values with compiled and traced programs (Du and Mi 2021, Table 1)."""

from collections.abc import Sequence
from typing import Any

from dpx.declaration import require
from dpx_papers.analysis import Made, analysis

# The program that shows a method's order. DP-FP is plain training with noise on one vector of a row: it is timed by SGD's program.
_PROGRAMS = {"DP-SGD": "vmap", "DP-SGD, book-keeping": "book_keeping", "DP-FP": "autodiff", "SGD": "autodiff"}
# The published orders of memory and of time; none of a variant that the table does not have.
_ORDERS = {
    "DP-SGD": ("O(md)", "O(md)"),
    "DP-SGD, book-keeping": (None, None),
    "DP-FP": ("O(d)", "O(md)"),
    "RGP": ("O(mrw)", "O(md + Krd + Kr^2 w)"),
    "SGD": ("O(d)", "O(md)"),
}


def require_slope(declared: Any) -> None:
    """Refuses batches between which there is no slope."""
    require(len(set(declared.batches)) > 1, f"analysis.batches={declared.batches}", "a slope needs two sizes", "Give two or more")


def sides(model: Any) -> int:
    """Returns the rows and columns of the matrices of all layers of an encoder."""
    return model.layers * (4 * model.width + 2 * model.width + 2 * (model.width + model.feed_forward))


@analysis(require_slope)
def dpfp_table1_complexity(
    models: Sequence[str],
    batches: Sequence[int],
    sequence_length: int,
    vocabulary_size: int,
    rank: int,
    power_iterations: int,
    micro_batches: int,
) -> Made:
    """Compiles and traces models.

    RGP is given by its formula: its carriers of rank r are r w numbers, where w counts the rows and columns of the encoder's matrices.

    Attributes:
        models: Options of the group model.
        batches: Rows of a batch; slopes are between the smallest and the largest.
        sequence_length: Tokens of a row.
        vocabulary_size: Rows of the word table.
        rank: Rank of RGP's carriers.
        power_iterations: Rounds of RGP's power method.
        micro_batches: Micro-batches of DP-FP.
    """
    from dpx.config import recipes
    from dpx_papers.benchmark.traced import Traced

    memory, time, noise, sizes = [], [], [], (min(batches), max(batches))
    # Grams alone, so that no gradient of an example is ever held.
    options = {program: {"kept_bytes": 0} if program == "book_keeping" else {} for program in _PROGRAMS.values()}
    for name in models:
        model = recipes.option("model", name)
        small, large = (Traced.trace(model, sequence_length, vocabulary_size, size) for size in sizes)
        d, w, more = small.parameters, rank * sides(model), large.examples - small.examples
        held = {way: (large.temporary_bytes(way, **o) - small.temporary_bytes(way, **o)) / 4 / more for way, o in options.items()}
        products = {way: large.flops(way, **o) for way, o in options.items()}
        plain = products["autodiff"]
        # The carriers are made once a step and need 2 products with every matrix for each round.
        of_rgp = plain + 4 * power_iterations * rank * d / max(batches)
        for method, (order, order_of_time) in _ORDERS.items():
            at, way = {"model": name, "d": d, "method": method}, _PROGRAMS.get(method)
            numbers, multiplied = (held[way], products[way]) if way else (w, of_rgp)
            memory.append(at | {"published": order, "numbers_per_example": numbers, "over_d": numbers / d})
            time.append(at | {"published": order_of_time, "products_per_example": float(multiplied), "over_SGD": multiplied / plain})
        for method, letter, count, power, share in (
            ("DP-SGD", "d", d, "s^2", 1.0),
            ("DP-FP", "k", model.width, "s^2 / M", 1 / micro_batches),
            ("RGP", "w", w, "s^2", 1.0),
        ):
            coordinates = {"model": name, "method": method, "published_coordinates": letter, "coordinates": count}
            noise.append(coordinates | {"published_power": power, "power_over_s2": share})
    return {"memory": memory, "time": time, "noise": noise}
