"""The rounding margin: examples are clipped to C (1 - m), not C, so that no rounding carries one beyond the clipping norm C.

Noise stays at sigma C. What an example adds to the sum is an array v of float32 numbers, and the claim is |v| <= C in exact
arithmetic on them. Activations A and cotangents G count as they are stored, in whatever type; norms, weights, c G and its
contraction with A are float32, so a model that computes in bfloat16 loses nothing after them.

Let u = 2^-24 and h the longest chain of additions in any reduction the compiler makes, so that a computed sum of products is
within h u of the exact one, relative to the sum of magnitudes (Higham 2002, chapters 3 and 4). For a weight with gradient
g = A^T G = sum_t A_t G_t let M = sum_t |A_t| |G_t|; for leaves whose gradient is formed, M = |g|. Over all weights, with n the
computed norm and K^2 = sum M^2 / n^2:

    norm           |n^2 - |g|^2| <= 3 h u K^2 n^2        two Gram products and the sum over pairs of tokens
    weight         c <= (1 + 3 u) C (1 - m) / n          root, maximum, quotient
    contribution   |v - c g| <= (h + 1) u c K n          c G is rounded once, then contracted

    |v| <= C (1 - m) (1 + 3 u) (sqrt(1 + 3 h u K^2) + (h + 1) u K) <= C   if   m >= 1.5 h u K^2 + (h + 1) u K + 3 u.

So m = 2^-10 is enough for K^2 <= 160 at h = 64. K measures cancellation: it is 1 where norms come from kept gradients, and K^2 is at
most the number of tokens where these are uncorrelated. Gram products centre A, so that the tokens' mean does not count in M. Beyond
that K nothing is proved: tests/clipping/test_rounding.py measures flat and mixed inputs. Where next to all of a gradient cancels (K above
a thousand: x and -x + 3e-4 e through one weight), a Gram norm may come out far too small, or zero; `clipping=vmap` does not take Grams.

In bfloat16 two activations (after GELU, after a LayerNorm) are recomputed when the sum is taken, by the same float32 expression and the
same rounding as for the norm. Two compilations may differ in its last float32 bit, and then a number on the edge is rounded to its
other neighbour, 2^-8 away: m is 2^-8 there.

Ghost clipping computes all activations and cotangents a second time, and that pass may be compiled, and so rounded, differently:
nothing is proved for it. Measured in bfloat16: up to 4.3e-4 of C beyond C (1 - m), a ninth of m.
"""

MARGINS = {"float32": 2.0**-10, "bfloat16": 2.0**-8}
