"""Yin and Habernal 2022, section 6.2.1 and Table 3: the noise of their epsilon 5, and where "4e5" comes from."""

from collections.abc import Mapping, Sequence

from dpx_papers.analysis import Made, analysis


@analysis()
def legal_accounting(
    size: int,
    delta: float,
    epsilon: float,
    epochs: int,
    batch_sizes: Sequence[int],
    computed_noise_multipliers: Sequence[float | int],
    orders: Sequence[float | int],
    small_sizes: Sequence[Sequence[int | float]],
    small_batch_size: int,
    small_steps: int,
    published: Mapping[str, float],
    most: float = 100.0,
    interval: float | None = None,
) -> Made:
    """Computes noise multipliers of the paper's batch sizes, and epsilon of the small corpus: the printed 4e5 is the order grid's, not the
    mechanism's.

    The lists of batch sizes and computed values go together.

    Attributes:
        size: Documents of the corpus.
        delta: Delta of epsilon.
        epsilon: Epsilon for which the noise is solved.
        epochs: Epochs of a run.
        batch_sizes: Batch sizes.
        computed_noise_multipliers: Noise multipliers by batch size, from the authors' library.
        orders: Renyi orders of that library.
        small_sizes: Candidates for the number of documents of the small corpus, each with its delta.
        small_batch_size: Batch size on the small corpus.
        small_steps: Steps on the small corpus.
        published: Values that the paper prints, by name.
        most: An epsilon above this limits nothing and is reported as infinite.
        interval: Grid interval of PLD accounting, which rounds upward.
    """
    from dpx.privacy import accounting, closed_form, solve

    batches, small = [], []
    for batch, known in zip(batch_sizes, computed_noise_multipliers, strict=True):
        # Their epoch is the whole batches that fit (their code), so at a batch of N/25.7 five epochs have 125 steps.
        stages = [(batch / size, epochs * (size // batch))]
        sigma = solve.noise_multiplier(stages, epsilon=epsilon, delta=delta, accountant="rdp", orders=orders)
        row = {"batch_size": batch, "steps": stages[0][1], "sigma_rdp": sigma, "sigma_rdp_known": known, "difference": sigma / known - 1}
        row["pld_epsilon"] = accounting.compose(accounting.charges_of(stages, sigma), interval=interval).epsilon(delta)
        # Their data is shuffled once an epoch and read in order. A record that is replaced moves each epoch's sum by twice the norm.
        for name, far in (("epsilon_as_read", 1), ("epsilon_as_read_replace_one", 2)):
            row[name] = closed_form.epsilon(far * epochs**0.5 / sigma, delta)
        batches.append(row)
    for documents, own_delta in small_sizes:
        for text, printed in published.items():
            charges = accounting.charges_of([(small_batch_size / documents, small_steps)], float(text))
            row = {"documents": int(documents), "delta": own_delta, "noise_multiplier": float(text), "published": printed}
            for name, by, grid in (("rdp_old_orders", "rdp", orders), ("rdp_default_orders", "rdp", None), ("pld", "pld", None)):
                row[name] = accounting.compose(charges, by, orders=grid, interval=interval).epsilon(own_delta)
            small.append(row | {"reported": f"{row['rdp_old_orders']:.2f}" if row["rdp_old_orders"] < most else "infinite"})
    return {"noise_by_batch_size": batches, "small_corpus": small}
