"""Run folders whose statement and configs a test has written or changed by hand, as a run that wrote them so would leave them."""

import contextlib
import json
from pathlib import Path

from dpx.claim.agreement import LEDGER
from dpx.claim.seals import STATEMENT, seal
from dpx.privacy.ledger import Ledger
from dpx.run_folder import CONFIG


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
