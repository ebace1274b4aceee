"""Makes the tests' processes and their child processes fast: each config file is read once, garbage is collected rarely."""

import copy
import functools
import gc
import pickle
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss
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


def _log_of_affine(a: float, b_P: np.ndarray, c: float) -> np.ndarray:
    """log(a exp(b) + c) of each b, for a > 0 and c <= 0, as dp-accounting computes it of one."""
    shifted_P = b_P + np.log(a)
    return shifted_P if c == 0 else shifted_P + np.log1p(-np.exp(np.log(-c) - shifted_P))


def _where_losses_lie(mechanism: GaussianPrivacyLoss, losses_P: np.ndarray) -> dict[float, float]:
    """The outcome of each loss of a grid, which dp-accounting looks up one by one in a Poisson sample's privacy loss: half of what
    composing costs here. Losses that none has are left out."""
    q, removes = mechanism.sampling_prob, mechanism.adjacency_type == AdjacencyType.REMOVE
    sign = 1.0 if removes else -1.0
    inside_P = sign * losses_P > np.log1p(-q)
    inside_P &= ~np.isclose(losses_P, sign * np.log(1 - q), rtol=1e-8) & (losses_P != 0)
    losses_P = losses_P[inside_P]
    unsampled_P = sign * _log_of_affine(1 / q, sign * losses_P, 1 - 1 / q)
    # Declared for one loss, it takes an array as well.
    outcome_of: Any = mechanism._inverse_privacy_loss_without_subsampling_remove
    outcomes_P = outcome_of(unsampled_P)
    return dict(zip(losses_P.tolist(), (outcomes_P + (0 if removes else mechanism.sensitivity)).tolist(), strict=True))


def _deltas_of_a_grid(self: GaussianPrivacyLoss, epsilon: Any) -> Any:
    """As dp-accounting's, which is given the outcomes it would look up."""
    if np.ndim(epsilon) == 0 or self.sampling_prob == 1 or self.adjacency_type == AdjacencyType.REPLACE:
        return _deltas(self, epsilon)
    known, one = _where_losses_lie(self, np.asarray(epsilon)), self.inverse_privacy_loss
    self.inverse_privacy_loss = lambda privacy_loss: known[privacy_loss] if privacy_loss in known else one(privacy_loss)
    try:
        return _deltas(self, epsilon)
    finally:
        del self.inverse_privacy_loss


_parser = OverridesParser.create()
_deltas, GaussianPrivacyLoss.get_delta_for_epsilon = GaussianPrivacyLoss.get_delta_for_epsilon, _deltas_of_a_grid
OverridesParser.parse_rule = _override_read_once
# Trees of interpolations hold their own text, and are read alone.
base.parse = _utils.parse = functools.cache(grammar_parser.parse)  # pyright: ignore[reportPrivateImportUsage]
_set_parents, Box._re_parent, Container._invalidate_flags_cache = Box._re_parent, _re_parent, _invalidate_flags_cache
ConfigRepository.load_config = _config_read_once
defaults_list._create_interpolation_map = _known_choices_if_asked

# What jax keeps of traced programs is millions of objects, and looking through them again and again for garbage is a tenth of the time.
gc.set_threshold(200_000, 50, 100)
