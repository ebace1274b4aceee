"""Prompts and completions: as a template or a chat template writes them, cut by one rule, learnt alone, refused in one line."""

import json
import resource
from datetime import datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing

from dpx.data import left_out
from dpx.data.completions import ChatTemplate, answered, halves
from dpx.data.declared_data import Data, Vocabulary
from dpx.data.documents import Conversation
from dpx.data.labelled import Table
from dpx.data.prepare import prepare
from dpx.data.store import Store
from dpx.data.tokenizer import TextTokenizer, of_path
from dpx.declaration import ConfigError
from dpx.privacy.declared_privacy import Privacy
from tests.clipping.batches import parameters
from tests.clipping.exactness import Case, assert_exact
from tests.clipping.families import subject

PRIVACY = Privacy(delta=1e-5)
WORDS = "river stone bright window carry slowly garden market"
CHAT = """{% for message in messages %}
    {% if not message['content'] %}
        {% continue %}
    {% endif %}
    {{- bos_token + message['role'] + '\\n' + message['content'] + eos_token + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<s>assistant\\n' }}
{%- endif %}"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS] * 3, vocab_size=300, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
    own = trained._tokenizer
    own.post_processor = TemplateProcessing(single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)])
    own.save(str(folder / "tokenizer.json"))
    marks = {"pad_token": "<pad>", "bos_token": {"__type": "AddedToken", "content": "<s>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks))
    (folder / "chat_template.jinja").write_text(CHAT)
    return folder


def rows(count: int = 24) -> list[dict[str, Any]]:
    words = WORDS.split()
    return [{"ask": f"{words[n % 8]} {n}", "say": f"{words[n % 7]} {words[n % 5]}", "who": f"p{n // 2}"} for n in range(count)]


def chats(count: int = 24) -> list[dict[str, Any]]:
    return [{"messages": [{"role": "user", "content": row["ask"]}, {"role": "assistant", "content": row["say"]}]} for row in rows(count)]


def stored(tmp_path: Path, checkpoint: Path, records: list[dict[str, Any]], length: int = 24, **fields: Any) -> tuple[Store, TextTokenizer]:
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    named = fields or {"prompt_field": "ask", "completion_field": "say"}
    data = Data(
        name="asked",
        source=Table(paths=str(path), labels=None, **named),
        vocabulary=Vocabulary(size=300, path=str(checkpoint)),
        sequence_length=length,
        pairs="none",
        public_fraction=0.0,
        heldout_fraction=0.2,
        directory=str(tmp_path / "stores"),
    )
    return prepare(data, PRIVACY), of_path(checkpoint, 300)


def texts(store: Store, tokenizer: TextTokenizer) -> list[tuple[str, str]]:
    """The prompt and the completion of every protected row, with their marks."""
    found = store.rows("protected", np.arange(store.manifest.rows["protected"]))
    read = lambda ids: tokenizer.tokenizer.decode(ids.tolist(), skip_special_tokens=False)  # noqa: E731
    parts = zip(found["tokens"], found["segment_start"], found["length"], strict=True)
    return [(read(tokens[:start]), read(tokens[start:end])) for tokens, start, end in parts]


def test_a_template_is_divided_before_the_completion(tmp_path, checkpoint):
    assert halves("Q: {prompt}\\nA: {completion}\nend") == ("Q: {prompt}\nA:", " {completion}\nend")
    store, tokenizer = stored(tmp_path, checkpoint, rows())
    found = texts(store, tokenizer)
    assert len(found) > 10 and set(found) <= {(f"<s>{row['ask']}\n", f"{row['say']}</s>") for row in rows()}


def test_messages_are_written_by_the_checkpoints_template(tmp_path, checkpoint):
    pytest.importorskip("jinja2")
    store, tokenizer = stored(tmp_path, checkpoint, chats(), 64, messages_field="messages")
    found = texts(store, tokenizer)
    wanted = {(f"<s>user\n{row['ask']}</s>\n<s>assistant\n", f"{row['say']}</s>\n") for row in rows()}
    assert len(found) > 10 and set(found) <= wanted


def test_a_chat_template_is_written_as_transformers_writes_it(checkpoint):
    pytest.importorskip("jinja2")
    transformers = pytest.importorskip("transformers")
    own = ChatTemplate(of_path(checkpoint, 300))
    other = transformers.PreTrainedTokenizerFast.from_pretrained(checkpoint)
    for record in chats(3):
        messages = record["messages"]
        prompt, completion = own.texts("row", Conversation(tuple(messages)))
        assert prompt == other.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt + completion == other.apply_chat_template(messages, tokenize=False)


def test_a_prompt_loses_its_left_and_a_completion_its_end(tmp_path, checkpoint):
    long = {"ask": " ".join(["stone"] * 30) + " river", "say": "garden"}
    longer = {"ask": "river", "say": " ".join(["window"] * 40)}
    store, tokenizer = stored(tmp_path, checkpoint, [long, longer, *rows(30)], 16)
    found = texts(store, tokenizer)
    cut = [pair for pair in found if pair[1].startswith("garden</s>") and "stone stone" in pair[0]]
    assert all(first.startswith("<s>") and first.endswith(" river\n") for first, _ in cut)
    over = [pair for pair in found if "window window" in pair[1]]
    assert all(first == "<s>" and not second.endswith("</s>") for first, second in over)
    assert len(cut) == len(over) == 1
    counts = left_out.read(store.folder).values()
    assert (sum(one.texts_cut for one in counts), sum(one.completions_cut for one in counts)) == (2, 1)
    (told,) = (left_out.in_words(one, "public", "would be") for one in counts if one.completions_cut)
    assert told[1] == "the ends of 1 public completions are not learnt: they alone are longer than a row"


def test_a_unit_is_whoever_the_rows_name(tmp_path, checkpoint):
    store, _ = stored(tmp_path, checkpoint, rows(), prompt_field="ask", completion_field="say", unit_field="who")
    assert sum(store.manifest.units.values()) == 12 and sum(store.manifest.rows.values()) == 24


@pytest.mark.parametrize(
    ("fields", "records", "line"),
    [
        ({"template": "{prompt}"}, rows(), "has the fields prompt. Write {prompt}, then {completion}"),
        ({"template": "{completion} {prompt}"}, rows(), "has the fields completion, prompt"),
        ({"template": "{prompt {completion}"}, rows(), "template"),
        ({"completion_field": "no"}, rows(), "rows.jsonl:1: has no column 'no'; its columns are ask, say, who"),
        ({"completion_field": None}, rows(), "completion_field=None: a prompt and a completion are needed"),
        ({"completion_field": "ask"}, rows(), "the same column cannot be two parts of a row"),
        ({"pair_field": "who"}, rows(), "rows of prompts and completions have neither labels nor second texts"),
        ({"messages_field": "messages"}, rows(), "the messages already hold the prompt"),
        ({}, [*rows(), {"ask": "a", "say": " ", "who": "b"}], "rows.jsonl:25: has an empty text under 'say'"),
    ],
)
def test_bad_prompts_are_refused_in_one_line(tmp_path, checkpoint, fields, records, line):
    with pytest.raises(ConfigError) as refused:
        stored(tmp_path, checkpoint, records, **{"prompt_field": "ask", "completion_field": "say"} | fields)
    assert line in str(refused.value) and "\n" not in str(refused.value)
    assert not list((tmp_path / "stores").glob("*"))


USER, ANSWER = {"role": "user", "content": "river"}, {"role": "assistant", "content": "stone"}


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ("river", "rows.jsonl:25: has no list of messages under 'messages'"),
        ([USER, {"role": "assistant"}], "has a message without a role or a text"),
        ([USER], "does not end in an answer of the assistant"),
        ([ANSWER], "does not end in an answer of the assistant"),
        ([USER, ANSWER | {"content": " "}], "has an empty completion"),
    ],
)
def test_bad_messages_are_refused_in_one_line(tmp_path, checkpoint, messages, line):
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError) as refused:
        stored(tmp_path, checkpoint, [*chats(), {"messages": messages}], messages_field="messages")
    assert line in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("template", "line"),
    [
        (None, "the checkpoint has no chat template"),
        ("{% for", "is not a template of Jinja"),
        ("{{ raise_exception('roles must alternate') }}", "rows.jsonl:1: the chat template refuses the messages (roles must alternate)"),
        ("{{ messages[0].content }}{{ messages|length }}", "does not write the last message after the text of those before it"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_said(tmp_path, checkpoint, template, line):
    pytest.importorskip("jinja2")
    other = tmp_path / "other"
    other.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (other / name).write_bytes((checkpoint / name).read_bytes())
    if template is not None:
        (other / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError) as refused:
        stored(tmp_path, other, chats(), messages_field="messages")
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_tokenizer_without_padding_is_refused(tmp_path, checkpoint):
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator([WORDS], vocab_size=280, special_tokens=["</s>"], show_progress=False)
    trained._tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has no pad token. Name it in tokenizer_config.json"):
        of_path(tmp_path, 300)


def _batch(of: Any) -> Any:
    """A prompt with a completion, running text, a completion alone, one whose only token has no predecessor, and padding."""
    drawn = np.random.default_rng(1)
    length, start = np.array([9, 12, 7, 1, 0]), np.array([6, 12, 0, 0, 0])
    token = np.where(np.arange(12) < length[:, None], drawn.integers(5, 12, (5, 12)), 0)
    found = {"tokens": token, "length": length, "segment_start": start, "record": np.arange(5)}
    return of.batch(np.zeros(2, np.uint32), {name: values.astype(np.int32) for name, values in found.items()})


def test_the_completion_alone_is_learnt_and_clipped_exactly():
    """Sums by book-keeping are those of gradients of one example at a time, in float64; rows without a target contribute zero."""
    of = subject("llama_tied")
    batch, params = _batch(of), parameters(of, spread=0.3)
    np.testing.assert_array_equal(np.asarray(batch["has_label"]).sum(1), [3, 11, 6, 0, 0])
    run = jax.jit(of.losses)
    losses, counts = run(params, batch)
    # The logits of every position, by reading each position's loss alone.
    one = np.eye(12, dtype=bool)[np.flatnonzero(np.asarray(batch["has_label"])[0])]
    alone = {name: jnp.repeat(values[:1], 3, axis=0) for name, values in batch.items()} | {"has_label": jnp.asarray(one)}
    np.testing.assert_allclose(losses[0], np.mean(run(params, alone)[0]), rtol=1e-5)
    assert not np.asarray(losses)[3:].any() and not np.asarray(counts["next_token_predicted"])[3:].any()
    given = Case.build(of, batch)
    for gradient in given.truth()[0][3:]:
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))
    assert_exact(given)


ANSWERS = "{% for m in messages %}<s>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endif %}"
ANSWERS += "{{ '' if m['role'] == 'assistant' else m['content'] }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
MARKED = "{% for m in messages %}<s>{{ m['content'] | tojson }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"
BRANCHES = (
    "{% if tools is not none %}tools{% endif %}{% if documents is not none %}papers{% endif %}{% if nothing is defined %}x{% endif %}"
)


class Today(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Today":
        return cls(2026, 1, 31)


@pytest.mark.parametrize(
    "template", [ANSWERS, MARKED, BRANCHES + MARKED, "{{ bos_token }}" + MARKED, "{{ strftime_now('%d %b %Y') }}" + MARKED], ids=range(5)
)
def test_templates_have_what_transformers_gives_them(tmp_path, checkpoint, template, monkeypatch):
    pytest.importorskip("jinja2")
    transformers = pytest.importorskip("transformers")
    place = beside(tmp_path, checkpoint, template)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Today)
    own, other = ChatTemplate(of_path(place, 300), "2026-01-31"), transformers.PreTrainedTokenizerFast.from_pretrained(place)
    turns = [("system", "river"), ("user", "a<b & 'c'"), ("assistant", 'b>"a" é'), ("user", "stone"), ("assistant", "</s>garden")]
    for messages in ([{"role": role, "content": text} for role, text in turns[first:last]] for first, last in ((1, 3), (0, 3), (0, 5))):
        prompt, completion = own.texts("row", Conversation(tuple(messages)))
        assert prompt == other.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert prompt + completion == other.apply_chat_template(messages, tokenize=False)


WITH_TOOLS = "{% for t in tools or [] %}[{{ t['function']['name'] }}{{ t | tojson }}]{% endfor %}"
WITH_TOOLS += "{% for d in documents or [] %}({{ d['title'] }}){% endfor %}{% set ns = namespace(last=none) %}"
WITH_TOOLS += "{% for m in messages %}{% set ns.last = m['role'] %}<s>{{ m['role'] }}{{ m['content'] if 'content' in m else '' }}"
WITH_TOOLS += "{% for c in m['tool_calls'] or [] %}{{ c | tojson }}{% endfor %}</s>{% endfor %}{{ dict(a=1) | tojson if false }}"
WITH_TOOLS += "{% if add_generation_prompt %}<s>assistant{% endif %}"
TOOL = {
    "type": "function",
    "function": {"name": "weather<br>", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = [{"type": "function", "function": {"name": "weather<br>", "arguments": {"city": "é"}}}]


@pytest.mark.parametrize("has_named", [False, True])
@pytest.mark.parametrize("tools", [None, [], [TOOL]])
@pytest.mark.parametrize("documents", [None, [{"title": "river", "text": "stone"}]])
def test_tools_and_documents_of_a_row_are_those_of_transformers(tmp_path, checkpoint, tools, documents, has_named):
    pytest.importorskip("jinja2")
    transformers = pytest.importorskip("transformers")
    named = [{"name": "default", "template": WITH_TOOLS}, {"name": "tool_use", "template": "tools:" + WITH_TOOLS}]
    place = beside(tmp_path, checkpoint, None, chat_template=named if has_named else WITH_TOOLS)
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": CALL}, {"role": "tool", "content": "rain"}, ANSWER]
    record = {"messages": messages, "tools": tools if documents is None else json.dumps(tools), "papers": documents}
    chat = answered("row", record, "messages", "tools", "papers")
    own, other = ChatTemplate(of_path(place, 300)), transformers.PreTrainedTokenizerFast.from_pretrained(place)
    prompt, completion = own.texts("row", chat)
    given = {"tools": tools, "documents": documents, "tokenize": False}
    assert prompt == other.apply_chat_template(messages[:-1], add_generation_prompt=True, **given)
    assert prompt + completion == other.apply_chat_template(messages, **given)


def test_a_row_without_tools_has_none_and_tools_change_the_unit(tmp_path, checkpoint):
    pytest.importorskip("jinja2")
    place = beside(tmp_path, checkpoint, WITH_TOOLS)
    records = [one | {"tools": [TOOL]} if number % 2 else one for number, one in enumerate(chats())]
    store, tokenizer = stored(tmp_path, place, records, 400, messages_field="messages", tools_field="tools")
    found = [prompt for prompt, _ in texts(store, tokenizer)]
    assert 0 < sum(prompt.startswith("[weather") for prompt in found) < len(found)
    twice = [row | {"tools": tools} for row in chats(30)[:20] for tools in (None, [TOOL])]
    store, _ = stored(tmp_path / "more", place, twice, 400, messages_field="messages", tools_field="tools", equal_rows="remove")
    assert sum(store.manifest.units.values()) == 40
    with pytest.raises(ConfigError, match="has something else than a list of objects under 'tools'"):
        answered("row", {"messages": [USER, ANSWER], "tools": ["x"]}, "messages", "tools")
    with pytest.raises(ConfigError, match="data.source.tools_field: only a chat template reads it"):
        Table(paths="x", labels=None, prompt_field="a", completion_field="b", tools_field="tools")


def test_a_namespace_takes_no_name_that_begins_with_an_underscore(tmp_path, checkpoint):
    pytest.importorskip("jinja2")
    own = ChatTemplate(of_path(beside(tmp_path, checkpoint, "{% set ns = namespace(_x=1) %}"), 300))
    with pytest.raises(ConfigError, match=r"SecurityError: .* begins with an underscore, such as '_x'"):
        own.prompt("row", Conversation((USER,)))


def test_a_row_has_the_tokens_of_its_whole_text_or_is_refused(tmp_path, checkpoint):
    """A mark that ends in a space is one token with the word after it, which a prompt that ends in the mark has not."""
    pytest.importorskip("jinja2")
    spaced = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}{{ '<s>assistant: ' if add_generation_prompt }}"
    with pytest.raises(ConfigError, match=r"rows.jsonl:\d: the tokenizer joins the answer to the mark before it, .* End the"):
        stored(tmp_path / "a", beside(tmp_path / "a", checkpoint, spaced), chats(), messages_field="messages")
    # A prompt of a template that ends so keeps its tokens, and its completion too.
    store, tokenizer = stored(
        tmp_path,
        checkpoint,
        [row | {"ask": row["ask"] + " "} for row in rows()],
        template="{prompt}{completion}",
        prompt_field="ask",
        completion_field="say",
    )
    assert all(prompt.endswith(" ") for prompt, _ in texts(store, tokenizer))


def beside(tmp_path: Path, checkpoint: Path, template: str | None, **settings: Any) -> Path:
    """The checkpoint's tokenizer with another chat template."""
    place = tmp_path / "other"
    place.mkdir(parents=True)
    (place / "tokenizer.json").write_bytes((checkpoint / "tokenizer.json").read_bytes())
    (place / "tokenizer_config.json").write_text(json.dumps(json.loads((checkpoint / "tokenizer_config.json").read_text()) | settings))
    if template is not None:
        (place / "chat_template.jinja").write_text(template)
    return place


def test_of_named_templates_the_default_is_read_and_files_come_first(tmp_path, checkpoint):
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": MARKED}]
    place = beside(tmp_path, checkpoint, None, chat_template=named)
    assert of_path(place, 300).chat_templates["default"] == MARKED
    (place / "chat_template.jinja").write_text(ANSWERS)
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text("y")
    assert of_path(place, 300).chat_templates["default"] == ANSWERS and tuple(of_path(place, 300).chat_templates) == ("default", "tool_use")
    (place / "chat_template.jinja").unlink()
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError, match="has the chat templates tool_use, and none is named default. Copy the one to use to"):
        ChatTemplate(of_path(place, 300)).prompt("row", Conversation((USER,)))


@pytest.mark.parametrize(
    ("template", "line"),
    [
        ("{% nonsense %}", "chat_template.jinja: is not a template of Jinja (line 1: Encountered unknown tag 'nonsense'"),
        ("{{ strftime_now('%Y') }}", "data.source.chat_date=null: the checkpoint's chat template writes the date"),
        ("{{ messages[0].content.nothing.more }}", "the chat template fails on the messages (UndefinedError: "),
        ("{{ raise_exception('no') }}", "the chat template refuses the messages (no)"),
    ],
)
def test_a_refusal_of_a_template_says_what_is_wrong(tmp_path, checkpoint, template, line):
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError) as refused:
        ChatTemplate(of_path(beside(tmp_path, checkpoint, template), 300)).texts(
            "rows.jsonl:1", Conversation(tuple(chats(1)[0]["messages"]))
        )
    assert line in str(refused.value) and "\n" not in str(refused.value)


def test_a_date_is_a_date():
    for date in ("2026-13-01", "today"):
        with pytest.raises(ConfigError, match=f"data.source.chat_date={date}: is not a date"):
            Table(paths="x", labels=None, messages_field="m", chat_date=date)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_chat_template_that_never_ends_is_ended(tmp_path, checkpoint, template, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr("dpx.data.template_sandbox.MOST_STEPS", 2_000)
    own = ChatTemplate(of_path(beside(tmp_path, checkpoint, template), 300))
    for _ in range(2):
        with pytest.raises(ConfigError, match="takes more than 2,000 steps for one conversation"):
            own.prompt("rows.jsonl:1", Conversation(tuple(chats(1)[0]["messages"])))


# Each would take more room, or more time in one step, than any machine has.
BOMBS = [
    "{{ 'a' * 10 ** 12 }}",
    "{{ 'a' * 10 ** 9 * 10 ** 3 }}",
    "{% set n = namespace(x='ab') %}{% for _ in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for _ in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for _ in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=7) %}{% for _ in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 'x' | center(10 ** 12) }}",
    "{{ 'x'.ljust(10 ** 12) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '{:>1000000000000}'.format(1) }}",
    "{{ 'a' | indent(10 ** 12, first=true) }}",
    "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 7) }}",
    "{{ ('a' * 10 ** 6) | join('b' * 10 ** 7) }}",
    "{{ [0] * 10 ** 12 }}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ ('a' * 10 ** 8) | upper | length }}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("template", BOMBS)
def test_a_chat_template_that_takes_all_memory_is_ended(tmp_path, checkpoint, template, monkeypatch):
    pytest.importorskip("jinja2")
    monkeypatch.setattr("dpx.data.template_sandbox.MOST_BYTES", 2**28)
    monkeypatch.setattr("dpx.data.template_sandbox.MOST_STEPS", 100_000)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    own = ChatTemplate(of_path(beside(tmp_path, checkpoint, template), 300))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="0.25 GiB for one|100,000 steps for one|too many digits|the chat template fails"):
        own.prompt("rows.jsonl:1", Conversation(tuple(chats(1)[0]["messages"])))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**19, "KiB"
    assert resource.getrlimit(resource.RLIMIT_AS) == limits
    from dpx.data.template_sandbox import Sandbox

    assert Sandbox().from_string("{{ 2 ** 10 * 3 }}{{ 'a' * 3 ~ 1 }}").render() == "3072aaa1"


def test_a_chat_template_draws_nothing_and_its_steps_are_counted_for_each_conversation(tmp_path, checkpoint, monkeypatch):
    pytest.importorskip("jinja2")
    with pytest.raises(ConfigError, match="No filter named 'random'"):
        ChatTemplate(of_path(beside(tmp_path / "one", checkpoint, "{{ messages | random }}"), 300))
    own = ChatTemplate(of_path(beside(tmp_path / "two", checkpoint, "{{ lipsum() }}"), 300))
    with pytest.raises(ConfigError, match="'lipsum' is undefined"):
        own.prompt("rows.jsonl:1", Conversation(tuple(chats(1)[0]["messages"])))
    monkeypatch.setattr("dpx.data.template_sandbox.MOST_STEPS", 4)
    text = "{% for m in messages %}{{ loop.index }} of {{ loop.length }}{% if not loop.last %}, {% endif %}{% endfor %}"
    own = ChatTemplate(of_path(beside(tmp_path / "three", checkpoint, text), 300))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [own.prompt("row", Conversation(tuple(messages))) for _ in range(5)] == ["1 of 2, 2 of 2"] * 5
