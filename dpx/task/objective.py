"""The runtime of a task for a model: the one place that knows which module belongs to which declaration.

An objective has `init(key) -> params`, `batch(key, rows) -> batch` (rows as a store gives them: the task's `columns`, and `record`),
`losses(params, batch, dropout_key) -> (losses_B, counts)`: the task's `counts`, one value an example, and `answers(batch)`.
"""

from dpx.models.shape import Bert, Decoder, Model
from dpx.task import causal_lm, classification, mlm
from dpx.task.declarations import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
from dpx.task.masking import SpecialIds

Objective = mlm.Objective | causal_lm.Objective | classification.Objective


def objective(model: Model, task: Task, vocabulary_size: int, special: SpecialIds) -> Objective:
    """`special` is anything with the five ids, such as a store's manifest. Raises `Refused` where task and model do not fit."""
    task.parameter_shapes(model, vocabulary_size)
    match model, task:
        case Bert(), MaskedLanguageModel():
            return mlm.objective(model, task, vocabulary_size, special)
        case Decoder(), CausalLanguageModel():
            return causal_lm.Objective(model, task, vocabulary_size)
        case _, Classification() | MultipleChoice():
            return classification.Objective(model, task, vocabulary_size)
    raise TypeError(f"{type(task).__name__} of {type(model).__name__}")
