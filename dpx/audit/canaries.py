"""Adds canaries to a run: their coins and texts, their places among the protected units that the sampler draws from, and their loss.

A canary that is out keeps its place: when it is drawn, its place is padding and contributes nothing. So in and out are neighbours under
`zero_out`, and under `add_remove` too, since nothing else depends on who is drawn.

Dirac canaries are added to an objective as one more parameter, in which each has its own coordinate. No row of the data touches that
parameter and no canary touches the others, so canaries cost no accuracy; their gradients go through the run's own clipping, accumulation,
reduction, noise and divisor. The parameter moves by the released gradients alone (rate 1, `dpx.training.update`): after a run it is minus
their sum, each canary's inner product with everything released.

Shape legend: M canaries (G gradient canaries, then S sequences), n things asked for, B rows, R rows of an example, T positions of a row.
The table that Dirac canaries lie in has R rows and W columns, R * W >= M.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from dpx.clipping.ops import lookup
from dpx.config.declared_audit import Canaries
from dpx.data.store import Manifest, Store
from dpx.declaration import ConfigError, require
from dpx.durable import write_durably
from dpx.files.run_folder import read_json, write_json
from dpx.privacy.declared_privacy import Privacy
from dpx.randomness import RootSecret

COINS = "audit_canaries.json"


@dataclasses.dataclass(frozen=True)
class Planted:
    """The coins of all canaries, gradient canaries first, and the texts of the sequences, with labels if rows have labels."""

    gradients: int
    is_in_M: Bool[np.ndarray, " M"]
    tokens_ST: Int[np.ndarray, "S ..."]
    label_S: Int[np.ndarray, " S"] | None = None


def plant(private: Path, audit: Canaries, manifest: Manifest, secret: RootSecret | None) -> Planted:
    """Returns the coins and texts of all canaries.

    They come from an earlier start (or a fork's parent) if there is one; else they are drawn from the root secret and written to disk.

    `secret` is `None` if the run's steps used canaries of another secret. Raises `ConfigError` if those are lost, damaged, or not as
    many as `audit` declares: the number of places is part of what is drawn from.
    """
    path = private / COINS
    if not path.exists():
        if secret is None:
            raise ConfigError(path, "is missing, and the coins of this run's canaries cannot be tossed again", "Restore the file")
        coins, generator = secret.generator("audit_coins").integers(0, 2, audit.count), secret.generator("audit_canaries")
        drawn = canary_tokens(manifest, audit.sequences, generator)
        document = {"gradients": audit.gradients, "coins": coins.tolist(), "tokens": drawn.tolist()}
        if "label" in manifest.schema:
            document["labels"] = generator.integers(0, manifest.schema["label"].below, audit.sequences).tolist()
        write_json(path, document)
    known = read_json(path)
    try:
        tokens_ST = np.asarray(known["tokens"], np.int32).reshape(audit.sequences, *manifest.schema["tokens"].shape)
        label_S = np.asarray(known["labels"], np.int32).reshape(audit.sequences) if "label" in manifest.schema else None
        planted = Planted(known["gradients"], np.asarray(known["coins"], bool).reshape(-1), tokens_ST, label_S)
    except (KeyError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(path, "was changed by hand, or belongs to another audit", "Restore the file") from error
    is_whole = (planted.gradients, len(planted.is_in_M)) == (audit.gradients, audit.count)
    require(is_whole, path, f"holds {len(planted.is_in_M)} canaries where the audit declares {audit.count}", "Restore the file")
    return planted


def inherit(private: Path, parent: Path) -> None:
    """Copies the canaries from the state of a fork's parent, if it has any."""
    if (parent / COINS).exists():
        write_durably(private / COINS, (parent / COINS).read_bytes())


def require_same_audit(fork: str, parent: Path, audit: Any) -> None:
    """Checks that a fork has the same `audit` (canaries or none) as the run that `fork` names, whose private folder is `parent`.

    Raises `ConfigError` if it differs: the parent's state holds other canaries.
    """
    path = parent / COINS
    if not isinstance(audit, Canaries):
        require(not path.exists(), f"fork={fork}", "the state of the parent holds canaries", "Use the parent's audit=canaries")
        return
    known = read_json(path) if path.exists() else {"gradients": 0, "coins": []}
    coins = known.get("coins")
    is_same = isinstance(coins, list) and (known.get("gradients"), len(coins)) == (audit.gradients, audit.count)
    require(is_same, f"fork={fork}", "the parent's canaries differ from the canaries of this audit", "Use the parent's audit")


def canary_tokens(manifest: Manifest, count: int, generator: np.random.Generator) -> Int[np.ndarray, "S ..."]:
    """Returns [CLS], uniform random ordinary tokens and [SEP] for every text of a row: only memorisation helps to guess them."""
    special = (manifest.pad_id, manifest.unk_id, manifest.cls_id, manifest.sep_id, manifest.mask_id)
    ordinary = np.setdiff1d(np.arange(manifest.ids_in_use), special)
    tokens = generator.choice(ordinary, (count, *manifest.schema["tokens"].shape)).astype(np.int32)
    tokens[..., 0], tokens[..., -1] = manifest.cls_id, manifest.sep_id
    return tokens


class WithCanaries(Store):
    """The rows of `store` with the places of M canaries behind them; a canary that is out is padding (`is_padding`) where it is drawn.

    If rows are drawn singly, a canary has as many places as a unit may have rows, each with the same row. Every example has the field
    `canary`: the number of a gradient canary, -1 for anything else.
    """

    def __init__(self, store: Store, planted: Planted, audit: Canaries, privacy: Privacy):
        self.folder, self.manifest, self._columns, self._store = store.folder, store.manifest, store._columns, store
        self._planted, self._each = planted, audit.places_each(privacy)
        self.first = store.population(privacy)

    def population(self, privacy: Privacy) -> int:
        return self.first + len(self._planted.is_in_M) * self._each

    def examples(
        self, split: Any, indices: Any, rows_per_example: int, width: int | None = None, epoch: int | None = None
    ) -> dict[str, np.ndarray]:
        own_n, place_n = self._apart(indices)
        own = self._store.examples(split, own_n, rows_per_example, width, epoch)
        own["canary"] = np.full(own["record"].shape, -1, np.int32)
        own.setdefault("is_padding", np.zeros(own["record"].shape, bool))
        number_n = place_n // self._each
        rows = self.canary_rows(number_n, width)
        rows |= {"record": (self._store.manifest.rows[split] + place_n).astype(np.int32)}
        canaries = rows | {"is_padding": np.zeros(len(number_n), bool)} if rows_per_example == 1 else in_units(rows, rows_per_example)
        canaries["is_padding"] = (canaries["is_padding"].T | ~self._planted.is_in_M[number_n]).T
        return {name: np.concatenate([own[name], canaries[name]]) for name in own}

    def lengths(self, split: Any, indices: Any, rows_per_example: int, epoch: int | None = None) -> Int[np.ndarray, " n"]:
        own_n, place_n = self._apart(indices)
        is_own_n, longest_n = np.asarray(indices) < self.first, np.zeros(len(indices), np.int32)
        longest_n[is_own_n] = self._store.lengths(split, own_n, rows_per_example, epoch)
        longest_n[~is_own_n] = np.where(place_n // self._each < self._planted.gradients, 2, self.manifest.sequence_length)
        return longest_n

    def _apart(self, indices: Any) -> tuple[np.ndarray, np.ndarray]:
        """Splits the requested indices into those of the store and the places of canaries."""
        wanted_n = np.asarray(indices, dtype=np.int64)
        return wanted_n[wanted_n < self.first], wanted_n[wanted_n >= self.first] - self.first

    def canary_rows(self, numbers: Int[np.ndarray, " n"], width: int | None = None) -> dict[str, np.ndarray]:
        """Returns a row for each of these canaries, in or out, with the columns of all rows; the row of a gradient canary has no text."""
        manifest, planted, schema = self.manifest, self._planted, self.manifest.schema
        rows = {name: np.zeros((len(numbers), *column.shape), column.read_as) for name, column in schema.items()}
        is_text = numbers >= planted.gradients
        sequences = numbers[is_text] - planted.gradients
        tokens = rows["tokens"]
        tokens[:] = manifest.pad_id
        tokens[..., 0], tokens[..., 1] = manifest.cls_id, manifest.sep_id
        tokens[is_text] = planted.tokens_ST[sequences]
        for name in ("length", "segment_start"):
            rows[name][:], rows[name][is_text] = 2, manifest.sequence_length
        if planted.label_S is not None:
            rows["label"][is_text] = planted.label_S[sequences]
        if "is_learnt" in rows:
            rows["is_learnt"][is_text] = 1
        rows |= {name: rows[name][..., :width] for name, column in schema.items() if column.is_text}
        own = {"record": np.zeros(len(numbers), np.int32), "canary": np.where(is_text, -1, numbers).astype(np.int32)}
        return rows | own


def in_units(rows: dict[str, np.ndarray], rows_per_example: int) -> dict[str, np.ndarray]:
    """Converts each row to a unit with this one real row: fields [n, R, ...], and `is_padding`."""
    filled = {name: np.repeat(values[:, None], rows_per_example, axis=1) for name, values in rows.items()}
    is_padding = np.broadcast_to(np.arange(rows_per_example) > 0, (len(rows["record"]), rows_per_example))
    return filled | {"is_padding": is_padding}


# The parameter of an audit's gradient canaries (`dpx.audit.canaries`), in addition to the model's parameters.
CANARIES = "canaries"

WIDTH = 100
# Every canary is this many times longer than the clipping norm, so an unclipped one shows.
LENGTH = 10.0


@dataclasses.dataclass(frozen=True)
class Audited:
    """An objective with Dirac canaries.

    `inner` is the model's objective (or nothing beside the canaries); the gradient of each of `canaries` canaries has norm `length`. Rows
    have the field `canary`: its number, or -1 for a row of the data. A canary's loss is 0, with that gradient, and no metric counts it.
    `counts` names what a step counts if there is no `inner`.
    """

    inner: Any
    canaries: int
    length: float
    counts: tuple[str, ...] = ()

    def init(self, key: Any) -> dict[str, Any]:
        table_RW = jnp.zeros((max(1, -(-self.canaries // WIDTH)), WIDTH))
        return ({} if self.inner is None else dict(self.inner.init(key))) | {CANARIES: {"table": table_RW}}

    def batch(self, key: Any, rows: dict[str, Any]) -> dict[str, Any]:
        own, rest = {"canary": jnp.asarray(rows["canary"])}, without(rows, "canary")
        return own if self.inner is None else self.inner.batch(key, rest) | own

    def losses(self, params: Any, batch: dict[str, Any], dropout_key: Any = None) -> tuple[Array, dict[str, Array]]:
        canary_B = batch["canary"]
        losses_B = jnp.zeros(len(canary_B))
        counts = dict.fromkeys(self.counts, losses_B)
        if self.inner is not None:
            losses_B, counts = self.inner.losses(without(params, CANARIES), without(batch, "canary"), dropout_key)
        is_canary_B = canary_B >= 0
        row_BW = lookup(params[CANARIES]["table"], jnp.maximum(canary_B, 0)[:, None] // WIDTH)[:, 0]
        is_own_BW = is_canary_B[:, None] & (jnp.arange(WIDTH) == canary_B[:, None] % WIDTH)
        own_B = self.length * jnp.sum(jnp.where(is_own_BW, row_BW, 0), axis=1)
        losses_B = jnp.where(is_canary_B, own_B - jax.lax.stop_gradient(own_B), losses_B)
        return losses_B, {name: jnp.where(is_canary_B, 0, value) for name, value in counts.items()}


def audited(objective: Any, audit: Any, clipping_norm: float) -> Any:
    """Returns `objective` with the gradient canaries that `audit` declares, or unchanged without canaries."""
    return Audited(objective, audit.gradients, LENGTH * clipping_norm) if isinstance(audit, Canaries) else objective


def without(tree: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the dict without the entry `name`."""
    return {key: value for key, value in tree.items() if key != name}
