"""Tests a whole trade-off curve by one run: the f-DP argument of Mahloujifar, Melis and Chaudhuri 2024, for fair coins.

Let a mechanism be f-DP, F = 1 - f (concave, increasing), and let an attacker guess exactly r of m independent fair coins, N of
them correctly, with p_n = P[N = n]. Then, for every c >= 1,

    (1/m) sum_{n >= c} n p_n  <=  F((1/m) sum_{n >= c-1} (r - n) p_n).                                   (*)

Proof. Fix i and the other coins; the mechanism is f-DP in coin i. Let E be "coin i is guessed in, and at least c - 1 others
correctly": P[E | in] <= F(P[E | out]), and likewise with in and out exchanged. The mean of both over the coin, by concavity, is
P[i correct, others >= c-1] <= F(P[i wrong, others >= c-1]), and again the mean over i and the other coins, abstentions counting
zero on both sides. If i is correct, others >= c-1 says N >= c; if wrong, it says N >= c-1. Summing over i counts n, and r - n.

Given P[N >= v] = tau, the least total mass that satisfies (*) is found greedily from v down: mass moved from n to n - 1
loosens every constraint below and tightens none, so all of tau lies at v and each p_{c-1} is just what (*) asks for. Where
that total exceeds 1, P[N >= v] < tau: v correct guesses then refute f at error tau.
"""

import math
from collections.abc import Callable

from scipy.special import ndtr, ndtri

from dpx.audit.one_run import Guesses, largest_refuted
from dpx.privacy import closed_form

# F's inverse: the least false-positive rate at which a true-positive rate can be reached.
Inverse = Callable[[float], float]


def gaussian(mu: float) -> Inverse:
    """Returns the inverse of the curve of mu-GDP, F(x) = Phi(Phi^-1(x) + mu) (Dong, Roth and Su 2022)."""
    return lambda rate: float(ndtr(ndtri(rate) - mu))


def approximate(epsilon: float, delta: float) -> Inverse:
    """Returns the inverse of the curve of (epsilon, delta)-DP, F(x) = min(delta + e^eps x, 1 - e^-eps (1 - delta - x))."""
    factor = math.exp(epsilon)
    return lambda rate: max(0.0, (rate - delta) / factor, 1 - delta - (1 - rate) * factor)


def refutes(guesses: Guesses, inverse: Inverse, error: float) -> bool:
    """Returns whether as many correct guesses have probability below `error` under every mechanism with this curve."""
    m, r = guesses.canaries, guesses.guesses
    total = error
    correct, wrong = guesses.correct * error, (r - guesses.correct) * error
    for c in range(guesses.correct, 0, -1):
        asked = m * inverse(min(1.0, correct / m))
        if asked > wrong:
            added = (asked - wrong) / (r - c + 1)
            total, correct, wrong = total + added, correct + (c - 1) * added, asked
            if total > 1:
                return True
    return False


def epsilon_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
    """Returns a lower bound that is at most the true epsilon at `delta` with probability at least 1 - error."""
    return largest_refuted(lambda epsilon: refutes(guesses, approximate(epsilon, delta), error))


def mu_lower_bound(guesses: Guesses, error: float) -> float:
    """Returns a lower bound that is at most the true mu of a mu-GDP mechanism with probability at least 1 - error."""
    return largest_refuted(lambda mu: refutes(guesses, gaussian(mu), error), largest=10.0)


def gaussian_epsilon_lower_bound(guesses: Guesses, delta: float, error: float) -> float:
    """Returns epsilon at `delta` of `mu_lower_bound`: a bound only for mechanisms whose privacy curve is Gaussian."""
    mu = mu_lower_bound(guesses, error)
    return max(0.0, closed_form.epsilon(mu, delta) - 1e-6) if mu else 0.0
