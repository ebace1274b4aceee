"""Rows of random tokens in a store's form, for probes and benchmarks: they hold no information about protected text."""

import numpy as np

from dpx.task.declarations import Task


def synthetic_rows(task: Task, examples: int, sequence_length: int, vocabulary_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """`examples` rows of the columns that `task` reads; most rows are full and some half empty. Ids are drawn by a power law, so
    tokens repeat as words do. The text is independent of the label.
    """
    drawn = np.random.default_rng(seed)
    columns = task.columns(sequence_length, vocabulary_size)
    texts = (examples, *columns["length"].shape)
    length = drawn.integers(sequence_length // 2, sequence_length + 1, texts)
    length = np.where(drawn.random(texts) < 0.7, sequence_length, length).astype(np.int32)
    tokens = np.minimum(5 + drawn.zipf(1.2, (*texts, sequence_length)), vocabulary_size - 1)
    tokens = np.where(np.arange(sequence_length) < length[..., None], tokens, 0).astype(np.int32)
    rows = {"tokens": tokens, "segment_start": (length // 2).astype(np.int32), "length": length}
    rows = {name: values for name, values in rows.items() if name in columns}
    for name, column in columns.items():
        if name not in rows:
            rows[name] = drawn.integers(0, column.below or 2, (examples, *column.shape)).astype(column.read_as)
    return rows | {"record": np.arange(examples, dtype=np.int32)}
