"""`job=account`: epsilon again from a ledger, for one run or jointly for several branches, and what it means for an attacker.

`python -m dpx job=account run=<folder>`, or any files: `python -m dpx job=account 'job.ledgers=[a/private/ledger,b/release/privacy.json]'`.
Imports no jax and reads no data. Curves are drawn in the terminal: a few rows of characters, with the range of both axes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import declaration, require
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder, write_json
from dpx.pages import pictures
from dpx.pages.analysis_tables import Lines, Picture, Table
from dpx.privacy.segments import Segment, Segments, join, until
from dpx.statement import outside_code, received
from dpx.statement.seals import STATEMENT

Points = Sequence[tuple[float | int, float | int | None]]
MARKS = "●○+"


def text_plot(
    curves: dict[str, Points], x_label: str, y_label: str, width: int = 60, height: int = 10, log_x: bool = False, log_y: bool = False
) -> str:
    """Returns a plot with one character per point and curve, the first curve on top.

    Points without a finite value are left out; the result is "" if no point remains.
    """
    known = {
        name: [(x, y) for x, y in points if y is not None and math.isfinite(y) and (x > 0 or not log_x) and (y > 0 or not log_y)]
        for name, points in curves.items()
    }
    everything = [point for points in known.values() for point in points]
    if not everything:
        return ""
    xs, ys = _range([x for x, _ in everything], log_x), _range([y for _, y in everything], log_y)
    canvas = [[" "] * width for _ in range(height)]
    for mark, points in reversed(list(zip(MARKS, known.values(), strict=False))):
        for x, y in points:
            canvas[height - 1 - _cell(y, ys, log_y, height)][_cell(x, xs, log_x, width)] = mark
    legend = "   ".join(f"{mark} {name}" for mark, name in zip(MARKS, known, strict=False))
    left = [f"{value:.3g}" for value in (ys[1], ys[0])]
    edge = max(map(len, left))
    body = [
        f"{(left[0] if number == 0 else left[1] if number == height - 1 else ''):>{edge}} │{''.join(line)}"
        for number, line in enumerate(canvas)
    ]
    foot = f"{'':>{edge}} └{'─' * width}"
    ends = [f"{value:.3g}" for value in xs]
    below = f"{'':>{edge}}  {ends[0]}{x_label:^{max(0, width - len(ends[0]) - len(ends[1]))}}{ends[1]}"
    return "\n".join([f"{y_label}   {legend}" if len(known) > 1 else y_label, *body, foot, below])


def _range(values: Sequence[float | int], log: bool) -> tuple[float, float]:
    low, high = float(min(values)), float(max(values))
    if low == high:
        return (low / 2, high * 2) if log else (low - 0.5, high + 0.5)
    return low, high


def _cell(value: float | int, ends: tuple[float, float], log: bool, cells: int) -> int:
    low, high = (math.log(end) for end in ends) if log else ends
    return round(((math.log(value) if log else value) - low) / (high - low) * (cells - 1))


FALSE_POSITIVE_RATES = (1e-4, 1e-3, 1e-2, 0.1)
DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
POINTS = 8


@declaration
class Account:
    """Prints tables and curves; writes `release/account.json`, a CSV of each table and, where matplotlib is installed, pictures.

    Several sources are charged jointly, common steps once. Raises `ConfigError` if nothing is charged, for several sources that do not
    protect the same units (`dpx.privacy.declared_privacy`), and for an `adjacency` under which charges of a source are not proved
    (`dpx.privacy.events`).

    Attributes:
        ledgers: Run folders or names of runs, ledger files or statements; none means the run itself.
        accountant: Name of the accountant.
        delta: Delta of epsilon; null takes the smallest at which the sources were stated.
        adjacency: Neighbouring relation; null takes that of the sources.
    """

    ledgers: Sequence[str] = ()
    accountant: str = "pld"
    delta: float | None = None
    adjacency: str | None = None

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        from dpx import config
        from dpx.claim.combined_ledgers import read, together

        has_run = any((folder.path / place).exists() for place in ("private/ledger", f"release/{STATEMENT}"))
        what = folder.path if folder.has_begun else "run"
        reason = "its ledger contains no charged step" if folder.has_begun else "this job needs a run to account for, and no run is named"
        require(has_run or bool(self.ledgers), what, reason, "Add run=<folder>, or job.ledgers=[...]")
        # What is not a path is the name of a run.
        named = [Path(one) if Path(one).exists() or Path(one).suffix else config.load(one)[1] for one in self.ledgers]
        sources = named or [folder.path]
        joint = together([read(path) for path in sources], self.delta, self.adjacency, experiment.privacy)
        delta, adjacency, by, unit = joint.delta, joint.adjacency, joint.by, joint.unit
        tables = account(joint.segments, self.accountant, delta, adjacency, joint.before)
        folder.made_release()
        document = {"sources": [path.name for path in sources], "accountant": self.accountant, "delta": delta, "adjacency": adjacency}
        document |= {"outside_code": list(by)} if by else {}
        document["unit"] = None if unit is None else to_json(unit.as_released(tells_words=False))
        document |= {"is_checked": joint.checked_by == "ledger", "checked_by": joint.checked_by}
        document["no_guarantee"] = list(joint.reasons)
        document |= {"tables": [table.as_json() for table in tables]}
        write_json(folder.release / "account.json", document)
        answer(document)
        console = wide_console()
        console.print(f"What is protected: {'not recorded' if unit is None else unit.in_words()}.", highlight=False)
        for line in received.HEADS[joint.checked_by]:
            console.print(line, highlight=False)
        for line in outside_code.sentences(by):
            console.print(f"NO BOUND: every epsilon below is {line}.", highlight=False)
        for line in document["no_guarantee"]:
            console.print(f"NO GUARANTEE: {line}.", highlight=False)
        for table in tables:
            table.write_csv(folder.release)
            console.print(table.shown())
        for plot in _in_a_terminal(tables):
            console.print(plot + "\n", highlight=False, markup=False)
        console.print(pictures.write(PICTURES, tables, folder.release), highlight=False, soft_wrap=True)


def account(segments: Segments, accountant: str, delta: float, adjacency: str, before: Sequence[Segment] = ()) -> list[Table]:
    """Returns every table of the account of `segments`; the segments in `before` were made before the first step."""
    from dpx.privacy import accounting, closed_form, ledger
    from dpx.privacy.profile import Profile

    def composed(charged: Segments) -> Any:
        return accounting.compose(accounting.bucketed(ledger.releases(charged)), accountant, adjacency)

    accounting.check_delta(delta, accountant)
    whole = composed(segments)
    profile = Profile(whole)

    columns = ("origin", "epoch", "sampler", "q", "noise_multiplier", "clipping_norm", "rows_per_unit", "unit_mode")
    events = tuple((*(getattr(segment, name) for name in columns), segment.count) for segment in segments)
    of_delta = tuple((at, accounting.finite(whole.epsilon(at))) for at in sorted({*DELTAS, delta}, reverse=True))
    places = range(0, len(profile.epsilons), max(1, len(profile.epsilons) // 12))
    thinned = tuple((float(profile.epsilons[place]), float(profile.deltas[place])) for place in places)

    earlier = {(segment.origin, segment.epoch_name) for segment in before}
    own = [segment for segment in join(segments) if (segment.origin, segment.epoch_name) not in earlier]
    end = max((first + count for segment in own for first, count in segment.steps), default=0)
    by_step = []
    for step in sorted({max(1, end * number // POINTS) for number in range(1, POINTS + 1)}):
        charged = join(until(own, step), list(before))
        by_step.append((step, accounting.finite(composed(charged).epsilon(delta)) if ledger.releases(charged) else 0.0))

    attacker: list[tuple[str, float]] = [("membership advantage, delta(0)", profile.advantage)]
    attacker += [(f"true-positive rate at {rate:.2%} false positives", profile.true_positive_rate(rate)) for rate in FALSE_POSITIVE_RATES]
    mu = profile.gdp_parameter()
    attacker.append(("Gaussian-DP parameter mu that bounds the curve (delta >= 1e-10)", mu))
    rates = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 0.01, 0.03, *(number / 20 for number in range(1, 21)))
    curve = tuple((rate, profile.type_two_error(rate), closed_form.type_two_error(mu, rate)) for rate in rates)

    at_delta = f"epsilon at delta {delta:.3g}" + (", including the runs that it started from" if before else "")
    bounded = "least false-negative rate of any membership test, and that of the Gaussian-DP parameter that bounds it"
    return [
        Table("events", (*columns, "steps"), events, "what is charged"),
        Table("epsilon_of_delta", ("delta", "epsilon"), of_delta, f"by {accountant}, {adjacency}"),
        Table("delta_of_epsilon", ("epsilon", "delta"), thinned, "the profile"),
        Table("epsilon_by_step", ("steps", "epsilon"), tuple(by_step), at_delta),
        Table("attacker", ("the largest possible value", "value"), tuple(attacker), "against one unit"),
        Table("trade_off", ("false_positive_rate", "false_negative_rate", "gaussian"), curve, bounded),
    ]


PICTURES = [
    Picture(
        "account",
        "Epsilon of delta, epsilon by step, and the least false-negative rate of any membership test.",
        (
            Lines(table="epsilon_of_delta", x="delta", y=("epsilon",), x_scale="log"),
            Lines(table="epsilon_by_step", x="steps", y=("epsilon",)),
            Lines(
                table="trade_off",
                x="false_positive_rate",
                y=("false_negative_rate", "gaussian"),
                names=(("false_negative_rate", "this claim"), ("gaussian", "Gaussian DP")),
                y_label="false negative rate",
            ),
        ),
    ),
    Picture(
        "account_profile", "The profile: delta of epsilon.", (Lines(table="delta_of_epsilon", x="epsilon", y=("delta",), y_scale="log"),)
    ),
]


def _in_a_terminal(tables: list[Table]) -> list[str]:
    """Returns the curves of `PICTURES` drawn with characters."""
    rows = {table.name: [row for row in table.rows if None not in row] for table in tables}
    trade_off = {"this claim": [row[:2] for row in rows["trade_off"]], "Gaussian DP": [(row[0], row[2]) for row in rows["trade_off"]]}
    plots = [
        text_plot({"epsilon": rows["epsilon_of_delta"]}, "delta", "epsilon", log_x=True),
        text_plot({"delta": rows["delta_of_epsilon"]}, "epsilon", "delta", log_y=True),
        text_plot({"epsilon": rows["epsilon_by_step"]}, "steps", "epsilon"),
        text_plot(trade_off, "false positive rate", "false negative rate"),
    ]
    return [plot for plot in plots if plot]
