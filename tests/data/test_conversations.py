"""Conversations: what is learnt of them is what transformers marks as the assistant's, and a row holds whole turns."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer

from dpx.audit.canaries import Planted, WithCanaries, canary_tokens
from dpx.config.declared_audit import Canaries, Primary
from dpx.data import left_out
from dpx.data.completions import ChatTemplate, ConversationCutter, LossOn
from dpx.data.declared_data import Data, Vocabulary
from dpx.data.documents import Conversation
from dpx.data.labelled import Table
from dpx.data.tokenizer import of_path
from dpx.declaration import ConfigError
from dpx.models.shape import Bert
from dpx.task.declared_task import MaskedLanguageModel
from tests.clipping.batches import parameters
from tests.clipping.exactness import Case, assert_exact
from tests.clipping.families import subject
from tests.data.test_completions import PRIVACY, stored

pytest.importorskip("jinja2")
WORDS = "river stone bright window carry slowly garden market".split()
MARKS = ["<pad>", "<|im_start|>", "<|im_end|>", "<|eot|>"]
# Each marks what follows the mark of an answer up to the answer's own end, and what templates know besides: tools, calls and their results.
CHATML = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>{% endgeneration %}{% elif m.role == 'tool' %}
<tool_response>{{ m.content }}</tool_response><|im_end|>{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\\n' }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HEADERS = """{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}<|im_start|>{{ role }}<|im_end|>
{%- if m.role == 'assistant' %}{% generation %}
{%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}
{{- '<|eot|>' }}{% endgeneration %}{% else %}{{ m.content }}<|eot|>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant<|im_end|>{% endif %}"""
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def folder_of(place: Path, template: str) -> Path:
    place.mkdir(parents=True)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([" ".join(WORDS)] * 3, vocab_size=300, special_tokens=MARKS, show_progress=False)
    trained._tokenizer.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", "eos_token": "<|im_end|>"}))
    (place / "chat_template.jinja").write_text(template)
    return place


def without_marks(template: str) -> str:
    return re.sub(r"{%-? (end)?generation -?%}", "", template)


def conversations(count: int) -> list[dict[str, Any]]:
    """Conversations of three turns; some have a system's message, tools, and a turn in which the assistant calls one."""
    drawn = np.random.default_rng(0)
    said = lambda: " ".join(drawn.choice(WORDS, drawn.integers(1, 9))) + drawn.choice(["", ".", " é", "!\n", " \U0001f701"])  # noqa: E731
    found = []
    for _ in range(count):
        messages: list[dict[str, Any]] = [{"role": "system", "content": said()}] if drawn.random() < 0.4 else []
        for _ in range(3):
            messages.append({"role": "user", "content": said()})
            if drawn.random() < 0.4:
                call = {"type": "function", "function": {"name": "weather", "arguments": {"city": said()}}}
                messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": said()}]
            messages.append({"role": "assistant", "content": said()})
        found.append({"messages": messages, "tools": [TOOL] if drawn.random() < 0.3 else None})
    return found


def as_read(record: dict[str, Any]) -> Conversation:
    messages = tuple({name: value for name, value in one.items() if value is not None} for one in record["messages"])
    return Conversation(messages, None if record["tools"] is None else tuple(record["tools"]))


def cutter(folder: Path, loss_on: LossOn = "assistant", length: int = 4000) -> ConversationCutter:
    tokenizer = of_path(folder, 300)
    return ConversationCutter(tokenizer, ChatTemplate(tokenizer), loss_on, length)


@pytest.mark.parametrize("template", [CHATML, HEADERS], ids=["chatml", "headers"])
def test_tokens_and_masks_of_200_conversations_are_those_of_transformers(tmp_path: Path, template: str):
    """By the template's own marks, and by rendering prefixes where it has none."""
    transformers = pytest.importorskip("transformers")
    folder = folder_of(tmp_path / "marked", template)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    marked, unmarked = cutter(folder), cutter(folder_of(tmp_path / "unmarked", without_marks(template)))
    turns, calls, learnt = 0, 0, 0
    for record in conversations(200):
        told = {"tools": record["tools"], "return_dict": True, "return_assistant_tokens_mask": True}
        wanted = theirs.apply_chat_template(record["messages"], **told)
        for own in (marked, unmarked):
            row = own.row("row", as_read(record), Counter())
            assert row is not None and row.is_learnt is not None and row.start == len(row.tokens)
            assert row.tokens == wanted["input_ids"]
            assert row.is_learnt.tolist() == wanted["assistant_masks"]
        turns += sum(one["role"] == "user" for one in record["messages"])
        calls += sum("tool_calls" in one for one in record["messages"])
        learnt += sum(wanted["assistant_masks"])
    assert turns == 600 and calls > 100 and learnt > 2_000


def test_the_masks_are_stored_and_alone_are_labels(tmp_path: Path):
    folder = folder_of(tmp_path / "model", CHATML)
    records = [{"messages": one["messages"]} for one in conversations(24)]
    store, tokenizer = stored(tmp_path, folder, records, 800, messages_field="messages", loss_on="assistant")
    rows = store.rows("protected", np.arange(store.manifest.rows["protected"]), 700)
    batch = subject("llama_tied").batch(np.zeros(2, np.uint32), rows)
    own = cutter(folder)
    by_text = {
        tokenizer.tokenizer.decode(row.tokens): row for one in records if (row := own.row("row", as_read(one | {"tools": None}), Counter()))
    }
    assert len(rows["record"]) > 10 and rows["length"].max() < 700
    for tokens, length, is_label in zip(rows["tokens"], rows["length"], np.asarray(batch["has_label"]), strict=True):
        row = by_text[tokenizer.tokenizer.decode(tokens[:length].tolist())]
        assert row.is_learnt is not None
        np.testing.assert_array_equal(is_label[: length - 1], row.is_learnt[1:] > 0)
        assert not is_label[length - 1 :].any() and is_label.any()
    every, _ = stored(tmp_path / "all", folder, records, 400, messages_field="messages", loss_on="all")
    last, _ = stored(tmp_path / "last", folder, records, 400, messages_field="messages")
    whole, ends = every.rows("protected", [0]), last.rows("protected", [0])
    assert every.manifest.key != last.manifest.key and "is_learnt" not in whole
    assert whole["segment_start"][0] == whole["length"][0] == ends["length"][0] > ends["segment_start"][0]


def test_every_token_of_a_canary_is_learnt(tmp_path: Path):
    records = [{"messages": one["messages"]} for one in conversations(20)]
    plain, _ = stored(tmp_path, folder_of(tmp_path / "model", CHATML), records, 800, messages_field="messages", loss_on="assistant")
    audit, is_in = Canaries(gradients=2, sequences=2, primary=Primary(guesses=2)), np.ones(4, bool)
    store = WithCanaries(plain, Planted(2, is_in, canary_tokens(plain.manifest, 2, np.random.default_rng(0))), audit, PRIVACY)
    asked = plain.population(PRIVACY) + np.arange(4)
    for width in (None, 64):
        rows = store.examples("protected", [0, *asked], 1, width)
        assert rows["is_learnt"].shape == rows["tokens"].shape == (5, width or 800)
        assert rows["is_learnt"][3:].all() and not rows["is_learnt"][1:3].any()


def test_masked_words_have_no_answers():
    source = Table(paths="x", labels=None, messages_field="m", loss_on="assistant")
    data = Data(name="m", source=source, vocabulary=Vocabulary(size=64), sequence_length=16, pairs="none")
    with pytest.raises(ConfigError, match="data.source.loss_on=assistant with task=mlm: words are masked in the whole row"):
        MaskedLanguageModel(next_sentence=False).require_fits(Bert(name="b", layers=1, width=8, heads=1, feed_forward=8), data)


def test_a_gradient_of_what_is_learnt_is_clipped_exactly():
    """Sums by book-keeping are those of gradients of one example at a time, in float64; a row without a learnt token gives zero."""
    of, drawn = subject("llama_tied"), np.random.default_rng(1)
    length, learnt = np.array([9, 12, 7, 5, 0]), drawn.integers(0, 2, (5, 12))
    learnt[3] = 0
    tokens = np.where(np.arange(12) < length[:, None], drawn.integers(5, 12, (5, 12)), 0)
    rows = {"tokens": tokens, "length": length, "segment_start": length, "is_learnt": learnt, "record": np.arange(5)}
    batch, params = of.batch(np.zeros(2, np.uint32), {name: one.astype(np.int32) for name, one in rows.items()}), parameters(of, spread=0.3)
    np.testing.assert_array_equal(
        np.asarray(batch["has_label"]).sum(1), [sum(row[1:size]) for row, size in zip(learnt, length, strict=True)]
    )
    one = np.eye(12, dtype=bool)[np.flatnonzero(np.asarray(batch["has_label"])[0])]
    alone = {name: jnp.repeat(values[:1], len(one), axis=0) for name, values in batch.items()} | {"has_label": jnp.asarray(one)}
    run = jax.jit(of.losses)
    np.testing.assert_allclose(run(params, batch)[0][0], np.mean(run(params, alone)[0]), rtol=1e-5)
    given = Case.build(of, batch)
    for gradient in given.truth()[0][3:]:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert_exact(given)


def talk(*sizes: int, system: bool = False) -> Conversation:
    """A conversation with a turn for each size, the number of words of its answer."""
    turns = [
        ({"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": " ".join(["stone"] * size)})
        for number, size in enumerate(sizes)
    ]
    lead = ({"role": "system", "content": "market"},) if system else ()
    return Conversation((*lead, *(message for turn in turns for message in turn)))


@pytest.mark.parametrize(
    ("sizes", "loss_on", "kept", "lost"),
    [
        ((2, 2, 2), "assistant", (0, 3), (0, 0, 0, 0)),
        ((80, 2, 2), "assistant", (1, 3), (1, 1, 0, 0)),
        ((2, 80, 2), "all", (2, 3), (1, 2, 0, 0)),
        ((2, 2, 200), "assistant", (0, 2), (1, 0, 1, 0)),
        ((80, 2, 200, 200), "assistant", (1, 2), (1, 1, 2, 0)),
        ((2, 2, 200), "last", None, (0, 0, 1, 1)),
        ((200, 200), "all", None, (0, 0, 2, 1)),
        ((80, 2), "last", (1, 2), (1, 1, 0, 0)),
    ],
)
def test_a_row_holds_whole_turns(
    tmp_path: Path, sizes: tuple[int, ...], loss_on: LossOn, kept: tuple[int, int] | None, lost: tuple[int, ...]
):
    folder, counts, whole = folder_of(tmp_path / "model", CHATML), Counter[str](), talk(*sizes, system=True)
    fitting = cutter(folder, "all").row("row", talk(2, 2, 2, system=True), Counter())
    assert fitting is not None
    length = len(fitting.tokens)
    row = cutter(folder, loss_on, length).row("row", whole, counts)
    assert tuple(counts[name] for name in ("conversations_cut", "turns_cut", "turns_too_long", "conversations_without_rows")) == lost
    if kept is None:
        assert row is None
        return
    messages = (whole.messages[0], *whole.messages[1 + 2 * kept[0] : 1 + 2 * kept[1]])
    alone = cutter(folder, loss_on).row("row", Conversation(messages), Counter())
    assert row is not None and alone is not None and row.tokens == alone.tokens and len(row.tokens) <= length
    # One turn more at its front would not fit.
    longer = (whole.messages[0], *whole.messages[1 + 2 * (kept[0] - 1) : 1 + 2 * kept[1]])
    more = cutter(folder, loss_on).row("row", Conversation(longer), Counter()) if kept[0] else None
    assert more is None or len(more.tokens) > length


def test_a_call_of_a_tool_stays_with_its_question(tmp_path: Path):
    """A turn goes up to the user's next message, so no row begins with what a tool returned."""
    folder = folder_of(tmp_path / "model", CHATML)
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}]}
    messages = (*talk(3).messages, {"role": "user", "content": "q"}, call, {"role": "tool", "content": "rain"}, *talk(1).messages[1:])
    last = cutter(folder).row("row", Conversation(messages[2:]), Counter())
    assert last is not None
    for length in (len(last.tokens), len(last.tokens) + 1):
        row = cutter(folder, length=length).row("row", Conversation(messages), Counter())
        assert row is not None and row.tokens == last.tokens
    assert cutter(folder, length=len(last.tokens) - 1).row("row", Conversation(messages[2:]), Counter()) is None


def test_rows_too_short_for_every_conversation_are_named(tmp_path: Path):
    folder = folder_of(tmp_path / "model", CHATML)
    records = [{"messages": list(talk(20 + number, 20).messages), "n": number} for number in range(30)]
    with pytest.raises(
        ConfigError, match=r"^data.sequence_length=12: leaves no conversation of the \w+ split: turns of all \d+ are longer"
    ):
        stored(tmp_path, folder, records, 12, messages_field="messages")


def test_what_conversations_lose_is_said(tmp_path: Path):
    folder = folder_of(tmp_path / "model", CHATML)
    records = [{"messages": list(talk(size, 1 + size // 9).messages), "n": size} for size in range(1, 31)]
    store, _ = stored(tmp_path, folder, records, 48, messages_field="messages", loss_on="assistant")
    counts = left_out.read(store.folder)
    assert sum(one.texts for one in counts.values()) == 30 and sum(store.manifest.units.values()) == 30
    assert sum(one.rows for one in counts.values()) == 30 - sum(one.conversations_without_rows for one in counts.values())
    cut = sum(one.conversations_cut for one in counts.values())
    assert 0 < cut == sum(one.turns_cut for one in counts.values())
    one = left_out.LeftOut(
        texts=9, texts_cut=0, rows=8, rows_dropped=0, conversations_cut=3, turns_cut=4, turns_too_long=2, conversations_without_rows=1
    )
    assert left_out.in_words(one, "protected", "are") == [
        "3 of 9 protected conversations are longer than data.sequence_length and lose 4 turns at their beginnings; a larger one reads more",
        "2 last turns of protected conversations alone are longer than a row and are left out, and 1 conversations have no row by that",
    ]


REFUSED = (
    "the chat template writes an answer otherwise than it asks for it, or if messages follow, so its tokens are not known. Mark answers"
)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% for m in messages %}{% if loop.last %}<think></think>{% endif %}{{ m.content }}<|eot|>{% endfor %}", REFUSED),
        (
            "{% macro one(m) %}<|eot|>{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{{ one(m) }}{% endfor %}",
            "the chat template writes an answer within a macro or a variable, so its place in the text is not known",
        ),
        (
            "{% for m in messages %}x {{ m.content }}<|eot|>{% endfor %}{{ 'x ' if add_generation_prompt }}",
            "the tokenizer joins the answer",
        ),
    ],
)
def test_a_template_whose_answers_are_not_known_is_refused(tmp_path: Path, template: str, line: str):
    with pytest.raises(ConfigError) as refused:
        cutter(folder_of(tmp_path / "model", template)).row("rows.jsonl:1", talk(1, 2), Counter())
    assert str(refused.value).startswith(f"rows.jsonl:1: {line}") and "\n" not in str(refused.value)


USER, ANSWER = {"role": "user", "content": "river"}, {"role": "assistant", "content": "stone"}


@pytest.mark.parametrize(
    ("loss_on", "messages", "line"),
    [
        ("assistant", [USER, ANSWER | {"content": " "}], "has no answer of the assistant with a text, to a message before it"),
        ("assistant", [ANSWER, USER], "has no answer of the assistant with a text, to a message before it"),
        ("all", [], "has no message. Remove the row"),
    ],
)
def test_conversations_without_anything_to_learn_are_refused(tmp_path: Path, loss_on: str, messages: list[Any], line: str):
    records = [*({"messages": list(talk(size).messages)} for size in range(1, 20)), {"messages": messages}]
    with pytest.raises(ConfigError, match=f"rows.jsonl:20: {line}"):
        stored(tmp_path, folder_of(tmp_path / "model", CHATML), records, 64, messages_field="messages", loss_on=loss_on)


def test_loss_on_is_of_conversations():
    with pytest.raises(ConfigError, match="data.source.loss_on=all: only a conversation has several messages to choose from. Name the"):
        Table(paths="x", labels=None, prompt_field="a", completion_field="b", loss_on="all")
    with pytest.raises(ConfigError, match="data.source.loss_on=assistant: only a conversation"):
        Table(paths="x", labels=["a", "b"], loss_on="assistant")
