"""Preparing data once: special tokens, the cache's key, long samples, what is reported; the shipped
templates write the known formats, and what is trained is the marked text exactly."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
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
from tests.support.data_cases import (
    CHAT,
    SAMPLES,
    TEMPLATES,
    TOKENIZER,
    block,
    changed_tokenizer,
    faults_of,
    write_lengths,
    write_lines,
)
from uspft.data.chat.template import ChatTemplate
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.counts import kept_and_dropped
from uspft.data.corpus.prepare import prepare
from uspft.data.corpus.tokenise import AddedTokens, TokenBytes, tokenise_spans
from uspft.data.faults import DataError, SampleFault
from uspft.data.rows.stream import RowStream
from uspft.data.samples import Rendered
from uspft.prepare.model import with_tokens

EOS = 0


def corpus_of(tmp_path: Path, data: Any, tokenizer: Path = TOKENIZER, size: int = 8192) -> Corpus:
    return Corpus.open(prepare(data, str(tokenizer), size, tmp_path / "cache"))


@pytest.mark.parametrize(
    ("single", "before", "after"),
    [("$A", [], [EOS]), ("<|im_start|> $A", [2], [EOS]), ("$A <|endoftext|>", [], [EOS])],
    ids=["none", "BOS", "EOS"],
)
def test_special_tokens(tmp_path: Path, single: str, before: list[int], after: list[int]) -> None:
    tokenizer = changed_tokenizer(tmp_path / "tokenizer", single=single)
    plain = AutoTokenizer.from_pretrained(TOKENIZER)
    text, prompt, completion = (plain(t).input_ids for t in ("def f", "2 + 2 = ", "4"))
    path = write_lines(tmp_path / "t.jsonl", [{"text": "def f"}])
    sample = corpus_of(tmp_path, block(path), tokenizer).sample(0)
    assert sample.ids.tolist() == before + text + after
    assert sample.labels.tolist() == [-100, *(before + text + after)[1:]]
    path = write_lines(tmp_path / "p.jsonl", [{"prompt": "2 + 2 = ", "completion": "4"}])
    sample = corpus_of(tmp_path, block(path), tokenizer).sample(0)
    assert sample.ids.tolist() == before + prompt + completion + after
    masked = [-100] * len(before + prompt)
    assert sample.labels.tolist() == masked + completion + after
    sample = corpus_of(tmp_path, block(path, train_on="all"), tokenizer).sample(0)
    assert sample.labels.tolist() == [-100, *sample.ids.tolist()[1:]]


def test_train_on_all_trains_every_token_of_a_conversation(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])
    sample = corpus_of(tmp_path, block(path, train_on="all")).sample(0)
    assert sample.labels.tolist() == [-100, *sample.ids.tolist()[1:]]
    unmarked = changed_tokenizer(tmp_path / "t", "{{ messages[0].content }}")
    assert len(corpus_of(tmp_path, block(path, train_on="all"), unmarked)) == 1


def test_a_tokenizer_without_a_template_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [CHAT])
    (line,) = faults_of(tmp_path, block(path), changed_tokenizer(tmp_path / "t", None))
    assert line.startswith("data.chat_template: the tokenizer has no chat template; name a Jinja")
    assert "data/templates/" in line and "chatml.jinja" in line and "llama3.jinja" in line


def test_a_template_trains_the_same_tokens_without_marks(tmp_path: Path) -> None:
    turns = [*CHAT["messages"], {"role": "user", "content": "Bye"}]
    turns.append({"role": "assistant", "content": "Bye 🙂", "weight": 0})
    path = write_lines(tmp_path / "a.jsonl", [CHAT, {"messages": turns[2:] * 2 + turns}])
    marked = (TEMPLATES / "chatml.jinja").read_text()
    plain = re.sub(r"\{%- (end)?generation %\}", "", marked)
    assert plain != marked
    for train_on in ("assistant", "last", "all"):
        data = block(path, train_on=train_on)
        corpora = [
            corpus_of(tmp_path, data, changed_tokenizer(tmp_path / str(i), template))
            for i, template in enumerate((marked, plain))
        ]
        assert corpora[0].contents != corpora[1].contents
        for name in ("tokens", "labels"):
            one, other = (getattr(corpus, name).tolist() for corpus in corpora)
            assert one == other
        tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
        sample = corpora[1].sample(0)
        said = tokenizer.decode(sample.ids[sample.labels != -100])
        assert said.endswith("Hello<|im_end|>" if train_on != "all" else "Hello<|im_end|>\n")


def test_tokenizers_that_will_not_do(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": "hi"}])
    (line,) = faults_of(tmp_path, block(text), None)
    assert line.startswith("model.tokenizer: no tokenizer")
    (line,) = faults_of(tmp_path, block(text), tmp_path)
    assert line.startswith(f"model.tokenizer: the folder `{tmp_path}` holds no tokenizer (no tok")
    (line,) = faults_of(tmp_path, block(text), changed_tokenizer(tmp_path / "t", eos_token=None))
    assert line.startswith("model.tokenizer: it has no EOS token")
    (line,) = faults_of(tmp_path, block(text), size=50)
    assert line.startswith("model.tokenizer: the tokenizer has 8,192 tokens") and " 50;" in line


def test_a_token_beyond_the_vocabulary_is_a_fault_where_a_sample_holds_it(tmp_path: Path) -> None:
    tokenizer = changed_tokenizer(tmp_path / "t", pad_token="<|new|>")
    text = write_lines(tmp_path / "a.jsonl", [{"text": "hi"}])
    assert prepare(block(text), str(tokenizer), 8192, tmp_path / "cache")
    write_lines(text, [{"text": "hi"}, {"text": "hi <|new|>"}])
    (line,) = faults_of(tmp_path, block(text), tokenizer)
    assert line.startswith(f"{text}:2: the tokenizer gives id 8192, the model has 8192; ")


def test_the_last_answer_of_what_has_none(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": "hi"}])
    (line,) = faults_of(tmp_path, block(text, train_on="last"))
    assert line.startswith("data.train_on: is last, and text data has no answers; ")
    chat = write_lines(tmp_path / "b.jsonl", [CHAT])
    mixed = block(text, chat, train_on="last")
    assert prepare(mixed, str(TOKENIZER), 8192, tmp_path / "cache")


def test_completion_is_another_word_for_assistant(tmp_path: Path) -> None:
    text = write_lines(tmp_path / "a.jsonl", [{"text": "hi"}])
    names = {
        prepare(block(text, train_on=on), str(TOKENIZER), 8192, tmp_path / "cache")
        for on in ("completion", "assistant")
    }
    assert len(names) == 1


def test_tokenized_needs_no_tokenizer(tmp_path: Path) -> None:
    path = write_lengths(tmp_path / "a.jsonl", [3])
    assert len(Corpus.open(prepare(block(path), None, 2000, tmp_path / "cache"))) == 1


def test_all_formats_together_and_where_they_came_from(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, block(SAMPLES))
    counts = {"document.txt": 1, "messages.jsonl": 4, "prompt_completion.jsonl": 3}
    counts |= {"text.jsonl": 3, "tokenized.jsonl": 2}
    want = [f"{SAMPLES / name}:{i + 1}" for name, n in counts.items() for i in range(n)]
    assert [corpus.origin(i) for i in range(len(corpus))] == want
    assert corpus.offsets.dtype == np.int64 and corpus.offsets[-1] == len(corpus.tokens)


LONG = [5, 12, 4, 9]


def report_of(folder: Path) -> dict[str, Any]:
    report = json.loads((folder / "report.json").read_text())
    assert report.pop("seconds") >= 0 and report.pop("shapes") == ["tokenized: input_ids"]
    return dict(report)


def prepared(tmp_path: Path, overlong: str, lengths: list[int], row: int) -> Path:
    path = write_lengths(tmp_path / "a.jsonl", lengths)
    data = block(path, overlong=overlong, sequence_length=row)
    return prepare(data, None, 100_000, tmp_path / "cache")


def test_an_overlong_sample_is_an_error_with_its_length_and_remedies(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        prepared(tmp_path, "error", [*LONG, 12_345], 8)
    (first,) = caught.value.lines
    path = tmp_path / "a.jsonl"
    assert first.startswith(f"{path}:2: 12 tokens, a row has 8 (3 such: lines 2, 4, 5); ")
    for remedy in ("truncate", "drop", "split", "data.overlong", "data.sequence_length"):
        assert remedy in first
    # A longer row takes the same tokens, and is still checked.
    assert prepared(tmp_path, "error", [*LONG, 12_345], 12_345).is_dir()
    with pytest.raises(DataError):
        prepared(tmp_path, "error", [*LONG, 12_345], 12_344)
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize(
    ("overlong", "lengths", "targets", "counted"),
    [
        ("truncate", [5, 8, 4, 8], 21, {"truncated": 2}),
        ("drop", [5, 4], 7, {"dropped": 2}),
        ("split", LONG, 24, {"split": 2}),  # 30 tokens, 6 documents
    ],
)
def test_rules_for_overlong_samples(
    tmp_path: Path, overlong: str, lengths: list[int], targets: int, counted: dict[str, int]
) -> None:
    folder = prepared(tmp_path, overlong, LONG, 8)
    corpus = Corpus.open(folder)
    assert corpus.lengths.tolist() == lengths
    assert all(s.ids[0] % 1000 == 0 for s in map(corpus.sample, range(len(corpus))))
    report = report_of(folder)
    where = f"{tmp_path / 'a.jsonl'}:2: 12 tokens, a row has 8 (2 such: lines 2, 4)"
    skipped = [where] if overlong == "drop" else []
    (note,) = report.pop("notes")
    assert note.startswith("2 samples longer than a row") and f"overlong: {overlong}" in note
    assert report == {
        **dict.fromkeys(("bad", "dropped", "truncated", "split", "without_targets"), 0),
        **{"read": len(LONG), "skipped": skipped, "untrained": [], "mix": [], "unused": []},
        "samples": len(lengths),
        "tokens": sum(lengths),
        "target_tokens": targets,
        "longest": 12,
        **counted,
    }


def test_samples_without_a_trained_token_are_kept_and_reported(tmp_path: Path) -> None:
    records = [{"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [3]}]
    path = write_lines(tmp_path / "a.jsonl", [*records, {"input_ids": [4, 5]}])
    folder = prepare(block(path), None, 10, tmp_path / "cache")
    report = json.loads((folder / "report.json").read_text())
    assert (report["samples"], report["target_tokens"], report["without_targets"]) == (3, 1, 2)
    assert report["notes"][0].startswith("2 samples without a trained token")


def test_bad_samples_are_skipped_counted_and_named(tmp_path: Path) -> None:
    long = {"input_ids": [1] * 9}
    records = [{"input_ids": [1, 2]}, "{", {"input_ids": "1"}, "{", long, {"input_ids": [1, 99]}]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = block(path, on_bad_sample="skip", overlong="drop", sequence_length=8)
    folder = prepare(data, None, 10, tmp_path / "cache")
    report = report_of(folder)
    kept = {name: report[name] for name in ("read", "samples", "dropped", "bad")}
    assert kept == {"read": 6, "samples": 1, "dropped": 1, "bad": 4}
    lost = {"longer than a row": 1, "cannot be used": 4}
    assert kept_and_dropped(report) == {"read": 6, "kept": 1, "dropped": lost}
    broken, text, beyond, overlong = report["skipped"]
    assert overlong == f"{path}:5: 9 tokens, a row has 8"
    assert broken.startswith(f"{path}:2: broken JSON (") and "(2 such: lines 2, 4); " in broken
    assert text.startswith(f"{path}:3: input_ids is a string; ") and f"{path}:6: " in beyond
    assert report["notes"][0].startswith("4 samples that cannot be used, skipped")
    assert Corpus.open(folder).origin(0) == f"{path}:1"
    bad = block(write_lines(path, ["{}}"]), on_bad_sample="skip")
    reason, line = faults_of(tmp_path, bad, None, 10)
    assert reason.startswith(f"{path}:1: broken JSON (")
    assert "no sample is left, 1 skipped of 1 read; mend the records" in line


def test_a_data_set_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    nothing = f"{tmp_path / 'empty.jsonl'}: holds no sample; give it data, or leave it out"
    assert faults_of(tmp_path, block(tmp_path / "empty.jsonl")) == [nothing]
    skipping = block(tmp_path / "empty.jsonl", on_bad_sample="skip")
    reason, line = faults_of(tmp_path, skipping)
    assert reason == nothing and "no sample is left, 1 skipped of 1 read; mend the rec" in line
    long = write_lengths(tmp_path / "long.jsonl", [9, 9])
    dropping = block(long, overlong="drop", sequence_length=8)
    reason, line = faults_of(tmp_path, dropping, None, 10_000)
    assert reason == f"{long}:1: 9 tokens, a row has 8 (2 such: lines 1, 2)"
    assert "no sample is left, 2 dropped of 2 read; write a larger data.seq" in line
    masked = write_lines(tmp_path / "m.jsonl", [{"input_ids": [1, 2], "labels": [1, -100]}])
    (line,) = faults_of(tmp_path, block(masked), None, 10)
    assert "no token of any sample is trained; check" in line
    answers = [{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}]
    late = write_lines(tmp_path / "late.jsonl", answers)
    cutting = block(late, overlong="truncate", sequence_length=2)
    (line,) = faults_of(tmp_path, cutting, None, 10)
    assert "is trained, and 1 of 1 are cut to a row; write a larger data.sequence_length" in line
    assert not list((tmp_path / "cache").iterdir())


def test_a_source_that_is_empty_beside_others_is_no_sample(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    full = write_lengths(tmp_path / "full.jsonl", [3, 3])
    (line,) = faults_of(tmp_path, block(empty, full), None, 10_000)
    assert line.startswith(f"{empty}: holds no sample; ")
    data = block(empty, full, empty, full, empty, on_bad_sample="skip")
    folder = prepare(data, None, 10_000, tmp_path / "cache")
    report = read_report(folder)
    assert report["bad"] == 3 and report["skipped"] == [
        f"{empty}: holds no sample (3 such: {empty}, {empty}, {empty}); "
        "give it data, or leave it out"
    ]
    corpus = Corpus.open(folder)
    spans = [(s.first, s.stop, s.weight) for s in corpus.sources]
    assert spans == [(0, 0, 1), (0, 2, 1), (2, 2, 1), (2, 4, 1), (4, 4, 1)]
    assert RowStream(corpus, 3, "none", True, 0).rows_in_epoch(0) == 4


def test_listing_faults_come_before_any_reading(tmp_path: Path) -> None:
    lines = faults_of(tmp_path, block(tmp_path / "a.txt", tmp_path / "b.txt"))
    assert lines[0].startswith("data.train[0].path: ") and lines[1].startswith("data.train[1].path")
    assert not (tmp_path / "cache").exists()


def test_the_shipped_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    assert len(tokenizer) == 8192 and tokenizer.is_fast
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token) == (EOS, 1, None)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [2, 3]
    assert tokenizer.chat_template == (TEMPLATES / "chatml.jinja").read_text()
    assert sum(f.stat().st_size for f in TOKENIZER.iterdir()) < 700_000
    text = "def f(x: int) -> str:\n\treturn 'é漢🙂'  # \x00\r\n"
    assert tokenizer.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text


def test_labels_of_other_tokens_are_told(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", [{"input_ids": [1, 2, 3], "labels": [-100, 0, 3]}])
    report = read_report(prepare(block(path), None, 10, tmp_path / "cache"))
    assert report["skipped"] == [f"{path}:1: 1 label other than the token's own id"]


def test_samples_that_train_nothing_are_named(tmp_path: Path) -> None:
    masked = {"input_ids": [1, 2], "labels": [1, -100]}
    path = write_lines(tmp_path / "m.jsonl", [masked, {"input_ids": [1, 2]}, masked])
    report = read_report(prepare(block(path), None, 10, tmp_path / "cache"))
    assert report["untrained"] == [f"{path}:1: no token of it trains (2 such: lines 1, 3)"]
    assert (
        report["notes"] == ["2 samples without a trained token: they cost time and teach nothing"]
        and report["skipped"] == []
    )


# The tokens of conversations.

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


def test_long_white_space_takes_linear_time() -> None:
    """Seen to fail: a pattern tried each end of a run from each place in it, for minutes."""
    backend = llama2_like()
    backend.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False)])
    added = AddedTokens.of(backend)
    text = "x" + " " * 100_000 + "y<|end|> \n z"
    assert added.as_read(Rendered(text, [(1, len(text))])).text == text.replace("|> \n ", "|>")


@pytest.mark.parametrize("rstrip", [False, True])
def test_spaces_beside_special_tokens_change_no_token(rstrip: bool) -> None:
    """Llama 2's tokenizer puts a space behind each special token, and Phi-3's take in what is
    there: the tokens are the whole text's all the same, as apply_chat_template gives them."""
    backend = llama2_like()
    marks = ("<|user|>", "<|end|>", "<|assistant|>")
    backend.add_special_tokens([AddedToken(m, rstrip=rstrip, normalized=False) for m in marks])
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ '\n' if rstrip }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
        "{% endif %}{{ '\n' }}{% endfor %}"
    ).replace("'\n' if rstrip", "'\n'" if rstrip else "''")
    space = "\n" if rstrip else " "
    turns = [turn for turn in TURNS if turn["role"] != "system"]
    for answer in ("Hello", " Hello", "", "<|user|>Hello<|end|> \nHi"):
        turns[1] = {"role": "assistant", "content": answer}
        rendered = render(turns, template, {})
        ids, ranges = tokenise_spans(backend, rendered)
        assert ids == backend.encode(rendered.text).ids
        got = [backend.decode(ids[a - 1 : b], skip_special_tokens=False) for a, b in ranges]
        want = [f"<|assistant|>{text}" for text in spans_of(rendered)]
        assert [one.replace(" ", "") for one in got] == [
            one.replace(" ", "").replace("<|end|>" + space, "<|end|>") for one in want
        ]


def test_a_completion_continues_its_prompt_without_a_space_of_the_tokenizers(
    tmp_path: Path,
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=llama2_like(), eos_token="</s>").save_pretrained(
        tmp_path / "t"
    )
    pairs = [("Hi", "Hello"), ("", "Hello"), ("Hi</s>", "Hello")]
    records = [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]
    corpus = corpus_of(tmp_path, block(write_lines(tmp_path / "a.jsonl", records)), tmp_path / "t")
    backend = llama2_like()
    for index, (prompt, completion) in enumerate(pairs):
        whole = backend.encode(prompt).ids + backend.encode(f"</s>{completion}</s>").ids[1:]
        if index == 0:  # one text at inference; seen to fail with "Hi Hello"
            assert backend.decode(corpus.sample(0).ids.tolist()) == "HiHello"
        else:
            assert corpus.sample(index).ids.tolist() == whole


def test_a_text_with_a_bos_or_eos_of_its_own_gets_no_second_one(tmp_path: Path) -> None:
    tokenizer = changed_tokenizer(
        tmp_path / "t", single="<|im_start|> $A <|endoftext|>", bos_token="<|im_start|>"
    )
    text, prompt = "<|im_start|>def f<|endoftext|>", "<|im_start|>def"
    records = [{"text": text}, {"text": "def f"}]
    corpus = corpus_of(tmp_path, block(write_lines(tmp_path / "a.jsonl", records)), tokenizer)
    plain = AutoTokenizer.from_pretrained(TOKENIZER)(text).input_ids
    assert corpus.sample(0).ids.tolist() == corpus.sample(1).ids.tolist() == plain
    pair = [{"prompt": prompt, "completion": " f<|endoftext|>"}]
    corpus = corpus_of(tmp_path, block(write_lines(tmp_path / "b.jsonl", pair)), tokenizer)
    assert corpus.sample(0).ids.tolist() == plain


@pytest.mark.parametrize("trim", [False, True])
def test_the_whole_texts_tokens_are_kept_where_they_fit(trim: bool) -> None:
    backend = byte_level(trim)
    rendered = render(TURNS, CHATML, {})
    ids, ranges = tokenise_spans(backend, rendered)
    assert ids == backend.encode(rendered.text).ids
    no_offsets = SimpleNamespace(encode_batch_fast=backend.encode_batch_fast)
    assert tokenise_spans(no_offsets, rendered, TokenBytes.of(backend)) == (ids, ranges)
    # A space that ends where an answer starts: trimmed offsets leave nothing of it.
    rendered = Rendered("a bc", [(2, 4)])
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


def test_answers_without_text_are_told(tmp_path: Path) -> None:
    """They train their end, which a run of an export that lost its texts would not show."""
    asks = {"role": "user", "content": "a"}
    answers: list[dict[str, Any]] = [{"content": "b"}, {"content": " \n"}, {"content": ""}]
    answers += [{"content": "", "weight": 0}]
    chats = [{"messages": [asks, {"role": "assistant", **one}, asks]} for one in answers]
    pairs = [{"prompt": "a", "completion": text} for text in ("b", "", " ")]
    for name, records in (("chats", chats), ("pairs", pairs)):
        path = write_lines(tmp_path / f"{name}.jsonl", records)
        report = read_report(prepare(block(path), str(TOKENIZER), 8192, tmp_path / "cache"))
        (told,) = report["skipped"]
        assert told.startswith(f"{path}:2: an answer has no text") and "lines 2, 3)" in told
        assert report["samples"] == len(records)
