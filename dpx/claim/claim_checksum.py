"""Gives the part of a declaration that a claim depends on, and its checksum: neither may change during a run."""

import hashlib
import json
from typing import Any

from dpx.config.experiment import Experiment
from dpx.declaration import identifying_values
from dpx.models.model_protocol import COMPUTATION
from dpx.statement import outside_code

# Reporting and evaluation do not reach the parameters; the rest of the declaration does.
_WITHOUT_EFFECT = ("schedule", "name", "tune", "profile")
# These settings change how bits are computed, never the privacy statement.
_COMPUTATION = ("mesh", "clipping_method", "microbatch", "length_buckets")


def claim_of(experiment: Experiment) -> dict[str, Any]:
    """Returns the declaration as plain data, without default values, reporting, and settings of how it is computed."""
    plain = identifying_values(experiment)
    plain["data"].pop("directory", None)
    for name in COMPUTATION:
        plain["model"].pop(name, None)
    # Two packages may have classes of one name.
    if outside := outside_code.parts(experiment):
        plain["outside_code"] = {part.key: part.kind for part in outside}
    return {key: value for key, value in plain.items() if key not in _WITHOUT_EFFECT + _COMPUTATION}


def claim_checksum(experiment: Experiment) -> str:
    """Returns the SHA-256 of `claim_of`, which must not change during a run."""
    return hashlib.sha256(json.dumps(claim_of(experiment), sort_keys=True, default=str).encode()).hexdigest()
