"""Makes choices by a keyed hash: a choice for one unit does not depend on the rest of the corpus."""

import hashlib
import random
from typing import Literal

Split = Literal["protected", "heldout", "public", "test"]
# The splits that a hash of the unit decides; a test set is a split only if its files are declared.
SPLITS: tuple[Split, ...] = ("protected", "heldout", "public")


class KeyedHash:
    """Computes 128-bit keyed hashes (BLAKE2b) of texts, with a key made from the configuration's salt."""

    def __init__(self, salt: str):
        self._key = hashlib.sha256(salt.encode()).digest()

    def number(self, purpose: str, *parts: str | int) -> int:
        """Returns a number in [0, 2^128) that depends on the salt, the purpose and every part; each part is preceded by its length."""
        state = hashlib.blake2b(digest_size=16, key=self._key)
        for part in (purpose, *parts):
            encoded = str(part).encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "little") + encoded)
        return int.from_bytes(state.digest(), "little")

    def fraction(self, purpose: str, *parts: str | int) -> float:
        """Returns a number in [0, 1) that depends on the salt, the purpose and every part."""
        return (self.number(purpose, *parts) >> 75) / (1 << 53)

    def draws(self, purpose: str, *parts: str | int) -> random.Random:
        """Returns a separate random generator for these parts.

        Use `.random()` alone, whose stream Python promises to keep between versions.
        """
        return random.Random(self.number(purpose, *parts))

    def split(self, unit_id: str, *, public_fraction: float, heldout_fraction: float) -> Split:
        """Returns the split that holds every document of a unit."""
        place = self.fraction("split", unit_id)
        if place < public_fraction:
            return "public"
        return "heldout" if place < public_fraction + heldout_fraction else "protected"
