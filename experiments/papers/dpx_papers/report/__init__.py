"""Published numbers beside ours: runs to rows, rows to verdicts, tables, figures and one page. No jax."""
