"""Reads the results.csv that McKenna et al. 2025 published, and makes losses a surface as their code does (google-research,
dp_scaling_laws), which differs from their text.

Each learning rate is made monotone before the least of them is taken; the first 1,000 steps are left out; beyond the measured steps every
curve of a model falls to the E of its curve without noise; between nodes the logarithm of the loss is linear.
"""

from pathlib import Path
from typing import Any

import numpy as np

from dpx.config.node import nearest
from dpx.cost.measured_runs import Measurements
from dpx.cost.surface import FITTED_PART, Surface, isotonic
from dpx.declaration import ConfigError, require

COLUMNS = ("Model", "Learning Rate", "Iterations", "Noise Batch Ratio", "Cross Entropy")
# As their code has them, by which losses are interpolated.
PARAMETERS = {"BertTiny": 4.5e6, "BertMini": 11.4e6, "BertSmall": 29e6, "BertMedium": 41e6, "BertBase": 109e6, "BertLarge": 335e6}
PARAMETERS |= {"BertMega": 778e6}
BATCH_SIZE, SEQUENCE_LENGTH, FIRST_STEP = 1024.0, 512.0, 1000.0
# Where their fits start: the exponent, the logarithm of A, and E as a share of the least loss.
_EXPONENT, _LOG_A, _SHARE = -0.3, 1.94, 0.9


def is_table(path: Path) -> bool:
    """Returns whether a file has the columns of the authors' table."""
    if not path.is_file():
        return False
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        return set(COLUMNS) <= set(file.readline().strip().split(","))


def read(path: Path) -> Measurements:
    """Returns the table: their one batch of 1,024 rows of 512 tokens, a ratio of 0 without noise. Raises `ConfigError` for a model that is
    not theirs, a cell that is not a number, and two losses of one step."""
    import pandas as pd

    rows: Any = pd.read_csv(path, encoding="utf-8-sig")[list(COLUMNS)]
    for name in set(rows["Model"]) - set(PARAMETERS):
        raise ConfigError(f"{path}, model {name}", "is not a model of the paper", f"Use {', '.join(PARAMETERS)}{nearest(name, PARAMETERS)}")
    try:
        numbers = {name: rows[name].to_numpy(float) for name in COLUMNS[1:]}
    except ValueError as error:
        raise ConfigError(path, f"has a cell that is not a number ({error})", "Correct the table") from None
    twice = rows[rows.duplicated(list(COLUMNS[:-1]))]
    place = f"{path}: {', '.join(map(str, twice.iloc[0, :-1]))}" if len(twice) else path
    require(not len(twice), place, "has two different losses", "Remove one of them")
    same = {"replicate": 0.0, "batch_size": BATCH_SIZE, "sequence_length": SEQUENCE_LENGTH}
    return Measurements(
        model=rows["Model"].to_numpy(str),
        parameters=rows["Model"].map(PARAMETERS).to_numpy(float),
        noise_batch_ratio=numbers["Noise Batch Ratio"],
        learning_rate=numbers["Learning Rate"],
        step=numbers["Iterations"],
        loss=numbers["Cross Entropy"],
        **{name: np.full(len(rows), value) for name, value in same.items()},
    )


def surface(measured: Measurements, reach: float | int) -> Surface:
    """Returns the surface of measured losses up to `reach` times the measured steps. Raises `ConfigError` without curves that are free of
    noise, and where no step beyond the first 1,000 was measured."""
    import pandas as pd

    frame: Any = pd.DataFrame({name: getattr(measured, name) for name in ("parameters", "model", "learning_rate", "step", "loss")})
    frame["ratio"] = np.where(measured.is_noisy, measured.noise_batch_ratio, 0.0)
    late = frame[frame["step"] >= FIRST_STEP]
    require(len(late) > 0, f"{frame['step'].max():,.0f} steps", "the authors leave out the first 1,000", "Measure more steps")
    smooth = [_smooth(own) for _, own in late.groupby(["parameters", "model", "learning_rate"])]
    both: Any = pd.concat(smooth)
    least: Any = both.groupby(["parameters", "model", "step", "ratio"])["loss"].min().unstack("ratio")
    # A ratio that a model lacks is between its neighbours, by place.
    curves: dict[Any, Any] = {name: own.droplevel([0, 1]).interpolate(axis=1) for name, own in least.groupby(level=[0, 1])}
    whole: dict[Any, Any] = {name: own for name, own in curves.items() if 0.0 in own and own.notna().all().all()}
    fix = "Also train models without noise"
    require(bool(whole), "the authors' choices", "no model has all its curves, and one without noise, which gives E to the others", fix)
    ratios, steps = next(iter(whole.values())).columns.to_numpy(float), next(iter(whole.values())).index.to_numpy(float)
    beyond = steps[-1] * 2.0 ** np.arange(1, int(np.log2(reach)) + 1)
    losses = np.array([_extended(steps, own.to_numpy(float), beyond) for own in whole.values()]).transpose(0, 2, 1)
    names, parameters, nodes = tuple(name for _, name in whole), np.array([m for m, _ in whole]), np.concatenate([steps, beyond])
    same = (float(steps[-1]), float(measured.batch_size[0]), float(measured.sequence_length[0]))
    noiseless, noisy = (
        Surface(names, parameters, ratios[at], nodes, losses[:, at], *same, is_log=True) for at in (ratios == 0, ratios > 0)
    )
    return Surface(**{**vars(noisy), "noiseless": noiseless})


def _smooth(own: Any) -> Any:
    """Returns the losses of one model and rate, falling with the steps and then rising with the ratio; replicates count as their mean."""
    table = own.groupby(["parameters", "model", "step", "ratio"])["loss"].mean().unstack("ratio").dropna(axis=1)
    falling = isotonic(table.to_numpy(float), 0, increasing=False)
    table.iloc[:, :] = isotonic(falling, 1, increasing=True)
    return table.stack().rename("loss").to_frame()


def _extended(steps_T: np.ndarray, losses_TR: np.ndarray, beyond_K: np.ndarray) -> np.ndarray:
    """Returns the losses of one model at the measured steps and beyond them; the first ratio is without noise, and gives E."""
    least = _fitted(steps_T, losses_TR[:, 0], None)[-1]
    late = steps_T >= FITTED_PART * steps_T[-1]
    further = []
    for losses in losses_TR.T:
        exponent, log_a, _ = _fitted(steps_T[late], losses[late], least)
        further.append(np.exp(exponent * np.log(beyond_K) + log_a) + least)
    return np.concatenate([losses_TR, np.array(further).T])


def _fitted(steps: np.ndarray, losses: np.ndarray, least: float | None) -> tuple[float, float, float]:
    """Returns the exponent, the logarithm of A and E of L = E + A T^exponent by Levenberg-Marquardt, with E given or free."""
    from scipy.optimize import least_squares

    logs = np.log(steps)

    def errors(at: np.ndarray) -> np.ndarray:
        e = at[2] if least is None else least
        with np.errstate(over="ignore"):
            return np.nan_to_num(np.exp(at[0] * logs + at[1]) + e - losses, posinf=1e9)

    start = [_EXPONENT, _LOG_A, *([_SHARE * losses.min()] if least is None else [])]
    found = least_squares(errors, start, method="lm", max_nfev=100_000).x
    return float(found[0]), float(found[1]), float(found[2]) if least is None else least
