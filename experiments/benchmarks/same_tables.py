"""Whether the papers' analyses that train nothing make the same tables in this tree as in an earlier revision, cell by cell.

    python experiments/benchmarks/same_tables.py 8339122a /tmp/tables [part of a name ...]

The two run by turns. Tables stay in the folder, and a second command runs only what it lacks. One line a table;
exits 1 where one differs. Numbers differ by more than 1e-12 of the larger, all else by anything. Both sides read the measurements of this
tree. Figures are not compared.
"""

import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parents[2]
# The laptop's grid as it was measured, so that both sides read the same losses.
LAB = ("analysis/lab=laptop", f"analysis.lab.measurements={HERE / 'experiments/mckenna2025/measurements.csv'}", "analysis.lab.computes=8")
FIG_15 = ('analysis.settings=[["3e13 FLOPs, 86,000",3.0e+13,8.6e+4],["1e15 FLOPs, 173,000",1.0e+15,1.73e+5]]', "analysis.tokens=128")
# Recipe and overrides: smaller grids where the whole takes minutes.
CASES: dict[str, tuple[str, ...]] = {
    "anil_accounting": (),
    "anil_scale_invariance": ("model=micro",),
    "mckenna_table1_models": (),
    "dpfp_postprocessing_counterexample": ("analysis.steps=3",),
    "dpfp_label_leak": ("analysis.steps=3", "analysis.draws=2000"),
    "mckenna_calibration_profiles": ("analysis.batch_sizes=[512,8192,131072]", "analysis.interval=0.005"),
    "mckenna_fig4_vector_fields": (
        "analysis.sizes=[2500000,5000000,10000000]",
        "analysis.batch_sizes=[16384,32768,65536]",
        "analysis.epsilons=[2,4,8]",
        "analysis.interval=0.005",
    ),
    "mckenna_diminishing_batch": (
        "analysis.sizes=[1000000,10000000]",
        "analysis.epsilons=[1,4]",
        "analysis.steps=[4000]",
        "analysis.interval=0.005",
    ),
    "mckenna_billion_claim": ("analysis.batch_sizes=[262144]",),
    # Without measured times, whose folder has a list that the earlier revision does not pass over.
    "mckenna_flops_model": (
        "analysis.sequence_lengths=[128,256]",
        "analysis.published_parameters={tiny:4.52e6}",
        f"analysis.evidence={HERE / 'experiments/papers'}",
    ),
    "dpfp_table1_complexity": ("analysis.models=[micro,tiny]",),
    "mckenna_fit_semiparametric": LAB,
    "mckenna_fig17_transform": LAB,
    "mckenna_fig14_smoothing": LAB,
    "mckenna_fig11_nonprivate": LAB,
    "mckenna_fig19_parametric_optimum": (*LAB, "analysis.starts=4"),
    "mckenna_fig16_parametric_l1": (*LAB, "analysis.starts=8", "analysis.samples=2"),
    "mckenna_fig18_parametric_l2": (*LAB, "analysis.starts=8", "analysis.samples=2"),
    "mckenna_fig6_full_grid": LAB,
    "mckenna_fig5_baselines": (*LAB, "analysis.epsilons=[1,4,16]"),
    "mckenna_fig13_allocation_by_n": (*LAB, "analysis.lab.sizes=[800000,3200000]"),
    "mckenna_table2_saturation": (*LAB, "analysis.sizes=null"),
    "mckenna_fig15_vulnerability": (*LAB, *FIG_15, "analysis.size=800000", "analysis.batch_sizes=[256,1024,4096]"),
    "mckenna_fig1_allocation": LAB,
    "mckenna_fig3ab_compute": LAB,
    "mckenna_fig3c_token_ratio": LAB,
    "anil_schedule_savings": (),
    "legal_accounting": (),
    "legal_tokenizer_leak": (),
    "dpfp_headline": (),
    "dpfp_model_size_gap": (),
    "dpfp_prop1_noise_dimension": (),
    "dpfp_prop2_gradient_bias": (),
    "dpfp_prop3_noise_ratio": (),
    "dpfp_table2_accounting": (),
    "dpfp_table3_datasets": (),
}


def copied(revision: str, tree: Path) -> None:
    """Writes the files of a revision, and the metadata by which dpx finds the packages that belong to it."""
    tree.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "-C", HERE, "archive", revision], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    # By this name it hides what is installed, whose package of the papers is not that of the revision.
    metadata = tree / "dpx_lm-0.1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: dpx-lm\nVersion: {project['version']}\n")
    listed = [f"[{group}]\n{name} = {value}" for group, own in project.get("entry-points", {}).items() for name, value in own.items()]
    (metadata / "entry_points.txt").write_text("\n".join(listed) + "\n")
    (metadata / "direct_url.json").write_text(json.dumps({"url": tree.resolve().as_uri(), "dir_info": {"editable": True}}))


# Runs one command a line of standard input, all in one process: most of a short analysis is importing libraries.
_PROGRAM = """
import contextlib, json, sys
from dpx.__main__ import main
told = sys.stdout
for line in sys.stdin:
    log, *sys.argv[1:] = json.loads(line)
    code = 0
    with open(log, "w") as written, contextlib.redirect_stdout(written), contextlib.redirect_stderr(written):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    print(code, file=told, flush=True)
"""


class Side:
    """One of the two trees, with a process that runs its commands."""

    def __init__(self, folder: Path, revision: str) -> None:
        self.folder, tree = folder, folder / "tree"
        if not tree.exists():
            copied(revision, tree)
        path = os.pathsep.join(map(str, (tree, tree / "experiments" / "papers")))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM],
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def tables(self, name: str) -> dict[str, dict]:
        """Returns the tables of a recipe by name, from the folder if they are there. Raises `RuntimeError` if it cannot run."""
        made, log = self.folder / name / "release" / "analysis.json", self.folder / f"{name}.log"
        if not made.exists():
            assert self._process.stdin and self._process.stdout
            command = [f"+experiment={name}", *CASES[name], f"hydra.run.dir={self.folder / name}"]
            self._process.stdin.write(json.dumps([str(log), *command]) + "\n")
            self._process.stdin.flush()
            if (code := self._process.stdout.readline().strip()) != "0":
                lines = log.read_text().strip().splitlines() or [f"ended with {code}"]
                raise RuntimeError(f"{self.folder.name}: {lines[-1]}")
        return {table["name"]: table for table in json.loads(made.read_text())["tables"]}


def apart(old: dict, new: dict) -> Iterator[str]:
    """Yields a line on each cell, note or title of a table that differs."""
    for name in ("title", "notes"):
        if old[name] != new[name]:
            yield f"{name} {json.dumps(old[name])[:100]} -> {json.dumps(new[name])[:100]}"
    if len(old["rows"]) != len(new["rows"]):
        yield f"{len(old['rows'])} rows -> {len(new['rows'])}"
    for at, (before, after) in enumerate(zip(old["rows"], new["rows"], strict=False)):
        # Order of columns counts; a column that one side lacks differs.
        if list(before) != list(after):
            yield f"row {at}: columns {list(before)} -> {list(after)}"
        for column in before.keys() & after.keys():
            one, two = before[column], after[column]
            are_numbers = type(one) in (int, float) and type(two) in (int, float)
            if not (math.isclose(one, two, rel_tol=1e-12, abs_tol=0.0) if are_numbers else one == two):
                yield f"row {at}, {column}: {one!r:.80} -> {two!r:.80}"


def main(revision: str, folder: Path, parts: list[str]) -> int:
    sides = Side(folder / "old", revision), Side(folder / "new", "HEAD")
    differ = 0
    for name in (name for name in CASES if not parts or any(part in name for part in parts)):
        try:
            old, new = (side.tables(name) for side in sides)
        except RuntimeError as error:
            print(f"{name}: NOT RUN: {error}", flush=True)
            differ += 1
            continue
        for table in dict.fromkeys([*old, *new]):
            cells = sum(len(row) for row in (new.get(table) or old[table])["rows"])
            found = list(apart(old[table], new[table])) if table in old and table in new else ["one side lacks the table"]
            differ += bool(found)
            print(f"{name} | {table} | {cells} cells | {'equal' if not found else f'{len(found)} DIFFER: ' + found[0]}", flush=True)
            for line in found[1:20]:
                print(f"    {line}", flush=True)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]).resolve(), sys.argv[3:]))
