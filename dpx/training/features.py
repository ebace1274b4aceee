"""Computes features, the output of a frozen encoder for each text, once for all steps.

Steps read them in place of texts if only the head is trained.

Features of protected rows are as secret as the rows: they are under `private/` while the run continues, and are deleted at its end. Lost
or damaged features are computed again; if their last bits then differ, a replayed step detects a different sum (`dpx.training.loop`).

Shape legend: N rows of the protected split, B rows at once.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from dpx import durable
from dpx.console import stage
from dpx.data.store import Store
from dpx.durable import draft_of, make_private, write_durably
from dpx.files.array_checksums import checksums
from dpx.processes import team
from dpx.task.task_protocol import TwoPartObjective
from dpx.training import sharding
from dpx.training.evaluation import BATCH_ROWS, HeldOut, in_batches

FOLDER = "features"
_ARRAY, _ABOUT = "features.npy", "features.json"
# The fields of a row of text (dpx.data.schema); features replace them.
TEXT = ("tokens", "segment_start", "length")
_MASK_KEY = np.zeros(2, np.uint32)  # These objectives draw nothing.


class WithFeatures(Store):
    """The rows of `store` with `features` (float32 [..., H]) in place of the text of its protected rows; other splits are unchanged."""

    def __init__(self, store: Store, features_N: np.ndarray):
        self.folder, self.manifest, self._columns = store.folder, store.manifest, store._columns
        self._features_N = features_N

    @property
    def holds_text(self) -> bool:
        return False

    def rows(self, split: Any, indices: Any, width: int | None = None) -> dict[str, np.ndarray]:
        if split != "protected":
            return super().rows(split, indices, width)
        of_text = super().rows(split, indices, 1)
        rest = {name: values for name, values in of_text.items() if name not in TEXT}
        return rest | {"features": np.asarray(self._features_N[of_text["record"]])}

    def lengths(self, split: Any, indices: Any, rows_per_example: int, epoch: int | None = None) -> np.ndarray:
        """Returns the shortest width for all rows, since nothing is padded."""
        return np.zeros(len(indices), np.int32)


def are_constant(objective: Any, trained: Any) -> TypeGuard[TwoPartObjective]:
    """Returns whether each step would compute the same features again.

    That is so if the tree `trained` has no parameter below the head, and dropout is not applied there.
    """
    is_head_alone = not {"embeddings", "layers"} & set(trained)
    return is_head_alone and isinstance(objective, TwoPartObjective) and objective.has_constant_features


def in_place_of_texts(
    objective: Any, trained: Any, frozen: Any, store: Store, heldout: HeldOut, widths: Sequence[int], mesh: Any, private: Path
) -> tuple[Store, HeldOut]:
    """Returns `store` and `heldout` with features in place of texts if each step would compute the same features, else unchanged."""
    if not team().is_alone or not are_constant(objective, trained):
        return store, heldout
    stage("reading every text once: the head alone is trained")
    return of_store(objective, frozen, store, widths, mesh, private), of_heldout(objective, frozen, heldout)


def of_store(objective: TwoPartObjective, frozen: Any, store: Store, widths: Sequence[int], mesh: Any, private: Path) -> WithFeatures:
    """Returns `store` with the features of its protected rows.

    They are read from `private/features` if they are complete, else computed with `frozen`, the frozen parameters below the head, on the
    devices of `mesh`.
    """
    folder = private / FOLDER
    made_from = {"store": store.manifest.checksum} | checksums({"encoder": frozen})
    known = _known(folder, made_from)
    if known is None:
        _compute(objective, frozen, store, widths, mesh, folder)
        write_durably(folder / _ABOUT, json.dumps(_about(folder, made_from)))
        known = _known(folder, made_from)
        assert known is not None
    return WithFeatures(store, known)


def of_heldout(objective: TwoPartObjective, frozen: Any, heldout: HeldOut) -> HeldOut:
    """Returns the metrics of the same rows from features, which are computed here once and kept in memory."""
    read = _reader(objective)
    batches = [
        ({name: values for name, values in rows.items() if name not in TEXT} | {"features": np.asarray(read(frozen, rows))}, is_padding_B)
        for rows, is_padding_B in heldout.batches
    ]
    return dataclasses.replace(heldout, batches=batches)


def remove(private: Path) -> None:
    """Deletes the features of a run that has ended."""
    shutil.rmtree(private / FOLDER, ignore_errors=True)


def _known(folder: Path, made_from: dict[str, str]) -> np.ndarray | None:
    """Returns the features in `folder`, memory-mapped.

    It returns `None` if they are incomplete, or were made from other rows or by another encoder.
    """
    try:
        about = json.loads((folder / _ABOUT).read_text())
        if about != _about(folder, made_from):
            return None
        return np.load(folder / _ARRAY, mmap_mode="r")
    except (OSError, ValueError):
        return None


def _about(folder: Path, made_from: dict[str, str]) -> dict[str, Any]:
    return made_from | durable.of_file(folder / _ARRAY)


def _reader(objective: TwoPartObjective) -> Callable[[Any, dict[str, Any]], Any]:
    """Returns a jitted function from the frozen parameters and rows of text to features, in float32, which holds every narrower type."""
    return jax.jit(lambda params, rows: objective.features(params, objective.batch(_MASK_KEY, rows)).astype(np.float32))


def _compute(objective: TwoPartObjective, frozen: Any, store: Store, widths: Sequence[int], mesh: Any, folder: Path) -> None:
    """Computes and writes the features of every protected row, in batches of one shape for each width."""
    count = store.manifest.rows["protected"]
    read = _reader(objective)
    over_devices = NamedSharding(mesh, P(sharding.EXAMPLE_AXES))
    at_once = BATCH_ROWS * mesh.shape["data"] * mesh.shape["fsdp"]
    features_N: np.ndarray | None = None
    # A killed process may have left a draft, as large as all features.
    shutil.rmtree(folder, ignore_errors=True)
    make_private(folder)
    with draft_of(folder / _ARRAY) as draft:
        for rows, is_padding_B in in_batches(store, "protected", count, at_once, widths):
            found_B = np.asarray(read(frozen, jax.device_put(rows, over_devices)))
            if features_N is None:
                features_N = np.lib.format.open_memmap(draft, "w+", np.float32, (count, *found_B.shape[1:]))
            features_N[rows["record"][~is_padding_B]] = found_B[~is_padding_B]
        assert isinstance(features_N, np.memmap)
        features_N.flush()
