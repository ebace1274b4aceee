"""What a graph of runs reveals, decided from the graph alone: the oracle that dpx's claims are held against. It imports nothing of dpx.

A node reads its text in up to three ways: with noise (a private run), without noise (a run without privacy), and for a vocabulary that it
fits. What it reads flows into its weights, and over `weights` and `words` into later nodes. A word that two texts share no unit (`apart`)
is true in every graph here. `leaks` believes every word in the graph, so it is the least that must be said; `proves` believes those of the
node itself alone, and takes a private node without a guarantee as a leak of what it read.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Literal

import dp_accounting
from dp_accounting.rdp import RdpAccountant


@dataclasses.dataclass(frozen=True)
class Node:
    """One run, or one preparation of a text; `weights` and `words` are numbers of earlier nodes."""

    kind: Literal["private", "bare", "prepare"]
    text: int
    salt: str
    length: int
    fit: Literal["public", "protected"] | None
    weights: int | None
    words: int | None
    apart: frozenset[int]
    steps: int
    noise_multiplier: float
    weights_by: Literal["folder", "release"]
    words_by: Literal["store", "kept", "export"]
    # Chosen by measured runs of which nothing is known, or with noise that anybody can draw again.
    fault: Literal["table", "seed"] | None = None


Graph = Sequence[Node]


def fitted_by(graph: Graph, number: int) -> int:
    """The node that fitted the vocabulary of a node."""
    words = graph[number].words
    return number if words is None else fitted_by(graph, words)


def trained_before(graph: Graph, number: int) -> list[int]:
    """The nodes whose weights flow into those of a node, itself included."""
    weights = graph[number].weights
    return [number, *([] if weights is None else trained_before(graph, weights))]


def leaks(graph: Graph, own: int, seen: Iterable[int]) -> bool:
    """Whether rows that `own` protects reach the releases `seen` without noise."""
    return bool(_without_noise(graph, own, set(seen), lambda one: not _are_apart(graph, own, one)))


def mixes_units(graph: Graph, own: int, seen: Iterable[int]) -> bool:
    """Whether steps that protect other units than those of `own` would have to be added to its own."""
    trained = {before for each in seen for before in trained_before(graph, each)} - {own}
    sharing = [one for one in trained if graph[one].kind == "private" and not _are_apart(graph, own, one)]
    return any(_units(graph, own) != _units(graph, one) for one in sharing)


def _units(graph: Graph, number: int) -> tuple[int, str]:
    return graph[number].length, graph[number].salt


def proves(graph: Graph, own: int, seen: Iterable[int]) -> bool:
    """Whether the words of `own` suffice to show that it has a guarantee."""
    seen = set(seen)
    shares = lambda one: one != own and not _says(graph, own, one)  # noqa: E731
    if _without_noise(graph, own, seen, lambda one: one == own or shares(one)):
        return False
    for one in {before for each in seen for before in trained_before(graph, each)} - {own}:
        if graph[one].kind == "private" and shares(one):
            if _units(graph, one) != _units(graph, own):
                return False
            if not proves(graph, one, [one]):
                return False
    return True


def epsilon(graph: Graph, own: int, seen: Iterable[int], sampling: dict[int, float], delta: float, is_least: bool) -> float:
    """Epsilon of what was read with noise, by all words of the graph (`is_least`) or by those of `own`."""
    charges = collections.Counter[tuple[float, float]]()
    for one in {before for each in seen for before in trained_before(graph, each)} | {own}:
        is_apart = _are_apart(graph, own, one) if is_least else one != own and _says(graph, own, one)
        if graph[one].kind == "private" and not is_apart:
            charges[sampling[one], graph[one].noise_multiplier] += graph[one].steps
    return _composed(tuple(sorted(charges.items())), delta)


@functools.cache
def _composed(charges: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    """Epsilon of ((rate, noise multiplier), steps); the nodes of a graph have few different sums of them."""
    accountant = RdpAccountant()
    for (rate, noise_multiplier), steps in charges:
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise_multiplier)), steps)
    return accountant.get_epsilon(delta)


def _without_noise(graph: Graph, own: int, seen: set[int], shares: object) -> list[int]:
    found = []
    for one in {before for each in seen for before in trained_before(graph, each)}:
        reads_plainly = graph[one].kind == "bare" and one != own or graph[one].fault == "seed"
        # Measured runs of which nothing is known may have read any rows, whatever the nodes declare of the texts of the graph.
        if graph[one].fault == "table" or reads_plainly and shares(one):  # type: ignore[operator]
            found.append(one)
        text = fitted_by(graph, one)
        is_public_here = graph[text].fit == "public" and graph[text].salt == graph[own].salt
        if shares(text) and not is_public_here:  # type: ignore[operator]
            found.append(text)
    return found


def _says(graph: Graph, own: int, other: int) -> bool:
    return other in graph[own].apart


def _are_apart(graph: Graph, own: int, other: int) -> bool:
    """Whether somebody said that the texts of two nodes share no unit."""
    pair = {graph[own].text, graph[other].text}
    said = [{node.text, graph[one].text} for node in graph for one in node.apart]
    return len(pair) == 2 and pair in said
