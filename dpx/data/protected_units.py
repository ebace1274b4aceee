"""Says what the protected units of declared data are, and whether charges on two data sets are about the same unit."""

import dataclasses
import json
from typing import Any

from dpx.data.declared_data import Data, Vocabulary
from dpx.privacy.declared_privacy import OF_PRIVACY, OF_SPLITS, Privacy, UnitFacts
from dpx.privacy.origins import WEAKER, Origin


def unit_facts(data: Data, privacy: Privacy, manifest: Any = None) -> UnitFacts:
    """Returns the record of a run on `data`; `manifest` belongs to its prepared store, `None` before preparation.

    Two runs must agree on the whole definition of one protected unit to be charged together.
    """
    source = dataclasses.asdict(data)["source"]
    names = {"kind", "text_field", "pair_field", "choices_field", "label_field", "unit_field", "document_per"}
    # Which settings of another package's source identify documents is not known here, so all of them must agree.
    is_own = type(data.source).__module__.partition(".")[0] == "dpx"
    fields = {name: value for name, value in source.items() if name in names or not is_own}
    fields |= {} if is_own else {"kind": f"{type(data.source).__module__}.{type(data.source).__qualname__}"}
    corpora = [{name: value for name, value in corpus.items() if name in names} for corpus in source.get("corpora", ())]
    definition: dict[str, Any] = {"unit": privacy.unit, "documents": fields | ({"corpora": corpora} if corpora else {})}
    if privacy.unit == "row":
        definition["rows"] = {name: getattr(data, name) for name in ("sequence_length", "pairs", "short_sequence_rate", "split_salt")}
        definition["rows"] |= {} if data.cuts is None else {"cuts": data.cuts}
        definition["rows"] |= {} if data.repeats == 1 else {"repeats": data.repeats}
    return UnitFacts(
        **{name: getattr(privacy, name) for name in OF_PRIVACY},
        **{name: getattr(data, name) for name in OF_SPLITS},
        definition=json.loads(json.dumps(definition)),
        vocabulary_source=vocabulary_source(data.vocabulary, manifest),
        vocabulary_sha256=None if manifest is None else manifest.vocabulary_checksum,
    )


def vocabulary_source(vocabulary: Vocabulary, manifest: Any) -> str:
    """Returns the source of a vocabulary: from the prepared store, or else from the declaration."""
    if manifest is not None:
        return manifest.vocabulary_source
    if vocabulary.fit_on == "protected":
        return "protected"
    return "file" if vocabulary.path else "public_split"


def unit_mismatch(origin: Origin, data: Data, privacy: Privacy, is_same_data: bool) -> str | None:
    """Returns the reason, as text, why the charges of `origin` cannot be added to those of a run on `data`.

    It is `None` if they can or need not be.

    Events of two runs compose for one unit: both runs must define it, cut it into rows and protect it in a split in the same way. The
    maximum number of rows per unit may differ, and so may what a step draws: each event is valid for the part of the unit that its run
    kept.
    """
    if not origin.is_composed or origin.reasons:
        return None
    ours = unit_facts(data, privacy)
    theirs = origin.claim.units
    if theirs is None:
        return f"the unit that {origin.name} protects is not recorded"
    # Reading the weights checks that the vocabularies are the same; another check excludes one learnt from protected text.
    alike = {name: getattr(ours, name) for name in ("unit_mode", "rows_per_unit_max", "vocabulary_source")} | {"vocabulary_sha256": ""}
    alike |= {"adjacency": ours.adjacency} if (theirs.adjacency, ours.adjacency) == WEAKER else {}
    differing = dataclasses.replace(theirs, **alike).differences(dataclasses.replace(ours, vocabulary_sha256=""))
    if differing:
        return f"{origin.name} protects another unit than this run: {'; '.join(differing)} differ"
    if privacy.unit == "row" and data.pairs == "cross_document" and not is_same_data:
        return f"a row of this run holds text of two documents, and {origin.name} may have paired documents differently"
    return None
