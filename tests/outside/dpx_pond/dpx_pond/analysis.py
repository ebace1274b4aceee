"""`analysis=ripples`: how often an echo is heard."""

from dpx.declaration import declaration
from dpx.pages.analysis_tables import Table


@declaration
class Ripples:
    """Noise multipliers of the two releases of `mechanism=echo`, for each of the mean's."""

    noise_multipliers: tuple[float, ...] | list[float]

    def __call__(self) -> list[Table]:
        rows = tuple((z, 2**0.5 * z) for z in self.noise_multipliers)
        return [Table("ripples", ("of the mean", "of each release"), rows, "noise multipliers of an echo")]
