"""What makes processes quick, those of the tests and those that they start: each config file is read once, garbage is looked for rarely."""

import copy
import gc
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository

_read_config, _known_choices = ConfigRepository.load_config, defaults_list._create_interpolation_map
_OWN_CONFIGS = ["hydra.conf", str(Path(__file__).resolve().parents[1] / "conf"), ""]
_configs: dict[str, Any] = {}


def _config_read_once(self: ConfigRepository, config_path: str) -> Any:
    """Reading dpx's own config files is a third of a composition, and Hydra reads them anew for each. It edits what it is given."""
    if [source.path for source in self.sources] != _OWN_CONFIGS:
        return _read_config(self, config_path)
    if config_path not in _configs:
        _configs[config_path] = _read_config(self, config_path)
    return copy.deepcopy(_configs[config_path])


def _known_choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Another quarter is the choices, put together for every file although only a default with an interpolation looks at them."""
    return _known_choices(overrides, defaults, self_added) if any(default.is_interpolation() for default in defaults) else None


ConfigRepository.load_config = _config_read_once
defaults_list._create_interpolation_map = _known_choices_if_asked

# What jax keeps of traced programs is millions of objects, and looking through them again and again for garbage is a tenth of the time.
gc.set_threshold(200_000, 50, 100)
