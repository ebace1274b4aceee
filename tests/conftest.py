"""Set before jax starts: 8 simulated CPU devices, programs compiled quickly, and caches shared by all tests, so that nothing is
compiled or solved twice."""

import os
from pathlib import Path

# Compiling is most of what tests cost. Without LLVM's optimisations and the fusion emitters it takes a fifth; the passes that decide on
# memory and on what crosses between devices are the same.
QUICKLY = ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1")
CACHE = Path(__file__).resolve().parents[1] / "outputs" / "cache"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(("--xla_force_host_platform_device_count=8", *QUICKLY))
os.environ["DPX_CACHE"] = str(CACHE / "calibration")
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE / "compiled")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
