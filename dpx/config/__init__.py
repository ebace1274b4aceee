"""Composes YAML, converts it to declarations, and reads the config of an existing run."""

from dpx.config.identity import identity, resolved, run_name
from dpx.config.instantiate import Job, build, declare, make
from dpx.config.saved import load, place_of, read
from dpx.config.with_hydra import register_resolvers

__all__ = ["Job", "build", "declare", "identity", "load", "make", "place_of", "read", "register_resolvers", "resolved", "run_name"]
