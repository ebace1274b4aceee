"""Makes the objective of a task for a model; no other module knows which module belongs to which declaration.

An objective has `init(key) -> params`, `batch(key, rows) -> batch` (rows as a store gives them: the task's `columns`, and `record`),
`losses(params, batch, dropout_key) -> (losses_B, counts)`: the task's `counts`, one value an example, and `answers(batch)`.
"""

from dpx.models.model_protocol import ExampleModel
from dpx.models.rotary import RotaryDecoder
from dpx.models.shape import AnyModel, Bert, Decoder
from dpx.task import causal_lm, classification, mlm, one_example
from dpx.task.declared_task import CausalLanguageModel, Classification, MaskedLanguageModel, MultipleChoice, Task
from dpx.task.mlm import Marks
from dpx.task.task_protocol import Objective, PackageTask


def objective(model: AnyModel, task: Task, vocabulary_size: int, special: Marks) -> Objective:
    """Returns the objective of `task` for `model`; `special` is any object with the five ids, such as a store's manifest.

    Raises `ConfigError` if task and model do not fit.
    """
    task.parameter_shapes(model, vocabulary_size)
    if isinstance(task, PackageTask):
        return task.objective(model, vocabulary_size, special)
    match model, task:
        case ExampleModel(), _:
            return one_example.objective(model, task, vocabulary_size, special)
        case Bert(), MaskedLanguageModel():
            return mlm.objective(model, task, vocabulary_size, special)
        case Decoder() | RotaryDecoder(), CausalLanguageModel():
            return causal_lm.Objective(model, task, vocabulary_size)
        case _, Classification() | MultipleChoice():
            return classification.Objective(model, task, vocabulary_size)
    raise TypeError(f"{type(task).__name__} of {type(model).__name__}")
