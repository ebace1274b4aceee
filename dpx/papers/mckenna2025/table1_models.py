"""McKenna et al. 2025, Tables 1, 2 and 4: the parameters that are printed of the same models, beside exact counts."""

from collections.abc import Mapping, Sequence

from dpx.declaration import declaration
from dpx.table import Table


@declaration
class MckennaTable1Models:
    """`table_1` and `table_4` by model option, as printed; counts are of our encoder with a masked-LM head, tied and untied."""

    table_1: Mapping[str, float]
    table_4: Mapping[str, float]
    vocabulary_sizes: Sequence[int]

    def __call__(self) -> list[Table]:
        from dpx.config import recipes

        rows = []
        for name, printed in self.table_1.items():
            model = recipes.option("model", name)
            for vocabulary in self.vocabulary_sizes:
                tied = model.parameters(vocabulary)
                both = model.parameters(vocabulary, next_sentence=True)
                shape = (name, vocabulary, model.layers, model.heads, model.width)
                rows.append((*shape, printed, self.table_4[name], tied, both, tied + vocabulary * model.width, tied / self.table_4[name]))
        columns = (
            "model",
            "vocabulary",
            "layers",
            "heads",
            "width",
            "table_1",
            "table_4",
            "exact",
            "with_next_sentence",
            "untied",
            "ratio",
        )
        notes = (
            "Mega is printed as 778M in Table 1, 729M in Table 4 and 784M in the text; untied, it would be near the larger two",
            "Small is printed with 4 heads, the released model has 8; the count is the same. The vocabulary is not stated",
        )
        return [Table("models", columns, tuple(rows), "printed parameters beside exact counts", notes)]
