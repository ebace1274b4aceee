"""Analyses Anil et al. 2021, Large-Scale Differentially Private BERT."""
