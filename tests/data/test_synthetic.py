import numpy as np
import pytest
from scipy.special import entr

from dpx.data.declared_data import Synthetic
from dpx.data.embedded import SyntheticSource, best_masked_loss, transition, words
from dpx.data.tokenizer import fit, tokenizer_of

DECLARED = Synthetic(documents=60, words_per_document=600, states=16)


def walk() -> np.ndarray:
    number = {word: state for state, word in enumerate(words(DECLARED.states, DECLARED.seed))}
    return np.array(
        [[number[word] for line in document.paragraphs for word in line.split()] for document in SyntheticSource(DECLARED).documents()]
    )


def masked_posterior(chain_SS: np.ndarray, states_W: np.ndarray, is_masked_W: np.ndarray) -> np.ndarray:
    """P(word at w | every word that is not masked), float64[W, S], by the forward-backward recursion.

    The mean of -log of its entries at the masked words is what no model can beat on this text, whatever the masks.
    """
    size, length = len(chain_SS), len(states_W)
    seen_WS = np.where(is_masked_W[:, None], 1.0, np.eye(size)[states_W])
    forward_WS = np.empty((length, size))
    backward_WS = np.ones((length, size))
    forward_WS[0] = seen_WS[0] / size  # a declared chain is uniform in the long run
    for place in range(1, length):
        forward_WS[place] = (forward_WS[place - 1] @ chain_SS) * seen_WS[place]
        forward_WS[place] /= forward_WS[place].sum()
    for place in range(length - 2, -1, -1):
        backward_WS[place] = chain_SS @ (seen_WS[place + 1] * backward_WS[place + 1])
        backward_WS[place] /= backward_WS[place].sum()
    posterior_WS = forward_WS * backward_WS
    return posterior_WS / posterior_WS.sum(axis=1, keepdims=True)


def test_words_follow_the_declared_chain():
    states = walk()
    counts = np.zeros((16, 16))
    np.add.at(counts, (states[:, :-1].ravel(), states[:, 1:].ravel()), 1)
    np.testing.assert_allclose(counts / counts.sum(axis=1, keepdims=True), transition(DECLARED), atol=0.04)


def test_the_best_loss_is_what_the_true_posterior_reaches():
    """Every seventh word masked, so that both neighbours of each are seen."""
    chain = transition(DECLARED)
    states = walk()
    is_masked = np.arange(600) % 7 == 3
    losses = [-np.log(masked_posterior(chain, line, is_masked)[is_masked, line[is_masked]]) for line in states]
    error = np.std(losses) / np.sqrt(np.size(losses))
    assert abs(np.mean(losses) - best_masked_loss(chain)) < 4 * error < 0.1


def test_hiding_neighbours_costs():
    chain = transition(DECLARED)
    states = walk()[:20]
    is_masked = np.random.default_rng(0).random((20, 600)) < 0.4
    losses = [
        -np.log(masked_posterior(chain, line, hidden)[hidden, line[hidden]]).mean() for line, hidden in zip(states, is_masked, strict=True)
    ]
    assert best_masked_loss(chain) < np.mean(losses) < np.log(16)
    next_loss = entr(chain).sum(axis=1).mean()
    assert best_masked_loss(chain) < next_loss, "a masked word has two neighbours, the next one a single one"


def test_a_coin_has_the_losses_of_a_coin():
    fair = np.full((2, 2), 0.5)
    assert best_masked_loss(fair) == pytest.approx(np.log(2))
    sticky = np.array([[0.9, 0.1], [0.1, 0.9]])
    # By Bayes: the two neighbours agree with chance .82, and then the middle is theirs with chance .81/.82; else it is even.
    middle = -(0.81 * np.log(0.81 / 0.82) + 0.01 * np.log(0.01 / 0.82)) + 0.18 * np.log(2)
    assert best_masked_loss(sticky) == pytest.approx(middle)


def test_a_document_does_not_depend_on_how_many_there_are():
    many, few = (list(SyntheticSource(Synthetic(documents=n, words_per_document=30, states=16)).documents()) for n in (9, 4))
    assert many[:4] == few


def test_every_word_becomes_one_piece():
    documents = list(SyntheticSource(DECLARED).documents())
    tokenizer = tokenizer_of(fit((line for document in documents for line in document.paragraphs), 256))
    assert all(len(tokenizer.encode(word, add_special_tokens=False).ids) == 1 for word in words(DECLARED.states, DECLARED.seed))
