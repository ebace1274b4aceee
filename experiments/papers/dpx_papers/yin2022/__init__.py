"""Yin & Habernal 2022, Privacy-Preserving Models for Legal Natural Language Processing."""
