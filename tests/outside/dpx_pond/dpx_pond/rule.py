"""A rule for `verdict:` in experiments/pond/paper.yaml."""

from dpx.declaration import declaration
from dpx_papers.report.evidence import Evidence
from dpx_papers.report.rules import Rule
from dpx_papers.report.shape import Part


@declaration
class Vouched(Rule):
    """Every run of the experiment states that this package vouches for it."""

    def parts(self, evidence: Evidence, experiment: str) -> list[Part]:
        stated = {run.facts["guarantee"] for run in evidence.runs if run.experiment == experiment}
        if not stated:
            return [Part.of(self.claim, None, "no run has finished")]
        return [Part.of(self.claim, stated == {"dp_by_dpx_pond"}, ", ".join(sorted(stated)))]
