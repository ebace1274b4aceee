"""Loss at any (model, steps, noise-batch ratio) inside a measured grid: linear between the logarithms of nodes.

A place outside the grid has no loss here: it is marked and NaN, never moved to the edge. Two are marked and have a value: steps beyond
those that were run (extrapolated), and a ratio below the smallest (the loss there, from which less noise can only lead down).
"""

import dataclasses

import numpy as np

from dpx.declaration import require
from dpx.scaling.extrapolation import extend
from dpx.scaling.measurements import NO_NOISE
from dpx.scaling.smoothing import Grid, isotonic, smooth

Real = np.ndarray | float | int


@dataclasses.dataclass(frozen=True)
class Found:
    """Losses and what they rest on, arrays of one shape."""

    loss: np.ndarray
    is_outside: np.ndarray
    is_extrapolated: np.ndarray
    is_below_ratios: np.ndarray


@dataclasses.dataclass(frozen=True)
class Surface:
    """Nodes, ascending, and losses [M, R, T] on them; `measured_steps` is the last step that was run.

    `noiseless_MT` are losses without noise, a slice of its own: no logarithm reaches it. `tokens` is the length of an example.
    """

    names: tuple[str, ...]
    parameters_M: np.ndarray
    ratios_R: np.ndarray
    steps_T: np.ndarray
    losses_MRT: np.ndarray
    measured_steps: float
    batch_size: float
    tokens: float
    noiseless_MT: np.ndarray | None = None

    def at(self, parameters: Real, steps: Real, ratio: Real) -> Found:
        """The losses at models (parameters), steps and noise-batch ratios, broadcast against one another.

        `ratio` 0 asks for no noise; raises `ConfigError` where that was not measured."""
        m, t, r = np.broadcast_arrays(*(np.asarray(value, float) for value in (parameters, steps, ratio)))
        axes = (self.parameters_M, self.steps_T)
        is_outside = np.zeros(m.shape, bool)
        for values, nodes in zip((m, t), axes, strict=True):
            is_outside |= (values < nodes[0] * (1 - 1e-9)) | (values > nodes[-1] * (1 + 1e-9)) | ~np.isfinite(values)
        is_noiseless = np.asarray(r == 0)
        if is_noiseless.any():
            require(self.noiseless_MT is not None, "epsilon=inf", "nothing was measured without noise", "Train the slice without noise too")
        is_below = ~is_noiseless & np.asarray(r < self.ratios_R[0] * (1 - 1e-9))
        is_outside |= (r > self.ratios_R[-1] * (1 + 1e-9)) | ~np.isfinite(r)
        held = np.asarray(np.clip(r, self.ratios_R[0], self.ratios_R[-1]))
        loss = self._noisy(m, t, held, np.asarray(~is_outside & ~is_noiseless))
        if is_noiseless.any():
            loss = np.where(is_noiseless, self._noiseless(m, t, np.asarray(~is_outside & is_noiseless)), loss)
        is_extrapolated = ~is_outside & (t > self.measured_steps * (1 + 1e-9))
        return Found(*map(np.asarray, (loss, is_outside, is_extrapolated, is_below & ~is_outside)))

    def _noisy(self, m: np.ndarray, t: np.ndarray, r: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        points = [np.log(self.parameters_M), np.log(self.ratios_R), np.log(self.steps_T)]
        return _interpolated(points, self.losses_MRT, [np.asarray(np.log(np.where(wanted, v, 1.0))) for v in (m, r, t)], wanted)

    def _noiseless(self, m: np.ndarray, t: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        assert self.noiseless_MT is not None
        points = [np.log(self.parameters_M), np.log(self.steps_T)]
        return _interpolated(points, self.noiseless_MT, [np.asarray(np.log(np.where(wanted, v, 1.0))) for v in (m, t)], wanted)


def _interpolated(nodes: list[np.ndarray], values: np.ndarray, places: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """Linear between nodes where `wanted`, NaN elsewhere; an axis of one node holds that node alone."""
    from scipy.interpolate import RegularGridInterpolator

    kept = [axis for axis, node in enumerate(nodes) if len(node) > 1]
    values = values[tuple(slice(None) if axis in kept else 0 for axis in range(len(nodes)))]
    out = np.full(wanted.shape, np.nan)
    if not wanted.any():
        return out
    ends = [(nodes[axis][0], nodes[axis][-1]) for axis in kept]
    at = np.stack([np.clip(places[axis][wanted], *end) for axis, end in zip(kept, ends, strict=True)], axis=-1)
    out[wanted] = RegularGridInterpolator([nodes[axis] for axis in kept], values)(at)
    return out


def surface_of(grid: Grid, batch_size: float, tokens: float, *, width: int | None = None, reach: float | int = 1) -> Surface:
    """The whole chain after the choice over rates: smooth, extend to `reach` times the measured steps, interpolate.

    The rolling mean takes `width` records, by default a tenth of them and at most the paper's 10 (of 1,280): it lags, and on 20 records 10
    of them move the optimum. Choosing beyond the measured steps is for `reach` > 1 to ask for: on synthetic surfaces the chosen
    configuration was within 1 % of the best for every surface of 40 inside them, and for 23 of 40 at a reach of 8.
    Raises `ConfigError` for a grid with less than two ratios or records.
    """
    require(len(grid.ratios_R) > 0 and len(grid.parameters_M) > 0, "an empty grid", "no model has all its ratios", "Finish some runs")
    losses = smooth(grid.losses_MRT, width or max(1, min(10, len(grid.steps_T) // 10)))
    steps, measured = grid.steps_T.astype(float), float(grid.steps_T[-1])
    if reach > 1:
        beyond = np.geomspace(measured, measured * reach, 1 + max(1, round(np.log2(reach) * 2)))[1:]
        losses = np.concatenate([losses, isotonic(extend(steps, losses, beyond), 1, increasing=True)], axis=2)
        steps = np.concatenate([steps, beyond])
    is_noisy = grid.ratios_R > NO_NOISE
    require(int(is_noisy.sum()) >= 2, f"{int(is_noisy.sum())} ratios", "nothing lies between less than two", "Train more ratios")
    noiseless = losses[:, ~is_noisy][:, 0] if (~is_noisy).any() else None
    return Surface(
        grid.names, grid.parameters_M, grid.ratios_R[is_noisy], steps, losses[:, is_noisy], measured, batch_size, tokens, noiseless
    )
