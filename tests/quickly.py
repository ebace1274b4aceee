"""Makes the tests' processes and their child processes fast: each config file is read once, garbage is collected rarely.

All that tests replace in Hydra and OmegaConf for this is here, and `tests/test_quickly.py` holds each to the answer without it.
"""

import contextlib
import functools
import gc
import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from omegaconf import OmegaConf, _utils, base, grammar_parser, omegaconf
from omegaconf.base import Box, UnionNode

from dpx.config.hydra_version import IS_NEXT

_read_config, _known_choices = ConfigRepository.load_config, getattr(defaults_list, "_create_interpolation_map", None)
_set_parents, _create = Box._re_parent, OmegaConf._create_impl
_CHECKOUT = Path(__file__).resolve().parents[1]
# Of dpx, and of the package in its own distribution.
_OWN_CONFIGS = {"hydra.conf", str(_CHECKOUT / "conf"), str(_CHECKOUT / "experiments" / "papers" / "dpx_papers" / "conf"), ""}
_list_defaults, _merge_files = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
# What was computed, pickled: Hydra edits the object that it gets, and copying it otherwise takes five times as long.
_kept: dict[str, bytes] = {}


def _once(sources: Iterable[Any], key: tuple[Any, ...], compute: Callable[[], Any]) -> Any:
    """What `compute` gives, computed once for each key, where all of these sources of configs are dpx's own, which do not change."""
    places = [source.path for source in sources]
    if not _OWN_CONFIGS.issuperset(places):
        return compute()
    name = repr((places, *key))
    if name not in _kept:
        _kept[name] = pickle.dumps(compute())
    return pickle.loads(_kept[name])


def _config_read_once(self: ConfigRepository, config_path: str) -> Any:
    """Reading dpx's own config files is a third of a composition, and Hydra reads them again for each, also beside a user's folder."""
    source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
    return _once([source], ("file", config_path), lambda: _read_config(self, config_path)) if source else None


def _defaults_listed_once(repo: Any, config_name: Any, overrides_list: list[Any], prepend_hydra: bool, skip_missing: bool) -> Any:
    """Which files are read follows from the options of groups alone; most command lines of tests choose those of another."""
    chosen = [one for one in overrides_list if repo.group_exists(one.key_or_group) or one.is_sweep_override()]
    lines = [one.input_line for one in chosen]
    options = (config_name, lines, prepend_hydra, skip_missing)
    found = _once(
        repo.get_sources(), ("defaults", *options), lambda: _list_defaults(repo, config_name, chosen, prepend_hydra, skip_missing)
    )
    is_settled = dict.fromkeys(lines, True) | {one.input_line: False for one in found.config_overrides}
    found.config_overrides[:] = [one for one in overrides_list if not is_settled.get(one.input_line, False)]
    return found


def _files_merged_once(self: ConfigLoaderImpl, defaults: list[Any], repo: Any) -> Any:
    """The same files make the same config, into which values of the command line are put later."""
    return _once(repo.get_sources(), ("merged", type(self), defaults), lambda: _merge_files(self, defaults, repo))


def _known_choices_if_asked(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
    """Another quarter is the choices, put together for every file although only a default with an interpolation looks at them."""
    assert _known_choices is not None
    return _known_choices(overrides, defaults, self_added) if any(default.is_interpolation() for default in defaults) else None


def _text_read_once(obj: Any = omegaconf._DEFAULT_MARKER_, parent: Any = None, flags: Any = None) -> Any:
    """The config of one run is read again and again, as text, by what judges it."""
    if not isinstance(obj, str) or parent is not None or flags is not None:
        return _create(obj, parent, flags)
    return _once([], ("text", obj), lambda: _create(obj))


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


class Patch(NamedTuple):
    """`replacement` in place of `original`, which `owners` hold under the name `attribute`."""

    owners: tuple[Any, ...]
    attribute: str
    original: Any
    replacement: Any

    def put(self, is_on: bool) -> None:
        for owner in self.owners:
            setattr(owner, self.attribute, self.replacement if is_on else self.original)


# They are of Hydra 1.3 and OmegaConf 2.3; with the next ones tests run slower.
PATCHES: dict[str, Patch] = (
    {}
    if IS_NEXT
    else {
        "config_files": Patch((ConfigRepository,), "load_config", _read_config, _config_read_once),
        "defaults": Patch((config_loader_impl,), "create_defaults_list", _list_defaults, _defaults_listed_once),
        "merged": Patch((ConfigLoaderImpl,), "_compose_config_from_defaults_list", _merge_files, _files_merged_once),
        "text": Patch((OmegaConf,), "_create_impl", staticmethod(_create), staticmethod(_text_read_once)),
        "choices": Patch((defaults_list,), "_create_interpolation_map", _known_choices, _known_choices_if_asked),
        # Trees of interpolations hold their own text, and are read alone.
        "interpolations": Patch((base, _utils), "parse", grammar_parser.parse, functools.cache(grammar_parser.parse)),
        "parents": Patch((Box,), "_re_parent", _set_parents, _re_parent),
    }
)


@contextlib.contextmanager
def only(*names: str) -> Iterator[None]:
    """Within it these patches are on and all others are off; after it all are on, as in every test."""
    for name, patch in PATCHES.items():
        patch.put(name in names)
    try:
        yield
    finally:
        for patch in PATCHES.values():
            patch.put(True)


for _patch in PATCHES.values():
    _patch.put(True)

# What jax keeps of traced programs is millions of objects, and looking through them again and again for garbage is a tenth of the time.
gc.set_threshold(200_000, 50, 100)
