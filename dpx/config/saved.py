"""Reads the config of an existing run, found by its folder or by the name of its experiment.

A run's folder may come from somebody else, so its config is read as data: plain YAML, in which nothing is resolved or evaluated.
"""

from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from dpx.config.node import nearest
from dpx.declaration import ConfigError, require
from dpx.files.run_folder import CONFIG
from dpx.statement import agreement
from dpx.statement.seals import CHAIN

_MOST_BYTES = 1 << 20
_DEEPEST = 32


def load(run: str) -> tuple[DictConfig, Path]:
    """Returns the resolved config of a finished or running run, and its folder, after a check that the folder's parts agree.

    `run` is a run folder, its name under `outputs/`, or the name of an experiment that has exactly one run there. Raises `ConfigError` if
    no run or several runs match, if its config is not valid, or if the parts of its folder do not agree.
    """
    folder = next((place for place in (Path(run), Path("outputs", run)) if (place / "release" / CONFIG).is_file()), None)
    if folder is None:
        is_chain = any((place / "release" / CHAIN).is_file() for place in (Path(run), Path("outputs", run)))
        fix = "Name the folder of one of its stages, or add job=explain to the command of the chain"
        require(not is_chain, f"run={run}", "is the folder of a chain and not of one run", fix)
        try:
            folders = sorted(path.parent.parent for path in Path("outputs").glob(f"{run}-*/release/{CONFIG}"))
        except (NotImplementedError, ValueError):
            # An absolute path, or stars that are not a valid pattern.
            folders = []
        if len(folders) != 1:
            everything = [path.parent.parent.name for path in Path("outputs").glob(f"*/release/{CONFIG}")]
            hint = f"Name one of {', '.join(map(str, folders))}" if folders else f"Name a run folder{nearest(run, everything)}"
            raise ConfigError(f"run={run}", f"{len(folders) or 'no'} runs have this name" if folders else "no such run", hint)
        folder = folders[0]
    loaded = read(place_of(folder))
    agreement.check(folder)
    return loaded, folder


def place_of(folder: Path) -> Path:
    """Returns the path of the config of the run in `folder`: its whole config, or the released one if the whole one is missing."""
    whole = folder / "private" / CONFIG
    return whole if whole.is_file() else folder / "release" / CONFIG


def read(path: Path) -> DictConfig:
    """Returns the config in `path`, which contains no interpolation. Raises `ConfigError` for anything except plain YAML of moderate
    size."""
    fix = "Restore the file"
    try:
        require(path.stat().st_size <= _MOST_BYTES, path, f"holds more than {_MOST_BYTES} bytes, so it is not a config of a run", fix)
        text = path.read_text(encoding="utf-8")
        _require_plain(path, text)
        loaded = OmegaConf.create(text)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(path, f"cannot be read ({error.strerror})", fix) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(path, "is not YAML", fix) from error
    require(isinstance(loaded, DictConfig), path, "is not a config of a run", fix)
    assert isinstance(loaded, DictConfig)
    return loaded


def _require_plain(path: Path, content: str) -> None:
    """Raises `ConfigError` for YAML with an interpolation, a tag, or an anchor that repeats a part."""
    depth = 0
    for event in yaml.parse(content, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        reason, text = None, event.value if isinstance(event, yaml.ScalarEvent) else ""
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            reason = "repeats a part of the file with an anchor"
        elif getattr(event, "tag", None) is not None:
            reason = f"has the tag {getattr(event, 'tag', None)}"
        elif "${" in text:
            reason = "has an interpolation (${...}), which dpx does not evaluate in a run's folder"
        elif text == "???":
            reason = "has a missing value (???)"
        elif depth > _DEEPEST:
            reason = "is nested too deeply"
        if reason is not None:
            raise ConfigError(f"{path}:{event.start_mark.line + 1}", reason, "A run's own config holds plain values. Restore the file")
