"""Objectives: per-example losses and what is measured of them."""
