"""What is learnt, as declared: masked words, with or without the next-sentence head."""

import math
from typing import Literal

from dpx.declaration import declaration, require


@declaration
class MaskedLanguageModel:
    """BERT pre-training: mean cross-entropy over an example's masked slots (+ next-sentence cross-entropy, weight 1).

    At most `masked_slots` positions, `masking_rate` of the real tokens, are predicted. `masking="bert"` replaces them by
    80 % [MASK], 10 % random, 10 % unchanged (Devlin et al. 2019); `"always_mask"` by [MASK] alone.
    """

    next_sentence: bool
    masked_slots: int = 20
    masking_rate: float = 0.15
    masking: Literal["bert", "always_mask"] = "bert"
    name: Literal["mlm"] = "mlm"

    def __post_init__(self) -> None:
        require(self.masked_slots > 0, f"task.masked_slots={self.masked_slots}", "nothing would be predicted", "Give a positive number")
        require(0 < self.masking_rate < 1, f"task.masking_rate={self.masking_rate}", "not a rate", "Use a value between 0 and 1")

    def slots(self, sequence_length: int) -> int:
        """Slots a row of that length can use: what arrays are made for."""
        return min(self.masked_slots, max(1, math.ceil(self.masking_rate * sequence_length)))


Task = MaskedLanguageModel
