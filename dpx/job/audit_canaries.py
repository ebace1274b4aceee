"""`job=audit_canaries`: trains this config with text canaries among its rows and reports how well the result betrays them.

Power is reported and nothing is passed or failed by it: a small epsilon may hide more than these canaries can show.
"""

import dataclasses
from typing import Any

from dpx.analysis.table import Table
from dpx.console import wide
from dpx.declaration import declaration, require
from dpx.experiment import Experiment
from dpx.run_folder import RunFolder, write_json


@declaration
class AuditCanaries:
    """Trains in `private/audit_canaries` (the run itself is not touched) and writes `private/audit_canaries.json`."""

    canaries: int = 1000
    masks: int = 8
    guesses: int = 100
    error: float = 0.05

    def __post_init__(self) -> None:
        require(self.canaries >= 4, f"job.canaries={self.canaries}", "coins fall on both sides only with several", "Use 1000")
        require(self.masks > 0, f"job.masks={self.masks}", "nothing would be scored", "Use 1 or more")
        fits = self.guesses % 2 == 0 and 0 < self.guesses <= self.canaries
        require(fits, f"job.guesses={self.guesses}", f"not an even number up to {self.canaries}", "Guess as many in as out")

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        require(
            experiment.privacy.adjacency == "zero_out",
            f"privacy.adjacency={experiment.privacy.adjacency}",
            "canaries that are out keep their place",
            "Use privacy.adjacency=zero_out",
        )
        document = self.attack(experiment, RunFolder(folder.private / "audit_canaries", folder.config_yaml))
        write_json(folder.private / "audit_canaries.json", document)
        wide().print(Table("audit_canaries", ("what", "value"), tuple(document.items()), "text canaries: power, no pass line").shown())

    def attack(self, experiment: Experiment, folder: RunFolder) -> dict[str, Any]:
        """Trains and scores; what an attacker proves beside what is claimed."""
        from dpx.audit import text
        from dpx.privacy.calibration import calibrate
        from dpx.task.mlm import objective as make_objective
        from dpx.training.loop import run
        from dpx.training.session import Session

        with folder.claimed(), Session.open(experiment, folder) as session:
            store, secret = session.runtime.store, session.beginning.secret
            tokens_MT = text.canary_tokens(store.manifest, self.canaries, secret.generator("audit_canaries"))
            is_in_M = secret.generator("audit_coins").integers(0, 2, self.canaries).astype(bool)
            store = text.WithCanaries(store, tokens_MT, is_in_M)
            calibrated = calibrate(experiment, store.manifest.rows["protected"])
            runtime = dataclasses.replace(session.runtime, store=store, calibrated=calibrated)
            state = run(runtime, session.beginning, lambda *_: None)
            vocabulary = experiment.model.vocabulary_size or store.manifest.vocabulary_size
            objective = make_objective(experiment.model, experiment.task, vocabulary, store.manifest)
            scores_M = text.scores(objective, state["params"], store, secret, self.masks)
        return self._found(experiment, calibrated.epsilon, scores_M, is_in_M)

    def _found(self, experiment: Experiment, claims: dict[str, float], scores_M: Any, is_in_M: Any) -> dict[str, Any]:
        from dpx.audit import one_run, text, trade_off
        from dpx.audit.guesses import guess

        seen, delta = guess(scores_M, is_in_M, self.guesses), experiment.privacy.delta
        exposure = text.exposures(scores_M, is_in_M)
        return {
            "canaries": self.canaries,
            "in": int(is_in_M.sum()),
            "auc": text.area_under_curve(scores_M, is_in_M),
            "exposure_mean": float(exposure.mean()),
            "exposure_max": float(exposure.max()),
            "exposure_mean_by_chance": 1.4427,
            "correct_guesses": f"{seen.correct} of {seen.guesses}",
            "delta": delta,
            "epsilon_lower_bound_one_run": one_run.epsilon_lower_bound(seen, delta, self.error),
            "epsilon_lower_bound_f_dp": trade_off.epsilon_lower_bound(seen, delta, self.error),
            "error": self.error,
            "claim": next(iter(claims.values()), None),
        }
