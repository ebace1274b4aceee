"""Follows the axis of the examples through indexing: examples stay apart if every index certainly stays within its own example.

Either each example has its own index (a batching axis, as `jax.vmap` and `take_along_axis` write it), or the examples' axis is taken
whole, or every index is known to point into its own example's part (index_bounds.py).
"""

from typing import Any

import numpy as np

from dpx.clipping.index_bounds import Bounds
from dpx.clipping.layout import SHARED, Crosses, Layout, Rows
from dpx.clipping.row_rules import RULES as RULES
from dpx.clipping.row_rules import require, rows_of, rule, shape_of


@rule("gather")
def _gather(eqn, held, examples, bounds):
    numbers, sizes, operand = eqn.params["dimension_numbers"], eqn.params["slice_sizes"], held[0]
    places = [axis for axis in range(len(shape_of(eqn.outvars[0]))) if axis not in numbers.offset_dims]
    by_index = _of_index(held[1], eqn.invars[1], places)
    if not isinstance(operand, Rows):
        return rows_of([by_index])
    size = shape_of(eqn.invars[0])[operand.axis]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    if operand.axis in numbers.operand_batching_dims:
        along = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.axis)]
        return rows_of([by_index, operand.at(places[along])])
    if operand.axis in gone:
        require(operand.axis in numbers.start_index_map, "drops the examples' axis")
        axis = _known(operand, eqn.invars[1], held[1], bounds[1], list(numbers.start_index_map).index(operand.axis), examples)
        return rows_of([by_index, axis.at(places[axis.axis])])
    require(sizes[operand.axis] == size, "takes a part of the examples' axis")
    offset = [axis for axis in range(len(sizes)) if axis not in gone]
    return rows_of([by_index, operand.at(numbers.offset_dims[offset.index(operand.axis)])])


def _of_index(index: Layout, var: Any, places: list[int]) -> Layout:
    if not isinstance(index, Rows):
        return index
    require(index.axis < len(shape_of(var)) - 1, "reads an index that is computed from several examples")
    return index.at(places[index.axis])


def _known(operand: Rows, var: Any, index: Layout, bounds: Bounds | None, component: int, examples: int) -> Rows:
    """Returns the axis of the index that holds the examples.

    Every index along the examples' axis of the operand must be known to stay within its own example.
    """
    how = "reads rows of the examples' axis by an index that may belong to another example"
    if bounds is None or operand.before != 1:
        raise Crosses(how)
    shape = shape_of(var)[:-1]
    low, high = (np.floor(end[..., component] / operand.after) for end in bounds)
    options = [index] if isinstance(index, Rows) else [Rows(axis) for axis, size in enumerate(shape) if size == examples]
    for option in options:
        own = bounds.along(shape, option, examples)
        if bool((low == own).all() and (high == own).all()):
            return option
    raise Crosses(how)


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
def _scatter(eqn, held, examples, bounds):
    numbers, (operand, index, updates) = eqn.params["dimension_numbers"], held
    sizes, given = shape_of(eqn.invars[0]), shape_of(eqn.invars[2])
    if index == SHARED and updates == SHARED:
        return rows_of([operand])
    if isinstance(updates, Rows) and updates.axis in numbers.update_window_dims:
        window = [axis for axis in range(len(sizes)) if axis not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)]
        axis = window[list(numbers.update_window_dims).index(updates.axis)]
        is_whole = index == SHARED and sizes[axis] == given[updates.axis]
        require(is_whole, "writes a part of the examples' axis")
        return rows_of([operand, updates.at(axis)])
    # From here on `rows` is by the axes of the index.
    places = [axis for axis in range(len(given)) if axis not in numbers.update_window_dims]
    by_update = updates.at(places.index(updates.axis)) if isinstance(updates, Rows) else updates
    rows = rows_of([_of_index(index, eqn.invars[1], list(range(len(places)))), by_update])
    if rows.axis in numbers.scatter_indices_batching_dims:
        axis = numbers.operand_batching_dims[list(numbers.scatter_indices_batching_dims).index(rows.axis)]
        return rows_of([operand, rows.at(axis)])
    return rows_of([operand, _written(eqn, rows, bounds[1], operand, examples)])


def _written(eqn: Any, rows: Rows, bounds: Bounds | None, operand: Layout, examples: int) -> Rows:
    """Returns the examples' axis of an operand that is written by a known index, which puts each example into its own part."""
    numbers, sizes = eqn.params["dimension_numbers"], shape_of(eqn.invars[0])
    how = "writes rows by an index that may belong to another example"
    written = [
        axis for axis in numbers.scatter_dims_to_operand_dims if axis in numbers.inserted_window_dims and sizes[axis] % examples == 0
    ]
    axis = operand.axis if isinstance(operand, Rows) else next(iter(written), -1)
    require(axis in written, how)
    target = Rows(axis, 1, sizes[axis] // examples)
    _known(target, eqn.invars[1], rows, bounds, list(numbers.scatter_dims_to_operand_dims).index(axis), examples)
    return target
