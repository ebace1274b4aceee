"""The command line: compose, build, run the job, and answer what cannot stand with one line. Starts no jax."""

import logging
import os
import sys
from pathlib import Path

# Hydra would otherwise print its own, shortened, traceback and leave with another exit code.
os.environ["HYDRA_FULL_ERROR"] = "1"

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dpx import config
from dpx.command_line import as_refused
from dpx.declaration import Refused
from dpx.mesh import Mesh
from dpx.run_folder import RunFolder

log = logging.getLogger("dpx")

failures: list[Exception] = []

# A run may only be looked at with these beside `run=`.
_BESIDE_RUN = ("job", "run", "mesh", "schedule", "hydra", "microbatch")


def simulate_devices(mesh: Mesh) -> None:
    """Tells jax, which must not have started, how many devices to make of one CPU."""
    if mesh.simulated_devices is None:
        return
    flag = f"--xla_force_host_platform_device_count={mesh.simulated_devices}"
    flags = os.environ.get("XLA_FLAGS", "").split()
    if flag in flags:
        return
    if "jax" in sys.modules:
        raise Refused(f"mesh={mesh.name}", "this process began with another number of devices", "Run each mesh in a process of its own")
    kept = [other for other in flags if not other.startswith(flag.partition("=")[0])]
    os.environ["XLA_FLAGS"] = " ".join([*kept, flag])
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def run(cfg: DictConfig) -> None:
    """One job of one composed config, in the folder Hydra chose, or in that of the run it looks at.

    Errors are kept for `main`: raised here, Hydra would add lines of its own, and the other points of a sweep would be lost.
    """
    settings = HydraConfig.get()
    path = Path(settings.runtime.output_dir)
    try:
        if cfg.run is not None:
            cfg, path = _of_finished_run(cfg, list(settings.overrides.task))
        experiment, job = config.build(cfg)
        simulate_devices(experiment.mesh)
        job(experiment, RunFolder(path, OmegaConf.to_yaml(OmegaConf.create(config.resolved(cfg))), cfg.get("fork")))
    except Exception as error:
        log.exception("the job stopped")
        failures.append(error)


def _of_finished_run(cfg: DictConfig, overrides: list[str]) -> tuple[DictConfig, Path]:
    for override in overrides:
        if override.lstrip("+~").partition("=")[0].partition(".")[0] not in _BESIDE_RUN:
            raise Refused(override, f"the run {cfg.run} has its own config", f"Leave it out, or compose it without run={cfg.run}")
    loaded, path = config.load(cfg.run)
    loaded.job = cfg.job
    if any(override.startswith("mesh=") for override in overrides):
        loaded.mesh = cfg.mesh
    return loaded, path


def main() -> None:
    """Exit code 0; 2 with `error: <value>: <reason>. <fix>` for what the user can correct; 1 for a defect."""
    config.register_resolvers()
    command = hydra.main(config_path=str(config.conf_directory()), config_name="config", version_base="1.3")(run)
    failures.clear()
    try:
        command()
    except Exception as error:
        failures.append(error)
    if failures:
        sys.exit(max(_answer(error) for error in failures))


def _answer(error: Exception) -> int:
    refused = as_refused(error)
    if refused is not None:
        print(f"error: {refused}", file=sys.stderr)
        return 2
    words = " ".join(str(error).split()) or "no message"
    print(f"error: {type(error).__name__}: {words}. The traceback is in the run's private/dpx.log.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    main()
