"""Where declarations have moved to that the configs of older run folders name."""

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


def now_called(target: str) -> str:
    """The present name of the declaration `target`."""
    if target in DECLARATIONS:
        return DECLARATIONS[target]
    module, _, name = target.rpartition(".")
    return f"{MODULES.get(module, module)}.{name}"
