"""`job=audit`: attacks the mechanism of this config with Dirac canaries, and fails when what is proved exceeds what is claimed.

No private row is read: the canaries are the whole data. What is attacked is the code between the loss and the optimiser under this
config's clip, clipping method and mesh, in a stated setting; the sampler and the trained model are not.
"""

from typing import Any

from dpx.config.declared_audit import Estimator, Primary
from dpx.config.experiment import Experiment
from dpx.console import answer, wide_console
from dpx.declaration import ConfigError, declaration, require
from dpx.files.records import to_json
from dpx.files.run_folder import RunFolder, write_json

# Noise further from its stated variance than this is a defect, whichever way.
NOISE_ERROR = 1e-6


@declaration
class Audit:
    """Writes `private/audit.json`, `private/audit_coins.npy` and, without coins or scores, `release/audit.json`.

    Raises `ConfigError` after writing when a lower bound exceeds the claim or the noise does not have the stated variance. The secret is
    kept: running the same audit again gives the same result, so it cannot be repeated until it passes.

    Attributes:
        canaries: Number of canaries.
        steps: Steps that the attack sees, at full participation.
        epsilon: The claim; the audit uses the least noise that gives it.
        delta: Delta of the claim.
        estimator: The primary lower bound, declared before anything runs.
        guesses: Number of canaries that are guessed.
        error: Probability with which the primary bound may be wrong.
    """

    canaries: int = 20_000
    steps: int = 2
    epsilon: float = 2.0
    delta: float = 1e-5
    estimator: Estimator = "one_run"
    guesses: int = 400
    error: float = 0.05

    def __post_init__(self) -> None:
        self.primary()
        few = f"there are only {self.canaries} canaries"
        require(self.guesses <= self.canaries, f"job.guesses={self.guesses}", few, "Guess fewer, or give more canaries")

    def primary(self) -> Primary:
        return Primary(estimator=self.estimator, guesses=self.guesses, delta=self.delta, error=self.error)

    def __call__(self, experiment: Experiment, folder: RunFolder) -> None:
        import numpy as np

        from dpx.audit.verdict import judge, require_passes
        from dpx.randomness import RootSecret
        from dpx.training.dirac import Attack, Setting

        setting = Setting(canaries=self.canaries, steps=self.steps, epsilon=self.epsilon, delta=self.delta)
        attack = Attack.build(experiment.one_step, experiment.mesh, setting)
        with folder.claimed():
            path, seed = folder.private / "audit_secret", experiment.seed
            if seed is not None:
                secret = RootSecret.from_seed(seed)
            else:
                secret = RootSecret.load(path) if path.exists() else RootSecret.create(path)
            is_in_M = attack.coins(secret)
            np.save(folder.private / "audit_coins.npy", is_in_M)
            scores_M = attack.scores(secret, is_in_M)
            verdict = judge({"gradient": (scores_M, is_in_M)}, setting.claim, self.primary())
            p_value = attack.noise_p_value(scores_M, is_in_M)
            words = {"adversary": "sees every noisy sum, knows every canary but its coin", "participation": "every unit, every step"}
            facts = {name: getattr(setting, name) for name in ("canaries", "steps", "epsilon", "delta", "noise_multiplier")}
            clip = experiment.clip
            document = {
                "setting": words | facts,
                "mechanism": {"clip": clip.kind, "clipping_norm": clip.clipping_norm, "clipping": experiment.clipping_method.name},
                "noise": {"p_value": p_value, "passes": p_value >= NOISE_ERROR},
                "not_covered": ["the sampler", "the data and its units", "the optimiser and the trained parameters"],
                **to_json(verdict),
            }
            write_json(folder.release / "audit.json", document)
            # In units of the clipping norm.
            groups = (("in", scores_M[is_in_M]), ("out", scores_M[~is_in_M]))
            scores = {f"{name}_{of}": float(getattr(group, of)()) for name, group in groups for of in ("mean", "std", "min", "max")}
            write_json(folder.private / "audit.json", document | {"scores": scores})
        answer(document)
        show(document)
        wide_console().print(f"noise variance: p = {p_value:.3g}", highlight=False)
        require_passes(document)
        if p_value < NOISE_ERROR:
            reason = f"the released noise does not have the stated variance (p = {p_value:.1e})"
            raise ConfigError("audit", reason, "Correct the standard deviation that the mechanism passes to the noise")


def show(document: dict[str, Any]) -> None:
    """Prints every bound of a verdict beside its claim."""
    from dpx.pages.analysis_tables import Table

    columns = ("score", "estimator", "guesses", "correct", "delta", "error", "epsilon", "claim", "refutes")
    listed = [document["primary"], *document["others"], *document["without_guarantee"]]
    rows = tuple(tuple(bound[column] for column in columns) for bound in listed)
    title = "lower bounds on epsilon, the primary bound first; a bound without an error probability does not decide the verdict"
    wide_console().print(Table("audit", columns, rows, title).shown())
