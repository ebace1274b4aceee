"""What the configs of older run folders call differently: where declarations have moved to, and their keys."""

from typing import Any

MODULES = {
    "dpx.analysis.anil_accounting": "dpx.papers.anil2021.accounting",
    "dpx.analysis.anil_scale_invariance": "dpx.papers.anil2021.scale_invariance",
    "dpx.analysis.anil_schedule_savings": "dpx.papers.anil2021.schedule_savings",
    "dpx.analysis.anil_sgd32x_ref": "dpx.papers.anil2021.sgd32x_ref",
    "dpx.analysis.dpfp_prop1_noise_dimension": "dpx.papers.du2021.prop1_noise_dimension",
    "dpx.analysis.dpfp_prop3_noise_ratio": "dpx.papers.du2021.prop3_noise_ratio",
    "dpx.analysis.dpfp_table1_complexity": "dpx.papers.du2021.table1_complexity",
    "dpx.analysis.dpfp_table2_accounting": "dpx.papers.du2021.table2_accounting",
    "dpx.analysis.legal_accounting": "dpx.papers.yin2022.accounting",
    "dpx.analysis.mckenna_calibration_profiles": "dpx.papers.mckenna2025.calibration_profiles",
    "dpx.analysis.mckenna_diminishing_batch": "dpx.papers.mckenna2025.diminishing_batch",
    "dpx.analysis.mckenna_fig4_vector_fields": "dpx.papers.mckenna2025.fig4_vector_fields",
    "dpx.analysis.mckenna_flops_model": "dpx.papers.mckenna2025.flops_model",
}


DECLARATIONS = {"dpx.mechanism.declarations.Quantile": "dpx.mechanism.declarations.AdaptiveClip"}

# By declaration, as it is called now: its keys of former versions, and what they are called now.
KEYS = {"dpx.task.declarations.MaskedLanguageModel": {"masked_slots": "max_masked_positions"}}


def now_called(target: str) -> str:
    """The present name of the declaration `target`."""
    if target in DECLARATIONS:
        return DECLARATIONS[target]
    module, _, name = target.rpartition(".")
    return f"{MODULES.get(module, module)}.{name}"


def with_present_keys(node: dict[str, Any]) -> dict[str, Any]:
    """One declaration of a config, its keys as they are called now. Of two names of one key the former stays, to be refused."""
    present = KEYS.get(now_called(str(node.get("_target_"))), {})
    return {key if present.get(key, key) in node else present[key]: value for key, value in node.items()}


def with_first_keys(node: Any) -> Any:
    """A whole config, every key as it was first called: what a run is recognised by (its folder, its fingerprint) outlives a rename."""
    if isinstance(node, list):
        return [with_first_keys(item) for item in node]
    if not isinstance(node, dict):
        return node
    first = {now: then for then, now in KEYS.get(now_called(str(node.get("_target_"))), {}).items()}
    return {first.get(key, key): with_first_keys(value) for key, value in node.items()}


def renamed(key: str) -> str | None:
    """What the key of a former version is called now."""
    return next((present[key] for present in KEYS.values() if key in present), None)
