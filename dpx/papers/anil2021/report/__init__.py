"""Anil et al. 2021, "Large-Scale Differentially Private BERT": its verdicts, figures and page."""
