"""Set before jax starts: 8 simulated CPU devices, and caches shared by all tests so that nothing is compiled or solved twice."""

import os
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / "outputs" / "cache"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["DPX_CACHE"] = str(CACHE / "calibration")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
