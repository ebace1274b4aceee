"""Would msgspec or pydantic read the records of dpx? Prints what an import costs, and what each says of five lines of a ledger.

pip install msgspec pydantic && python experiments/benchmarks/record_libraries.py
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from pydantic import Field, TypeAdapter

from dpx.files.records import from_json
from dpx.privacy.lines import Line, StepLine

IMPORTS = ("msgspec", "pydantic", "beartype", "dpx.privacy.lines")
NODES: tuple[dict[str, Any], ...] = (
    {"kind": "step", "step": 1},
    {"kind": "step", "step": 1, "further": 2},
    {"kind": "stop", "step": 1},
    {"kind": "step", "step": "1"},
    {"kind": "step"},
)


def processor_seconds(code: str) -> float:
    """The least processor time of five processes that run `code`."""
    spent = []
    for _ in range(5):
        before = os.times()
        subprocess.run([sys.executable, "-c", code], check=True)
        after = os.times()
        spent.append(after.children_user + after.children_system - before.children_user - before.children_system)
    return min(spent)


def said(read: Callable[[Any], Any], node: Any) -> str:
    try:
        return str(read(node))
    except Exception as error:
        return f"{type(error).__name__}, {len(str(error).splitlines())} line(s): {' '.join(str(error).split())[:150]}"


def main() -> None:
    without = processor_seconds("pass")
    for name in IMPORTS:
        print(f"import {name}: {processor_seconds(f'import {name}') - without:.2f} s of processor time")
    adapter = TypeAdapter(Annotated[Line, Field(discriminator="kind")])
    for node in NODES:
        print(node)
        print("  dpx          ", said(lambda one: from_json(Line, one, "ledger, line 2"), node))
        print("  pydantic     ", said(lambda one: adapter.validate_json(json.dumps(one), strict=True), node))
        print("  msgspec union", said(lambda one: msgspec.convert(one, Line), node))
        print("  msgspec alone", said(lambda one: msgspec.convert(one, StepLine), node))


if __name__ == "__main__":
    main()
