"""Where measurements go: TensorBoard and one JSON line per step, both private: they depend on the data without noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter


class MetricsWriter:
    """Appends scalars to `private/tensorboard` and `private/metrics.jsonl`; steps from `first_step` on are written anew."""

    def __init__(self, private: Path, first_step: int):
        self._path = private / "metrics.jsonl"
        self._keep_before(first_step)
        self._file = open(self._path, "a")
        self._writer = SummaryWriter(str(private / "tensorboard"), purge_step=first_step or None)

    def _keep_before(self, first_step: int) -> None:
        """A replayed step is measured again; a line cut short by a kill is dropped with it."""
        if not self._path.exists():
            return
        lines = [line for line in self._path.read_text().splitlines() if line.endswith("}")]
        kept = [line for line in lines if json.loads(line)["step"] < first_step]
        self._path.write_text("".join(line + "\n" for line in kept))

    def describe(self, config_yaml: str, hparams: dict[str, Any]) -> None:
        """The resolved config as text and the swept knobs as hparams."""
        self._writer.add_text("config", f"```yaml\n{config_yaml}\n```")
        self._writer.add_text("hparams", "\n".join(f"- {key}: {value}" for key, value in hparams.items()))

    def hparams(self, hparams: dict[str, Any], results: dict[str, float]) -> None:
        """The row of TensorBoard's HParams table, once results exist."""
        self._writer.add_hparams(hparams, results, name="hparams")

    def write(self, step: int, scalars: dict[str, Any]) -> None:
        """One step's scalars; vectors (one value a layer) become `name/layer_00`, ..."""
        flat = {}
        for name, value in scalars.items():
            array = np.asarray(value, np.float64)
            if array.ndim == 0:
                flat[name] = float(array)
            else:
                flat |= {f"{name}/layer_{index:02d}": float(part) for index, part in enumerate(array)}
        for name, value in flat.items():
            self._writer.add_scalar(name, value, step)
        self._file.write(json.dumps({"step": step, **flat}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._writer.close()
        self._file.close()
