"""The config of a run that was made, found by its folder or by the name of its experiment."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from dpx.config.node import nearest
from dpx.declaration import ConfigError


def load(run: str) -> tuple[DictConfig, Path]:
    """The resolved config of a finished or running run, and its folder.

    `run` is a run folder, or the name of an experiment that has exactly one run under `outputs/`. Raises `ConfigError` where there is no
    such run, or several, or its config is none.
    """
    folder = Path(run)
    if not (folder / "release" / "config.yaml").is_file():
        try:
            folders = sorted(path.parent.parent for path in Path("outputs").glob(f"{run}-*/release/config.yaml"))
        except (NotImplementedError, ValueError):
            # An absolute path, or stars that are no pattern.
            folders = []
        if len(folders) != 1:
            everything = [path.parent.parent.name for path in Path("outputs").glob("*/release/config.yaml")]
            hint = f"Name one of {', '.join(map(str, folders))}" if folders else f"Name a run folder{nearest(run, everything)}"
            raise ConfigError(f"run={run}", f"{len(folders) or 'no'} runs have that name" if folders else "no such run", hint)
        folder = folders[0]
    loaded = OmegaConf.load(folder / "release" / "config.yaml")
    if not isinstance(loaded, DictConfig):
        raise ConfigError(folder / "release" / "config.yaml", "is no config of a run", "Restore the file")
    return loaded, folder
