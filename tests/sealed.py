"""Run folders whose statement and configs a test has written or changed by hand, as a run that wrote them so would leave them."""

import contextlib
import json
from pathlib import Path

from dpx.durable import seal
from dpx.files.run_folder import CONFIG
from dpx.privacy.ledger import Ledger
from dpx.privacy.lines import AuditBound, Verdict
from dpx.statement.agreement import LEDGER
from dpx.statement.seals import STATEMENT


def refuting() -> Verdict:
    """What an audit proves against a claim of 1."""
    bound = AuditBound(
        score="gradient",
        estimator="one_run",
        guesses=100,
        correct=100,
        delta=1e-5,
        error=0.05,
        epsilon=9.0,
        claim=1.0,
        guarantee=True,
        refutes=True,
    )
    return Verdict(passes=False, primary=bound, others=())


def sealed_anew(path: Path) -> Path:
    """Seals what lies in the run folder `path` in its ledger."""
    with contextlib.closing(Ledger(path / LEDGER)) as entered:
        configs = [path / place / CONFIG for place in ("private", "release")]
        entered.seal_configs(seal(config.read_text()) for config in configs if config.is_file())
        if (path / "release" / STATEMENT).is_file():
            checksum = seal(json.loads((path / "release" / STATEMENT).read_text()))
            entered.seal_statement(checksum)
            entered.note_stated(checksum)
    return path
