"""Defines the rounding margin, and proves that no example contributes more than the clipping norm C.

An example's contribution v is the array of float32 numbers that the weighted sum gives for it where all other weights are zero. The
claim is |v| <= C in exact arithmetic on these numbers, for every input. Noise stays at sigma C. Activations A and cotangents G count as
they are stored, in whatever type. Rounding where several examples add up, in one product, over microbatches or over devices, is no
part of v.

Model. fl(x op y) = (x op y)(1 + d) + e with |d| <= u and |e| <= tiny, the smallest normal number. A computed sum of n terms is within
h u of the exact one, relative to the sum of magnitudes, where h is the largest number of roundings that one term goes through (Higham
2002, chapters 3 and 4). No order of addition has h > n. `bounds.unit`, `product_depth` and `sum_depth` give both numbers:

    u                   2^-24 for float32 factors: every product of norms and sums has precision HIGHEST, so TF32 is never used;
                        2^-23 for narrower factors, which matrix units multiply exactly and add up in float32, cut off, not rounded;
                        2^-53 for float64
    h of a product      n; rows of 8192 numbers and more are cut into blocks of 2048. A compiler for CPUs cuts into its own blocks, whose
                        size depends on shapes and caches (measured: 512, 1024, 2044, 4088 terms): nothing is taken from them
    h of another sum    on CPUs 32 for each level of a tree of windows of 32 terms (measured: 30); elsewhere n, at most 2048 (assumed)

For one weight let g = sum_t A_t G_t over the T positions of an example, alpha_t = |A_t|, gamma_t = |G_t| and M = sum_t alpha_t gamma_t.
M / |g| measures cancellation and has no limit. c is the clip weight. `Bounded` holds q, E and e with

    |g|^2 <= q + E   up to what e holds,   and   |v| <= c (sqrt(max(q + E, 0)) + e) = c n+.

kept        The gradient is formed once, squared for the norm and multiplied by c for the sum: |v| <= c (1 + u) |g|; E = e = 0. Here g is
            the gradient as it was formed. It may differ from sum_t A_t G_t by T u M, but it is what the example contributes. Methods
            vmap and traced (copies), and the ops of biases, gains and small factors, are of this kind.
recomputed  It is formed for the norm within T u M. The sum rounds c G once and each term T times more: |v - c g| <= (T + 1) u c M.
            E = 0, e = (2 T + 1) u M. A convolution is such a product: its A_t is the patch of the input at output position t.
Gram        q = sum_ts P_ts Q_ts for the computed products P_ts of rows of A and Q_ts of rows of G. P_ts is within h_p u alpha_t alpha_s,
            Q_ts within h_d u gamma_t gamma_s, and |P_ts| <= (1 + h_p u) alpha_t alpha_s bounds what the sum over pairs adds, h_s:
                E = u sum_ts [(h_p + h_s + 12) alpha_t alpha_s |Q_ts| + h_d gamma_t gamma_s |P_ts|] + 2 (h_p + h_s + 12) h_d (u M)^2.
            Rows that do not cancel have |Q_ts| far below gamma_t gamma_s, so that this is many times smaller than 3 h u M^2.
            e = (T + 1) u M for the sum, as above.
centred     A_t = A~_t + a for a stored mean a; A~_t is computed within u elementwise, s = sum_t G_t within T u sum_t gamma_t. So
            g = A~^T G + a s^T within u M~ + T u |a| sum_t gamma_t. q is the Gram form of A~ plus 2 sum_t (A~_t.a)(G_t.s) + |a|^2 |s|^2,
            whose errors are, in the same way, those of inner products of A~_t with a and of G_t with s. M <= M~ + |a| sum_t gamma_t.
                e = u ((T + 2) M~ + (2 T + 1) |a| sum_t gamma_t).
lookup      q = sum over id_t = id_s of Q_ts. With M^2 = sum over id_t = id_s of gamma_t gamma_s: E = (h_d + h_s + 12) u M^2 and
            e = (T + 1) u M, since a row of the table adds up at most T cotangents. By id, the n_r cotangents of row r are added up for the
            norm and again for the sum, as in `recomputed`: E = 0, e^2 = sum_r ((2 n_r + 1) u sum_t gamma_t)^2 over the row's positions t.
joined      A parameter's uses add up: q and E of the pieces add, with those of the products between uses, and e is the sum of the uses'
            own e, times 1 + (number of uses) / 2 for adding them up. Rounds of a loop count as positions.

in parts    Where A is bfloat16, c G is cut into two bfloat16 parts (bounds.py), which hold it within 2^-16, and the sum is that of two
            products: e has (T + 3) 2^-23 + 2^-16 in place of (T + 1) u, times 1 + 2^-6 for the magnitudes of the parts. The Gram form cuts
            the centred A~ on both sides: 3 2^-16 and two more roundings join h_p + h_s + 12. A part below the smallest normal number is
            lost: at most tiny per number, so tiny sqrt(p) alpha_s gamma_t gamma_s in a term of q, which is below 2^-24 alpha_s^2 gamma_s^2
            / 2, of which the 12 hold several, and 2^24 tiny^2 p gamma_t^2, which `norms._lost` holds. On CPUs the products are those of
            float32, within the same bounds.

Clipping uses max(q, (1 - s)^2 n+^2) in place of q, with s = `SLACK`. Over several weights squares add up, so |v|^2 = sum |v_i|^2 <=
(c n / (1 - s))^2 for the norm n that is clipped by. Root, maximum and quotient round three times:

    c <= (1 + 3 u) C (1 - m) / n,   so   |v| <= C (1 - m) (1 + r) / (1 - s) <= C   if   m >= s + r.

r <= 2^-12 holds what is left: sums of squares and row lengths (h u / 2 each, at most 2^-14), sums of error terms, sums over parts, and
terms of second order, and the two roundings of a constant factor before clipping (`groups.FactoredWeights`). With m = 2^-10 and
s = 2^-11 this is enough. Where gradients cancel little, n+ is within s of the norm and the
maximum is q itself: measured at initialisation, n+ exceeds the norm by .006, .013 and .026 % for BERT models of 32, 128 and 512 tokens,
and s is .049 %. Where they cancel, the norm that is clipped by and reported is an upper bound.

Overflow: a square or an error term that is not finite excludes the example, which then contributes exactly zero. Underflow: squares
of a gradient's own numbers lose at most their number times tiny, a norm of 1e-14 where there are 10^10. Inner products of rows of G
lose p tiny or d tiny, which the other factor may enlarge: `norms._lost` adds it, and `bounds.lengths` counts numbers whose squares are
lost. In v, c G loses at most tiny per number, 1e-12 C beside the largest A whose square is finite, for C of
`SMALLEST_CLIPPING_NORM` and more. A smaller C is refused, and an adaptive one stops there.

Measured, not proved: (1) A stack of layers recomputes two activations (after GELU, after a LayerNorm) when the sum is taken, by the
same float32 expression and the same rounding as for the norm. Two compilations may differ in its last float32 bit. In bfloat16 a number
on the edge is then rounded to its other neighbour, 2^-8 away: m is 2^-8 there. (2) Ghost clipping computes all activations and
cotangents a second time, and that pass may be compiled, and so rounded, differently. In bfloat16: up to 4.3e-4 of C beyond C (1 - m), a
ninth of m. (3) If a user-defined op returns its squared norm as an array, its gradients are assumed to be kept.
"""

MARGINS = {"float32": 2.0**-10, "bfloat16": 2.0**-8}

# The part of the margin by which an upper bound may exceed a computed norm before it takes its place.
SLACK = 2.0**-11

# The smallest clipping norm. Beside a smaller one, what float32 loses below its smallest normal number could count.
SMALLEST_CLIPPING_NORM = 1e-6
# The largest number of float32: beyond it a clip weight would be infinity divided by infinity.
LARGEST_CLIPPING_NORM = (2 - 2.0**-23) * 2.0**127

# Terms that are added one after another, at most: in a block of an inner product; in another sum on CPUs, for each level of its tree;
# and in another sum elsewhere.
CHAIN = 2048
SUM_WINDOW = 32
SUM_CHAIN = 2048
