"""The benchmark tables against rows whose ratios are known."""

import json
from pathlib import Path

import pytest

from dpx.declaration import ConfigError
from dpx_papers.benchmark import tables


def row(clipping, size, rate, to_autodiff, **changes):
    fields = {"clipping": clipping, "physical_batch": size, "examples_per_s": rate, "dtype": "float32", "mesh": "single"}
    ratios = {"ratio_to_autodiff": to_autodiff, "ratio_to_autodiff_spread": [to_autodiff - 0.1, to_autodiff + 0.1]}
    ratios |= {"ratio_to_plain": None, "ratio_to_plain_spread": None, "flops_ratio_to_plain": None}
    return fields | ratios | {"temporary_bytes": None, "is_exact": None, "clipped_sum_error": None} | changes


ROWS = [
    row("autodiff", 4, 10.0, 1.0),
    row("autodiff", 8, 8.0, 0.8),
    row("book_keeping", 4, 9.0, 0.9, is_exact=True, clipped_sum_error=3e-7),
    row("book_keeping", 8, 12.0, 1.2, is_exact=True, clipped_sum_error=3e-7),
    row("jax_privacy", 1, 6.0, 0.6, is_exact=True, clipped_sum_error=3e-7),
    row("opacus_hooks", 4, 3.0, 0.3, is_exact=True, clipped_sum_error=3e-6),
    row("opacus_ew", 4, 9.9, 0.99, is_exact=False, clipped_sum_error=0.12),
]


def home(tmp_path: Path, text: str) -> Path:
    (tmp_path / "README.md").write_text(text)
    document = {"cores": 2, "logical_batch": 8, "rounds": 3, "versions": {"jax": "0"}, "rows": ROWS}
    (tmp_path / "tiny_128.json").write_text(json.dumps(document))
    return tmp_path


def test_the_summary_compares_each_at_its_best_and_no_wrong_sum(tmp_path: Path):
    folder = home(tmp_path, f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    (folder / "programs.json").write_text("[]")
    assert tables.write(folder) == 1, "a list beside them is of other programs"
    text = (folder / "README.md").read_text()
    assert text.startswith("before") and text.endswith("after\n") and "old" not in text
    expected = (
        "| tiny_128 | cpu | float32 | 8 | 1.20 [1.10, 1.30] |  |  | 4: 0.90, 8: 1.50 | 2.00 (jax_privacy at 1) | 4.00 (opacus_hooks at 4) "
        "|  | yes (3e-07) |"
    )
    assert expected in text
    assert "NO (1e-01)" in text
    assert tables.write(folder) == 1 and (folder / "README.md").read_text() == text


def test_an_accelerators_file_says_its_rate_its_types_and_what_it_left_out(tmp_path: Path):
    folder = home(tmp_path, f"{tables.BEGIN}\n{tables.END}\n")
    narrow = row("book_keeping", 64, 30.0, 1.5, dtype="bfloat16", share_of_matrix_rate=0.412, is_automatic_batch=True, update_seconds=0.02)
    late = {"clipping": "plain", "dtype": "float32", "physical_batch": 9, "why": "the time limit was reached before compilation"}
    document = {"device": "H", "cores": 2, "logical_batch": 64, "rounds": 3, "versions": {}, "matrix_rate": {"bfloat16": 7.9e14}}
    rows = [narrow, row("book_keeping", 128, 40.0, 2.0, dtype="bfloat16"), *ROWS]
    (folder / "accelerator.json").write_text(json.dumps(document | {"rows": rows, "left_out": [late]}))
    noise = {"kind": "noise", "device": "H", "draws": 1000, "rows": [{"generator": "gaussian", "ns": 2.345}]}
    restart = {"kind": "restart", "device": "H", "model": "base", "bytes": 4096, "bytes_that_differ": 0}
    (folder / "noise.json").write_text(json.dumps(noise))
    (folder / "restart.json").write_text(json.dumps(restart))
    assert tables.write(folder) == 4
    text = (folder / "README.md").read_text()
    assert "| accelerator | H | bfloat16 | 128 | 2.00 [1.90, 2.10] |  |  |  |  |  | 64: 0.75 |  |" in text
    assert "| accelerator | H | float32 | 8 |" in text and "| 41 % |" in text and "| 20 |" in text
    assert "bfloat16 790 TFLOP/s" in text and "Left out: plain, float32, 9: the time limit was reached before compilation." in text
    assert "gaussian 2.35 ns a draw" in text or "gaussian 2.34 ns a draw" in text
    assert "0 of 4,096 bytes" in text


def test_a_readme_without_marks_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no place for tables"):
        tables.write(home(tmp_path, "nothing"))
