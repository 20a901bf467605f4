"""The shipped templates write the known formats, and what is trained is the marked text exactly."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support.chat_templates import render as render_fields
from tests.support.data_cases import SAMPLES, TEMPLATES, TOKENIZER, block, write_lines
from uspft.data import Corpus, DataError, prepare
from uspft.data.chat.template import ChatTemplate
from uspft.data.chat.token_spans import TokenBytes, tokenise_spans
from uspft.data.faults import SampleFault
from uspft.data.samples import Origin, Rendered
from uspft.prepare.model import with_tokens

CHATML = (TEMPLATES / "chatml.jinja").read_text()
LLAMA3S = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
LLAMA3 = (TEMPLATES / "llama3.jinja").read_text()
HARD = (
    "🙂👩‍👩‍👧‍👦",
    "漢字かな交じり文、𠮷野家",
    " leading and trailing ",
    "\n\nlines\n",
    "e\u0301 and é, Ω…",
    "<|im_start|>user",
    "a",
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": " Hello 🙂"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That is all.\n"},
]
BARE = (
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def render(turns: list[dict[str, Any]], template: str, special: dict[str, str]) -> Rendered:
    return render_fields({"messages": turns}, ChatTemplate(template, special), "assistant")


def spans_of(rendered: Rendered) -> list[str]:
    return [rendered.text[a:b] for a, b in rendered.spans]


def test_chatml_is_qwens_format() -> None:
    rendered = render(TURNS, CHATML, {})
    assert rendered.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi <|im_end|>\n"
        "<|im_start|>assistant\n Hello 🙂<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\nThat is all.\n<|im_end|>\n"
    )
    assert spans_of(rendered) == [" Hello 🙂<|im_end|>", "That is all.\n<|im_end|>"]


def test_chatml_puts_in_no_system_message_and_joins_tools_answers() -> None:
    turns = [
        {"role": "user", "content": "Weather?"},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "9 °C"},
        {"role": "assistant", "content": "Wet."},
    ]
    assert render(turns, CHATML, {}).text == (
        "<|im_start|>user\nWeather?<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>"
        "\n<tool_response>\n9 °C\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nWet.<|im_end|>\n"
    )


def test_llama3_is_metas_format() -> None:
    rendered = render(TURNS, LLAMA3, {"bos_token": "<|begin_of_text|>"})
    assert rendered.text == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello 🙂<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nThat is all.<|eot_id|>"
    )
    assert spans_of(rendered) == ["Hello 🙂<|eot_id|>", "That is all.<|eot_id|>"]
    assert render(TURNS[1:2], LLAMA3, {}).text.startswith("<|start_header_id|>user")
    tool = render([{"role": "tool", "content": "rain"}], LLAMA3, {}).text
    assert tool == "<|start_header_id|>ipython<|end_header_id|>\n\nrain<|eot_id|>"


@pytest.mark.parametrize("template", [CHATML, LLAMA3], ids=["chatml", "llama3"])
def test_generation_prompt_is_where_the_trained_text_begins(template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    ask: dict[str, Any] = {"chat_template": template, "tokenize": False}
    prompt = tokenizer.apply_chat_template(TURNS[:2], add_generation_prompt=True, **ask)
    rendered = render(TURNS[:3], template, {})
    assert rendered.text[: rendered.spans[0][0]] == prompt


@pytest.mark.parametrize("template", ["chatml", "llama3"])
def test_trained_tokens_decode_to_the_assistants_text(tmp_path: Path, template: str) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        (
            {"messages": [{"role": "user", "content": u}, {"role": "assistant", "content": a}] * 2}
            for u in HARD
            for a in HARD
        ),
    )
    data = block(path, chat_template=str(TEMPLATES / f"{template}.jinja"))
    place = TOKENIZER if template == "chatml" else with_tokens(str(TOKENIZER), LLAMA3S, tmp_path)
    corpus = Corpus.open(prepare(data, str(place), 8195, tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(place)
    answers = [a for _ in HARD for a in HARD]
    assert len(corpus) == len(answers)
    for index, answer in enumerate(answers):
        sample = corpus.sample(index)
        trained = sample.labels != -100
        assert (sample.labels[trained] == sample.ids[trained]).all()
        want = f"{answer}<|im_end|>" if template == "chatml" else f"{answer.strip()}<|eot_id|>"
        got = tokenizer.decode(sample.ids[trained].tolist(), clean_up_tokenization_spaces=False)
        assert got == want * 2


def test_chatml_tokens_are_those_of_the_whole_text(tmp_path: Path) -> None:
    path = SAMPLES / "messages.jsonl"
    corpus = Corpus.open(prepare(block(path), str(TOKENIZER), 8192, tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    two = [
        {"role": "user", "content": "Say hello in Chinese, and add a face."},
        {"role": "assistant", "content": "你好 🙂"},
        {"role": "user", "content": "Now in French."},
        {"role": "assistant", "content": "Bonjour, ça va ? 🙂"},
    ]
    text = tokenizer.apply_chat_template(two, tokenize=False)
    assert corpus.sample(1).ids.tolist() == tokenizer(text, add_special_tokens=False).input_ids


def byte_level(trim: bool, unit: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = unit
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _trained(tokenizer, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))


def llama2_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, max_token_length=8)
    return _trained(tokenizer, trainer, special_count=3)


def _trained(tokenizer: Tokenizer, trainer: Any, special_count: int = 0) -> Tokenizer:
    trainer.show_progress = False
    texts = [*HARD[2:4], "assistant: user: Hello Hi That is all. And? :Hello :Hi", CHATML] * 3
    tokenizer.train_from_iterator(texts, trainer)
    if special_count:  # byte tokens are plain vocabulary, not added tokens
        import json

        state = json.loads(tokenizer.to_str())
        state["added_tokens"] = state["added_tokens"][:special_count]
        tokenizer = Tokenizer.from_str(json.dumps(state))
    return tokenizer


TOKENIZERS = {
    "byte level": lambda: byte_level(False),
    "byte level, trimmed offsets": lambda: byte_level(True),
    "byte level, NFC": lambda: byte_level(False, normalizers.NFC()),
    "llama 2": llama2_like,
}


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("template", [CHATML, LLAMA3, BARE], ids=["chatml", "llama3", "bare"])
def test_spans_are_exact_for_every_kind_of_tokenizer(name: str, template: str) -> None:
    backend = TOKENIZERS[name]()
    known = TokenBytes.of(backend)
    assert (known is None) == (name == "llama 2")
    for user in HARD:
        for answer in HARD:
            turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
            rendered = render(turns * 2, template, {})
            ids, ranges = tokenise_spans(backend, rendered)
            assert tokenise_spans(backend, rendered, known) == (ids, ranges)
            # Decoded behind all that precedes, and nothing else is read.
            for (first, stop), text in zip(ranges, spans_of(rendered), strict=True):
                before = backend.decode(ids[:first], skip_special_tokens=False)
                through = backend.decode(ids[:stop], skip_special_tokens=False)
                got = through[len(before) :]
                want = text if "NFC" not in name else normalizers.NFC().normalize_str(text)
                assert got == want
            whole = backend.decode(ids, skip_special_tokens=False)
            if "NFC" not in name:
                assert whole == rendered.text


@pytest.mark.parametrize("trim", [False, True])
def test_the_whole_texts_tokens_are_kept_where_they_fit(trim: bool) -> None:
    backend = byte_level(trim)
    rendered = render(TURNS, CHATML, {})
    ids, ranges = tokenise_spans(backend, rendered)
    assert ids == backend.encode(rendered.text).ids
    no_offsets = SimpleNamespace(encode_batch_fast=backend.encode_batch_fast)
    assert tokenise_spans(no_offsets, rendered, TokenBytes.of(backend)) == (ids, ranges)
    # A space that ends where an answer starts: trimmed offsets leave nothing of it.
    rendered = Rendered("a bc", [(2, 4)], "messages", Origin(0, 1))
    assert (backend.encode("a ").offsets[-1] == (2, 2)) == trim
    backend.add_tokens([AddedToken("bc", normalized=False)])
    ids, ((first, stop),) = tokenise_spans(backend, rendered)
    assert ids == backend.encode("a bc").ids and backend.decode(ids[first:stop]) == "bc"


def test_a_token_of_both_sides_makes_the_text_be_cut() -> None:
    backend = byte_level(False)
    # ':H' may not be one token: it would be half prompt, half answer.
    rendered = render([{"role": "assistant", "content": "Hello"}], "{{ 'a:' }}" + BARE, {})
    backend.add_tokens([AddedToken(":Hello", normalized=False)])
    whole = backend.encode(rendered.text)
    assert ":Hello" in whole.tokens
    for known in (None, TokenBytes.of(backend)):
        ids, ((first, stop),) = tokenise_spans(backend, rendered, known)
        assert backend.decode(ids[first:stop]) == "Hello" and backend.decode(ids) == rendered.text
        assert ids != whole.ids


def test_a_tokenizer_that_loses_text_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "lossy"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(False, normalizers.Lowercase()), eos_token="!"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    turns = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "b"}]
    good = {"messages": turns}
    bad = {"messages": [*turns, {"role": "assistant", "content": "B"}]}
    path = write_lines(tmp_path / "a.jsonl", [good, bad])
    with pytest.raises(DataError) as caught:
        prepare(block(path), str(folder), 8192, tmp_path / "cache")
    (line,) = caught.value.lines
    assert line.startswith(f"{path}:2: the trained tokens do not decode to the assistant's text; ")


@pytest.mark.parametrize(
    "template",
    [
        # What a macro writes before the marks is not counted: they fall too early.
        "{% macro say(m) %}{{ m.role }}: {% generation %}{{ m.content }}{% endgeneration %}"
        "{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{{ m.content }}"
        "{% endfor %}",
    ],
)
def test_marks_beside_the_assistants_text_are_refused(template: str) -> None:
    turns = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}]
    with pytest.raises(SampleFault, match="marks leave out an assistant message"):
        render(turns * 2, template, {})


def test_earlier_turns_thoughts_may_be_left_out() -> None:
    drops = BARE.replace("m.content }}{% endg", "m.content.split('</think>')[-1] }}{% endg")
    turns = [{"role": "assistant", "content": "<think>Hm.</think>Yes."}]
    assert spans_of(render(turns, drops, {})) == ["Yes."]


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(SampleFault, match="the chat template refuses it: no roles today; "):
        render(TURNS, "{{ raise_exception('no roles today') }}", {})
