"""How far the Gaussian draws of `dpx.mechanism.gaussian` reach; no jax, for statements and declarations."""

# The largest absolute value that a draw takes, in deviations: sqrt(2 ln 2^64), rounded down.
REACH = 9.41
