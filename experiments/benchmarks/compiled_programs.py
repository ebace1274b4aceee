"""The compiled step of BERT-Large and BERT-Mega at the paper's batch on 8 and 256 devices: memory, and what crosses devices.

    python experiments/benchmarks/compiled_programs.py experiments/benchmarks/compiled_programs.json [model ...]

Each row is the plan of `+experiment=anil_2m_batch` (Anil et al. 2021, a batch of 2,097,152) with `plan.compile=true`: the step's programs
are compiled for simulated CPU devices from shapes alone. Layers are a loop of the program, so its text does not grow with their number.
The table says `as it must be` where, in a logical batch,

- no reduction is in a loop, and nothing crosses examples (the axes `data` and `fsdp`) while microbatches are summed;
- each gradient is reduced once along each of these axes: by a reduce-scatter over `fsdp`, and its part by an all-reduce over `data`;
- parameters are gathered by separate all-gathers, which reduce nothing;
- and a device holds at most 80 GB.

An all-gather of parameters inside a loop (a gather layer by layer) is told from a reduction by its kind, and one of activations within a
layer by its axis, `tensor`.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODELS = ("large", "mega")
MESHES = {8: ("mesh=h100_8",), 256: ("mesh=h100_8", "mesh.data=32")}
LIMIT_BYTES = 80e9
REDUCTIONS = ("all-reduce", "reduce-scatter")
# Counts, norms and the checksum cross too; gradients are some hundred million numbers.
SMALL = 0.001


def faults(plan: dict[str, Any]) -> list[str]:
    """Returns what is not as the module's text demands, of a plan with `compiled`."""
    compiled, parameters = plan["compiled"], plan["trained_parameters"]
    mesh, crossing = compiled["mesh"], compiled["collectives"]
    found = []
    for name, every in crossing.items():
        over_examples = [one for one in every if {"data", "fsdp"} & set(one["axes"])]
        found += [f"{name}: {one['kind']} in a loop" for one in over_examples if one["in_loop"] and one["kind"] in REDUCTIONS]
        reduced = _elements(one for one in over_examples if one["kind"] in REDUCTIONS)
        if name != "reduce" and reduced > SMALL * parameters:
            found.append(f"{name}: reduces {reduced:,} numbers")
    found += [f"accumulate: {one['kind']} over examples" for one in crossing["accumulate"] if {"data", "fsdp"} & set(one["axes"])]
    # Of each gradient a device keeps its part along fsdp; that part is what it adds up along data.
    part = parameters / mesh["fsdp"]
    for axis in ("data", "fsdp"):
        reduced = _elements(one for one in crossing["reduce"] if axis in one["axes"] and one["kind"] in REDUCTIONS)
        if mesh[axis] > 1 and not (1 - SMALL) * part <= reduced <= 1.05 * part:
            found.append(f"reduce: {reduced:,} numbers along {axis}, not the {part:,.0f} of each gradient once")
    found += [f"gather: a {one['kind']}" for one in crossing["gather"] if one["kind"] != "all-gather"]
    if compiled["peak_bytes_per_device"] > LIMIT_BYTES:
        found.append(f"{compiled['peak_bytes_per_device'] / 1e9:.1f} GB on a device")
    return found


def _elements(crossing: Any) -> int:
    return sum(one["elements"] for one in crossing)


def compiled_plan(model: str, devices: int) -> tuple[dict[str, Any], float]:
    """Returns plan.json of one row, and the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder:
        given = (
            "+experiment=anil_2m_batch",
            f"model={model}",
            *MESHES[devices],
            "job=plan",
            "plan.compile=true",
            f"hydra.run.dir={folder}",
        )
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "dpx", *given], check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "release/plan.json").read_text()), time.monotonic() - began


def row(plan: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Returns what is kept of one plan."""
    compiled = plan["compiled"]
    kept = {name: plan[name] for name in ("model", "parameters", "devices", "rematerialize", "attention")}
    kept |= {name: compiled[name] for name in ("mesh", "microbatch", "peak_bytes_per_device", "programs", "collectives")}
    return kept | {"planned_bytes_per_device": plan["memory_bytes_per_device"], "seconds": round(seconds), "faults": faults(plan)}


def line(one: dict[str, Any]) -> str:
    """Returns one line of the table of README.md."""
    programs = {name: sum(sizes[part] for part in ("arguments", "results", "temporaries")) for name, sizes in one["programs"].items()}
    crossing = [
        f"{each['kind']} of {each['elements']:,} along {'x'.join(each['axes'])}"
        for name in ("gather", "accumulate", "reduce")
        for each in one["collectives"][name]
        if each["elements"] > SMALL * one["parameters"] / one["devices"]
    ]
    cells = [one["model"], f"{one['devices']}", f"{one['microbatch']}", f"{programs['accumulate'] / 1e9:.1f}"]
    cells += [f"{one['peak_bytes_per_device'] / 1e9:.1f}", f"{one['planned_bytes_per_device'] / 1e9:.1f}", "; ".join(crossing)]
    return f"| {' | '.join([*cells, '; '.join(one['faults']) or 'as it must be', str(one['seconds'])])} |"


def main(place: Path, models: list[str]) -> None:
    rows = []
    for model in models or MODELS:
        for devices in MESHES:
            rows.append(row(*compiled_plan(model, devices)))
            place.write_text(json.dumps(rows, indent=1) + "\n")
            print(line(rows[-1]), flush=True)
    if any(one["faults"] for one in rows):
        sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
