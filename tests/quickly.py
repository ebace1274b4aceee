"""Makes the tests' processes and their child processes fast: each config file is read once, garbage is collected rarely."""

import copy
import functools
import gc
import pickle
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import _utils, base, grammar_parser
from omegaconf.base import Box, Container, UnionNode

_read_config, _known_choices = ConfigRepository.load_config, defaults_list._create_interpolation_map
_OWN_CONFIGS = ["hydra.conf", str(Path(__file__).resolve().parents[1] / "conf"), ""]
_configs: dict[str, bytes] = {}


def _config_read_once(self: ConfigRepository, config_path: str) -> Any:
    """Reading dpx's own config files is a third of a composition, and Hydra reads them again for each. It edits the object that it gets."""
    if [source.path for source in self.sources] != _OWN_CONFIGS:
        return _read_config(self, config_path)
    if config_path not in _configs:
        _configs[config_path] = pickle.dumps(_read_config(self, config_path))
    # A fifth of the time that copying takes.
    return pickle.loads(_configs[config_path])


def _known_choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Another quarter is the choices, put together for every file although only a default with an interpolation looks at them."""
    return _known_choices(overrides, defaults, self_added) if any(default.is_interpolation() for default in defaults) else None


def _nodes_in(node: Any) -> Any:
    content = node.__dict__["_content"]
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def _re_parent(self: Box) -> None:
    """As OmegaConf's, which is called on the whole config after each file that is merged into it: what stands right is left alone."""
    if isinstance(self, UnionNode):
        return _set_parents(self)
    for node in _nodes_in(self):
        if node is not None and node.__dict__["_parent"] is not self:
            node._set_parent(self)
        if isinstance(node, Box):
            node._re_parent()


def _invalidate_flags_cache(self: Any) -> None:
    """As OmegaConf's, which imports two modules in each of millions of calls."""
    if self.__dict__["_flags_cache"] is not None:
        self.__dict__["_flags_cache"] = None
        for node in _nodes_in(self):
            node._invalidate_flags_cache()


_parse_rule = functools.cache(OverridesParser.parse_rule)


def _override_read_once(self: OverridesParser, s: str, rule_name: str) -> Any:
    """Overrides of tests are the same few; Hydra writes its loader into what it was given."""
    return copy.copy(_parse_rule(_parser, s, rule_name))


_parser = OverridesParser.create()
OverridesParser.parse_rule = _override_read_once
# Trees of interpolations hold their own text, and are read alone.
base.parse = _utils.parse = functools.cache(grammar_parser.parse)  # pyright: ignore[reportPrivateImportUsage]
_set_parents, Box._re_parent, Container._invalidate_flags_cache = Box._re_parent, _re_parent, _invalidate_flags_cache
ConfigRepository.load_config = _config_read_once
defaults_list._create_interpolation_map = _known_choices_if_asked

# What jax keeps of traced programs is millions of objects, and looking through them again and again for garbage is a tenth of the time.
gc.set_threshold(200_000, 50, 100)
