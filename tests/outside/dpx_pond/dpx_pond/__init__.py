"""One of everything that a package can add to dpx. Declarations import no jax; what computes imports it where it does."""
