"""A claim is checked where nothing is installed that trains: the rooms of privacy and statement need no jax, hydra, orbax or flax."""

import json
import subprocess
import sys

from dpx.claim import calibration, statement
from dpx.claim.calibration import calibrate
from dpx.data.protected_units import unit_facts
from dpx.files.records import to_json
from dpx.privacy.ledger import Ledger
from tests.processes import environment

N = 10_000

CHECK = """
import importlib.abc, importlib, json, pkgutil, sys
from pathlib import Path

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("jax", "jaxlib", "jaxtyping", "hydra", "omegaconf", "orbax", "flax", "optax"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import dpx.privacy, dpx.statement
for room in (dpx.privacy, dpx.statement):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)

import dp_accounting
from dp_accounting import pld
from dpx.privacy import accounting, ledger
from dpx.privacy.ledger import Ledger
from dpx.statement.received import recompute
from dpx.statement.seals import read_run_statement

stated = read_run_statement(Path(sys.argv[1], "privacy.json"))
document = json.loads(Path(sys.argv[1], "privacy.json").read_text())
entered = Ledger(Path(sys.argv[1], "ledger"))
composed = accounting.compose(accounting.bucketed(ledger.releases(entered.segments()))).epsilon(stated.delta)
alone = pld.PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
by_events = recompute(document, lambda event: alone.compose(event).get_epsilon(stated.delta))
print(json.dumps([stated.guarantee, composed, by_events, document["epsilon"]["pld"]]))
"""


def test_a_ledger_and_a_statement_are_read_and_composed_again_without_what_trains(small, tmp_path):
    experiment = small(steps=3)
    calibrated = calibrate(experiment.claim, N)
    assert calibrated.noise_multiplier is not None
    entered = Ledger(tmp_path / "ledger")
    entered.note_units(unit_facts(experiment.data, experiment.privacy, None))
    for step in range(3):
        entered.append(step, calibration.Entries.of(experiment.claim).of_step(N, calibrated.noise_multiplier, 64))
    (tmp_path / "privacy.json").write_text(json.dumps(to_json(statement.build(experiment.claim, None, calibrated, entered))))
    entered.close()
    ended = subprocess.run([sys.executable, "-c", CHECK, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    guarantee, composed, by_events, stated = json.loads(ended.stdout)
    assert guarantee == "dp" and composed == stated and abs(by_events / stated - 1) < 1e-9
