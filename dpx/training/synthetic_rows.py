"""Rows of random tokens in a store's form, for probes and benchmarks: nothing about protected text is in them."""

import numpy as np

from dpx.task.declarations import Classification, MultipleChoice, Task


def synthetic_rows(task: Task, examples: int, sequence_length: int, vocabulary_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """`examples` rows of which most are full and some half empty; ids are drawn by a power law, so tokens repeat as words do.

    A task of choices has that many texts in a row; one with labels has labels, which nothing in the text tells.
    """
    drawn = np.random.default_rng(seed)
    texts = (examples, task.choices) if isinstance(task, MultipleChoice) else (examples,)
    length = drawn.integers(sequence_length // 2, sequence_length + 1, texts)
    length = np.where(drawn.random(texts) < 0.7, sequence_length, length).astype(np.int32)
    tokens = np.minimum(5 + drawn.zipf(1.2, (*texts, sequence_length)), vocabulary_size - 1)
    rows = {
        "tokens": np.where(np.arange(sequence_length) < length[..., None], tokens, 0).astype(np.int32),
        "segment_start": (length // 2).astype(np.int32),
        "length": length,
        "is_next": drawn.integers(0, 2, examples).astype(np.int32),
        "record": np.arange(examples, dtype=np.int32),
    }
    if isinstance(task, Classification | MultipleChoice):
        rows["label"] = drawn.integers(0, task.labels, examples).astype(np.int32)
    return rows
