"""Caveats about the paper: limits of its claims and of ours, and where it contradicts itself (sections (f) and (e) of our notes)."""

HONEST = (
    "**No model of the paper was trained to a stated (ε, δ).** ε is attached afterwards to a hypothetical batch and sampler; nothing about "
    "runs by noise-batch ratio is itself a guarantee, neither theirs nor ours.",
    "**Unit.** One individual is one sequence, or one user with unlimited data (appendix B.2). Adjacency is add/remove or zero-out; here "
    "it is zero-out, so that N is public. The sampler assumed is Poisson or fixed batches, the one used passes over shuffled rows.",
    "**Not charged.** Learning rates and every choice of configuration; fits come from one seed. The tokenizer was trained on the corpus.",
    "**ε alone does not rank mechanisms** of different batch sizes: advantage and excess vulnerability stand beside it.",
    "**Tokens count padding.** Predicted optima at the largest model of the fit (3.3e8) are censored. Extrapolations in steps, batch and "
    "passes are marked.",
    "**Pictures.** A curve without printed numbers would be a digitised estimate; none is shown here.",
    "**Ours.** A laptop's grid: two layers of 16 to 128 wide, 32 tokens, 1,024 pieces. It judges order; its values say nothing about the "
    "paper's. The losses are of public text; of private text they would be private, and no claim of any run covers a fit on them.",
)
CONTRADICTIONS = (
    "**Data against “less than one pass”**: 3.3e9 words in rows of 512 tokens are under 10M full rows, but 131M are drawn in slightly less "
    "than a pass. Rows of about 25 words padded to 512 would do; then 6 M B S T counts mostly padding.",
    "**Seven models in the table, six in the fit**; no optimum exceeds Large. The plateau at 3.3e8 parameters and 1e23 FLOPs is the edge "
    "of the grid, not a finding.",
    "**Parameters**: Mega is 778M, 729M and 784M; Small has 4 heads where the released model has 8; Tiny is 4M, 4.5M, 4.52M and 4.6M; "
    "Medium 41M and 41.6M.",
    "**The knee at N = 1e8, ε = 1**: 1e20 FLOPs and 114M parameters in the text of Figure 3, 5.2e21 and 1.3e8 in Table 2.",
    "**A billion parameters** at N = 1e9, ε near 10 and 1e23 FLOPs (section 6): Table 2 has 3.3e8 there, and 784M is the largest trained.",
    "**Loss extrapolated in the batch**: measured at 1,024, asked for at up to 1e6. Figures 7 to 9 have smaller batches lower at one "
    "ratio, so that losses at huge batches are too good; the same holds for up to 4,312 passes from curves of a single one.",
    "**Unbiased loss** (appendix C.4) fails for batches of 2,048 and 8,192 at 128K steps: 2 and 8 times the examples.",
    "**Table 3's accuracy** is not monotone (512: 37.27, 2,048: 37.55).",
    "**Appendix C.4** names BertBase, then BertLarge; appendix C.3 fixes the rate at 2^-8, while 2^-7 is best without noise.",
    "**Table 4**: 3.621 × 16 is 57.9 where 54 is printed. “Four to ten hours” fails for Large (16) and Mega (23) at the printed speed.",
    "**δ = 1e-8** for every N up to 1e9, where it exceeds 1/N.",
    "**β = 12.87** in L1: after the filter N spans a factor of 1.28, so that it is not identified; nor is β = 0.12 in L2.",
    "**The best rate point by point** mixes schedules, and losses before 128K steps come from a decay set for 128K.",
    "**Settings not stated**: masking rate, vocabulary, weight decay and epsilon of Adam, Huber width, the rule of the knee, grid spacing.",
)
