"""Declares where the measurements of a run are written: files on this machine (`tensorboard`, `csv`) and services (`wandb`, `mlflow`).

A service is another machine, so it gets what the statement covers: the released config, the guarantee with its epsilon, and released
telemetry. Metrics without noise leave this machine only with `send_protected`, which the statement names under what it does not cover.
"""

import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from dpx import packages
from dpx.declaration import declaration, require


@declaration
class TensorBoard:
    """Writes event files to `private/tensorboard`."""


@declaration
class Csv:
    """Writes `private/metrics.csv`: one row a step, one column a metric."""


@declaration
class Wandb:
    """Sends to Weights & Biases; its files are in `wandb/` beside the run's folder. The key comes from `wandb login` or `WANDB_API_KEY`.

    Attributes:
        project: Project of the runs.
        entity: User or team; null is your own.
        group: Name that groups runs; null for none.
        mode: online, or offline for files that `wandb sync` sends later.
    """

    project: str = "dpx"
    entity: str | None = None
    group: str | None = None
    mode: Literal["online", "offline"] = "online"


@declaration
class Mlflow:
    """Sends to an MLflow tracking server. Its credentials come from the environment, such as `MLFLOW_TRACKING_TOKEN`.

    Attributes:
        tracking_uri: Address of the server; null takes `MLFLOW_TRACKING_URI`.
        experiment: Name of the experiment, which is made if it is missing.
    """

    tracking_uri: str | None = None
    experiment: str = "dpx"

    def __post_init__(self) -> None:
        uri = self.tracking_uri
        if uri is None:
            return
        fix = "Use http:// or https://"
        require(uri.startswith(("http://", "https://")), f"logger.mlflow.tracking_uri={uri}", "is not the address of a server", fix)
        parts = urlsplit(uri)
        reason = "holds a user or a query, and the config of a run is released"
        is_plain = parts.username is None and parts.password is None and not parts.query
        require(is_plain, "logger.mlflow.tracking_uri", reason, "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD instead")


@declaration
class Loggers:
    """The loggers of a run; several at once are `logger=[tensorboard,wandb]`.

    Attributes:
        tensorboard: Event files for TensorBoard; null writes none.
        csv: A table of all metrics; null writes none.
        wandb: Weights & Biases; null sends nothing there.
        mlflow: An MLflow tracking server; null sends nothing there.
        send_protected: Whether services also get all metrics without noise: losses, norms, held-out metrics, times, and how many rows each
            step drew.
    """

    tensorboard: TensorBoard | None = None
    csv: Csv | None = None
    wandb: Wandb | None = None
    mlflow: Mlflow | None = None
    send_protected: bool = False

    def __post_init__(self) -> None:
        require(
            not self.send_protected or bool(self.services),
            "logger.send_protected=true",
            "no logger of this run sends anything",
            "Add logger=wandb or logger=mlflow, or remove it",
        )

    @property
    def services(self) -> tuple[str, ...]:
        """The names of the loggers that send to another machine."""
        return tuple(name for name in ("wandb", "mlflow") if getattr(self, name) is not None)

    def require_usable(self) -> None:
        """Raises `ConfigError` for a service whose library is not installed, that has no address, or whose server a file chooses."""
        for name in self.services:
            packages.require_extra(f"logger={name}", name)
        if self.wandb is not None:
            _require_own_server()
        is_named = self.mlflow is None or self.mlflow.tracking_uri is not None or "MLFLOW_TRACKING_URI" in os.environ
        require(is_named, "logger.mlflow.tracking_uri=null", "names no server", "Give its address, or export MLFLOW_TRACKING_URI")


def _require_own_server() -> None:
    """Raises `ConfigError` for settings of W&B in the working folder, which may be somebody else's, that choose more than a project."""
    for place in (Path("wandb/settings"), Path(".wandb/settings")):
        lines = place.read_text(errors="replace").splitlines() if place.is_file() else []
        for key in (re.split(r"[=:]", line)[0].strip() for line in lines):
            is_known = key in ("", "[default]", "entity", "project") or key.startswith(("#", ";"))
            reason = f"sets {key} of W&B, and a file of the working folder does not say where values go"
            require(is_known, place, reason, "Remove it; your own settings are in ~/.config/wandb/settings and in WANDB_BASE_URL")


DEFAULT = Loggers(tensorboard=TensorBoard())
