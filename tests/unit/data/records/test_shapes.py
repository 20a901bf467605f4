"""Records of every shape become the formats that train, and a near miss names the mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoTokenizer

from tests.support.data_cases import TOKENIZER, block, faults_of, source, write_lines
from uspft.config.inputs import DataBlock, Sentences
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import first_look, prepare
from uspft.data.faults import BadRecord, DataError, SampleFault
from uspft.data.files.sources import SourceFile
from uspft.data.records.known_fields import OF_PROMPT
from uspft.data.records.reader import read
from uspft.data.records.shapes import SENTENCES, columns
from uspft.data.records.values import Naming
from uspft.data.samples import Record

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [USER, ANSWER]}
PAIR = {"prompt": "Hi", "completion": "Hello"}
LED = {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER]}
MASKED = {"messages": [USER, {"weight": OF_PROMPT, **ANSWER}, USER, ANSWER]}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
CALL = {"from": "function_call", "value": '{"name": "look", "arguments": {"at": "it"}}'}
SEEN = {"from": "observation", "value": "a moon"}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}],
}

# By what it is: the record, format, fields mapping; what it is called; what is made of it.
SHAPES: dict[str, tuple[Any, str, dict[str, Any], str, str, Any]] = {
    "messages": (CHAT, "auto", {}, "chat: messages with role/content", "messages", CHAT),
    "ShareGPT": (
        {"id": 3, "conversations": [HUMAN, GPT], "system": "Be brief."},
        "auto",
        {},
        "ShareGPT: conversations with from/value",
        "messages",
        LED,
    ),
    "OpenAI's preferences, the better ones": (
        {
            "input": {"messages": [USER], "tools": [{"name": "look"}]},
            "preferred_output": [ANSWER],
            "non_preferred_output": [USER],
        },
        "auto",
        {"output": "preferred_output"},
        "input and output: input, preferred_output",
        "messages",
        {**CHAT, "tools": [{"name": "look"}]},
    ),
    "calls": (
        {"conversations": [HUMAN, CALL, SEEN, GPT], "tools": '[{"name": "look"}]'},
        "messages",
        {},
        "ShareGPT: conversations with from/value",
        "messages",
        {
            "messages": [USER, CALLED, {"role": "tool", "content": "a moon"}, ANSWER],
            "tools": [{"name": "look"}],
        },
    ),
    "conversations": (
        {"conversations": [USER, ANSWER]},
        "auto",
        {},
        "chat: conversations with role/content",
        "messages",
        CHAT,
    ),
    "mapped": (
        {"dialog": [{"who": "A", "says": "Hi"}, {"who": "B", "says": "Hello", "mood": None}]},
        "auto",
        {
            "messages": "dialog",
            "role": "who",
            "content": "says",
            "roles": {"A": "user", "B": "assistant"},
        },
        "chat: dialog with who/says",
        "messages",
        CHAT,
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 + 2", "output": "4", "text": "all of it"},
        "prompt_completion",
        {},
        "Alpaca: instruction, output, input",
        "prompt_completion",
        {"prompt": "Add.\n\n2 + 2\n\n", "completion": "4"},
    ),
    "Alpaca without input": (
        {"instruction": "Say hello.", "input": "", "output": "Hello"},
        "auto",
        {},
        "Alpaca: instruction, output, input",
        "prompt_completion",
        {"prompt": "Say hello.\n\n", "completion": "Hello"},
    ),
    "Alpaca as a chat": (
        {"instruction": "Hi", "output": "Hello", "system": "Be brief."},
        "messages",
        {},
        "Alpaca: instruction, output, system",
        "messages",
        LED,
    ),
    "prompts": (PAIR, "auto", {}, "prompt and completion: prompt, completion", *("p_c", PAIR)),
    "prompts of turns": (
        {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]},
        "auto",
        {},
        "prompt and completion: prompt, completion",
        "messages",
        MASKED,
    ),
    "input and output": (
        {"input": "Hi", "output": "Hello"},
        "auto",
        {},
        "input and output: input, output",
        *("p_c", PAIR),
    ),
    "question and answer": (
        {"question": "Hi", "answer": "Hello", "id": "x"},
        "auto",
        {},
        "question and answer: question, answer",
        *("p_c", {"prompt": "Hi\n\n", "completion": "Hello"}),
    ),
    "text": ({"text": "a", "meta": {}}, "auto", {}, "text", "text", {"text": "a"}),
    "text named otherwise": (
        {"text": 3, "body": "a"},
        "auto",
        {"text": "body"},
        "text: body",
        "text",
        {"text": "a"},
    ),
    "tokenized": (
        {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 1]},
        "auto",
        {"labels": None},
        "tokenized: input_ids",
        "tokenized",
        {"input_ids": [1, 2]},
    ),
}


def found(tmp_path: Path, records: list[Any], asked: Naming) -> list[Record | BadRecord]:
    path = write_lines(tmp_path / "a.jsonl", records)
    return list(read(SourceFile(path, "a.jsonl", "json"), asked))


@pytest.mark.parametrize("case", SHAPES)
def test_a_shape_is_recognised_and_said(tmp_path: Path, case: str) -> None:
    record, format_, fields, words, form, want = SHAPES[case]
    first, second = found(tmp_path, [record, record], Naming(format_, fields))
    assert isinstance(first, Record) and isinstance(second, Record)
    assert first.format == second.format == form.replace("p_c", "prompt_completion")
    assert first.fields == second.fields == want
    assert first.shape == words


NEAR: list[tuple[Any, dict[str, Any], str]] = [
    ({"dialog": [USER]}, {}, "if they mean chat, write data.fields: {messages: dialog}"),
    (
        {"query": "a", "response": "b"},
        {},
        "mean prompt and completion, write data.fields: {prompt: query, completion: response}",
    ),
    ({"instruction": "a", "outputs": "b"}, {}, "Alpaca, write data.fields: {output: outputs}"),
    ({"body": "a", "id": 1}, {}, "if they mean text, write data.fields: {text: body}"),
    (
        {"instruction": "a", "context": "b", "response": "c", "category": "d"},
        {},
        "if they mean Alpaca, write data.fields: {output: response, input: context}",
    ),
    (
        {"id": "1", "system_prompt": "a", "question": "b", "response": "c"},
        {},
        "mean question and answer, write data.fields: {answer: response}",
    ),
    ({"user": "a", "assistant": "b"}, {}, "data.fields: {prompt: user, completion: assistant}"),
    ({"problem": "a", "solution": "b"}, {}, "data.fields: {question: problem, answer: solution}"),
    ({"thread": [{"who": "a", "said": "b"}]}, {}, "mean chat, write data.fields: {messages: thre"),
    (
        {"context": "a", "question": "b", "answers": {"text": ["c"], "answer_start": [3]}},
        {},
        "no shape has the fields context, question, answers; name them in data.fields, data/README",
    ),
    (
        {"question": "a", " answer": "b"},
        {},
        'has the fields question, " answer"; if they mean question and answer, write data.fields: '
        '{answer: " answer"}',
    ),
    ({"a": 1}, {}, "no shape has the fields a; name them in data.fields"),
    (
        {"data": [{"text": "a"}, {"text": "b"}]},
        {},
        "no shape has the fields data; if its list is the records, write the list alone, or one",
    ),
    ({"text": "a", "input_ids": [1]}, {}, "text and tokenized all fit the fields text, input_ids"),
    (
        {"instruction": "a", "output": "b", "prompt": "c", "completion": "d"},
        {},
        "write data.fields: {instruction: null, output: null} to take prompt and completion",
    ),
    (
        {"conversations": [{"from": "bot", "value": "a"}]},
        {},
        "the role 'bot'; write data.fields: {roles: {bot: assistant}}, or one of",
    ),
    (
        {"messages": [{"who": "a", "content": "b"}]},
        {},
        "but content, who; write role, or data.fields: {role: who}",
    ),
    (
        {"messages": [{"speaker": "a", "text": "b"}]},
        {},
        "write role and content, or data.fields: {role: speaker, content: text}",
    ),
    (
        {"messages": [{"role": "human", "content": "a"}, {"role": "x", "content": "b"}]},
        {},
        "role 'human'; write data.fields: {roles: {human: user, x: one of ours}}, or one of",
    ),
    ({"dialog": [USER]}, {"messages": "dialogue"}, "names dialogue, and there is no such field"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, {}, "trains on preferences; for the chosen"),
    ({"chosen": "a", "rejected": "b"}, {}, "answers alone write data.fields: {text: chosen}"),
    ({**PAIR, "chosen": "b"}, {}, "answers alone write data.fields: {chosen: null}"),
    (USER, {}, 'if they are turns, write {"messages": [...]}, with all of a conversation in it'),
    (
        {"system": "a", "conversations": [{"from": "system", "value": "b"}]},
        {},
        "that begin with another system message; take one out, or write data.fields: {system: null",
    ),
    ({"conversations": [{"from": "function_call", "value": "look"}]}, {}, "and no JSON"),
    ({"conversations": [{"from": "function_call", "value": "[3]"}]}, {}, "is a number; write"),
    ({"instruction": 3, "output": "a"}, {}, "instruction is a number; write a string"),
    ({"ask": "a", "answer": ["b"]}, {"question": "ask"}, "messages[1] is a string; write"),
]


@pytest.mark.parametrize(("record", "fields", "want"), NEAR, ids=[w[:30] for *_, w in NEAR])
def test_a_near_miss_names_the_mapping(
    tmp_path: Path, record: Any, fields: dict[str, Any], want: str
) -> None:
    (bad,) = found(tmp_path, [record], Naming("auto", fields))
    assert isinstance(bad, BadRecord) and want in bad.what and bad.where == "a.jsonl:1"


def test_two_shapes_in_one_file(tmp_path: Path) -> None:
    records = [CHAT, {"text": "a"}, PAIR, CHAT, {"id": 1}]
    good, text, pair, more, none = found(tmp_path, records, Naming())
    assert isinstance(good, Record) and isinstance(more, Record)
    for bad, name in ((text, "text"), (pair, "prompt and completion")):
        assert isinstance(bad, BadRecord)
        what = f"{name}, where the file began with chat; put each shape into a file of its own"
        assert bad.what == what
    assert isinstance(none, BadRecord) and none.what.startswith("no field 'messages', which chat")
    turns = {"prompt": [USER], "completion": [ANSWER]}
    _, bad = found(tmp_path, [PAIR, turns], Naming())
    alike = "write data.format: messages, or put each into a file of its own"
    told = "the prompt and completion are turns of a conversation, where the file began with texts"
    assert isinstance(bad, BadRecord) and bad.what == f"{told}; {alike}"
    _, bad = found(tmp_path, [turns, PAIR], Naming())
    assert isinstance(bad, BadRecord) and "are texts, where the file began with turns" in bad.what
    assert all(
        isinstance(one, Record) for one in found(tmp_path, [PAIR, turns], Naming("messages"))
    )


def test_the_columns_that_a_table_is_read_by() -> None:
    assert columns(["id", "conversations", "tools"], Naming()) == ["conversations", "tools"]
    assert columns(["a", "text"], Naming("auto", {"text": "a"})) == ["a"]
    assert columns(["labels", "input_ids"], Naming("auto", {"labels": None})) == ["input_ids"]
    with pytest.raises(SampleFault, match=r"question, answers; name them in data.fields"):
        columns(["question", "answers"], Naming())


def test_a_sources_own_names_win(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [{"a": "Hi"}])
    other = write_lines(tmp_path / "b.jsonl", [{"b": "Hi"}])
    data = block(source(one), source(other, fields={"text": "b"}), fields={"text": "a"})
    corpus = Corpus.open(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    assert corpus.sample(0).ids.tolist() == corpus.sample(1).ids.tolist()
    again = block(source(one), source(other), fields={"text": "a"})
    again.train[1].fields = {"text": "b", "labels": None}
    assert Corpus.open(prepare(again, str(TOKENIZER), 8192, tmp_path / "cache")) is not None


def test_the_answers_of_a_prompt_do_not_train(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": [USER, ANSWER, USER], "completion": "Ok"}])
    sample = Corpus.open(prepare(block(path), str(TOKENIZER), 8192, tmp_path / "c")).sample(0)
    one = write_lines(tmp_path / "b.jsonl", [{"messages": [USER, {**ANSWER, "content": "Ok"}]}])
    other = Corpus.open(prepare(block(one), str(TOKENIZER), 8192, tmp_path / "c")).sample(0)
    trained, want = (s.ids[s.labels != -100].tolist() for s in (sample, other))
    assert trained == want and len(sample.ids) > 2 * len(trained)
    every = block(path, train_on="all")
    sample = Corpus.open(prepare(every, str(TOKENIZER), 8192, tmp_path / "c")).sample(0)
    assert (sample.labels[1:] == sample.ids[1:]).all()  # the prompt's answer too


def test_turns_and_settings_of_a_csv_are_json_text(tmp_path: Path) -> None:
    """Seen to fail: the JSON itself trained."""
    path = tmp_path / "a.csv"
    halves = [json.dumps(one).replace('"', '""') for one in ([USER], [ANSWER])]
    path.write_text('prompt,completion,tools\n"{}","{}",null\n'.format(*halves))
    one = write_lines(tmp_path / "b.jsonl", [{"messages": [USER, ANSWER]}])
    sample, want = (
        Corpus.open(prepare(block(each), str(TOKENIZER), 8192, tmp_path / "c")).sample(0)
        for each in (path, one)
    )
    assert (sample.ids == want.ids).all() and (sample.labels == want.labels).all()
    # An answer that is such a text beside a plain question stays a text.
    (text,) = found(tmp_path, [{"prompt": "a", "completion": json.dumps([ANSWER])}], Naming())
    assert isinstance(text, Record) and text.format == "prompt_completion"


WITH = {"instruction": "Add {these}.", "input": "2 + 2", "output": "4"}
WITHOUT = {"instruction": "Say hello.", "input": "", "output": "Hello."}
BELOW = "Below is an instruction that describes a task"
WRITE = "Write a response that appropriately completes the request."
PAIRED = (
    f"{BELOW}, paired with an input that provides further context. {WRITE}\n\n"
    "### Instruction:\nAdd {these}.\n\n### Input:\n2 + 2\n\n### Response:"
)
PLAIN = f"{BELOW}. {WRITE}\n\n### Instruction:\nSay hello.\n\n### Response:"
CHAT_OF_MINDSPORE = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives "
    "helpful, detailed, and polite answers to the user's questions. USER: "
)
WRITTEN = {
    "alpaca": (PAIRED, PLAIN),
    "alpaca_mindspore": tuple(f"{CHAT_OF_MINDSPORE}{text} ASSISTANT: " for text in (PAIRED, PLAIN)),
}


def texts(tmp_path: Path, data: Any) -> list[tuple[str, str]]:
    """Of each sample what does not train, and what does."""
    found = Corpus.open(prepare(data, str(TOKENIZER), 8192, tmp_path / "cache"))
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    made = []
    for i in range(len(found)):
        sample = found.sample(i)
        trains = sample.labels != -100
        made.append((tokenizer.decode(sample.ids[~trains]), tokenizer.decode(sample.ids[trains])))
    return made


@pytest.mark.parametrize("name", get_args(Sentences))
def test_the_sentences_stand_before_the_answer(name: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [WITH, WITHOUT])
    want = [
        (prompt, f"{one['output']}<|endoftext|>")
        for prompt, one in zip(WRITTEN[name], (WITH, WITHOUT), strict=True)
    ]
    assert texts(tmp_path, block(path, prompt_template=name)) == want
    assert texts(tmp_path, block(path)) != want, "another name in the cache, too"
    assert set(WRITTEN) == set(SENTENCES) == set(get_args(Sentences))


def test_in_the_chat_template_they_are_the_question(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [WITH])
    data = block(path, format="messages", prompt_template="alpaca")
    ((question, answer),) = texts(tmp_path, data)
    assert f"user\n{PAIRED}<|im_end|>" in question and answer == "4<|im_end|>"


def test_what_has_no_instruction_is_refused(tmp_path: Path) -> None:
    """By file where a pair is none of Alpaca's, by key where there is no pair at all."""
    pairs = write_lines(tmp_path / "a.jsonl", [{"question": "2 + 2?", "answer": "4"}])
    (line,) = faults_of(tmp_path, block(pairs, prompt_template="alpaca"))
    assert "write data.fields: {instruction: question, output: answer}" in line
    turns = {"instruction": CHAT["messages"][:1], "output": "a"}
    (line,) = faults_of(
        tmp_path, block(write_lines(tmp_path / "b.jsonl", [turns]), prompt_template="alpaca")
    )
    assert "and this is turns" in line
    as_text = {
        name: json.dumps([turn]) for name, turn in (("instruction", USER), ("output", ANSWER))
    }
    (line,) = faults_of(
        tmp_path, block(write_lines(tmp_path / "e.jsonl", [as_text]), prompt_template="alpaca")
    )
    assert "and this is turns" in line
    beside = write_lines(tmp_path / "f.jsonl", [{**turns, "input": "2 + 2"}])
    (line,) = faults_of(tmp_path, block(beside))
    assert "input stands beside turns, of which it is none" in line
    assert "write data.fields: {input: null}" in line
    chats = write_lines(tmp_path / "c.jsonl", [CHAT])
    (line,) = faults_of(tmp_path, block(chats, prompt_template="alpaca"))
    assert line.startswith("data.prompt_template: is alpaca, and no record has an instruction")
    whole = DataBlock.model_validate(
        {"train": str(chats), "sequence_length": 4096, "prompt_template": "alpaca"}
    )
    with pytest.raises(DataError, match="no record has an instruction"):
        first_look(whole, str(TOKENIZER), 8192)
    both = block(chats, write_lines(tmp_path / "d.jsonl", [WITH]), prompt_template="alpaca")
    folder = prepare(both, str(TOKENIZER), 8192, tmp_path / "cache")
    shapes = "\n".join(read_report(folder)["shapes"])
    assert "Alpaca: instruction, output, input, in the sentences of alpaca" in shapes


def test_names_of_ones_own_are_mapped(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"question": "Say hello.", "answer": "Hello."}])
    fields = {"instruction": "question", "output": "answer"}
    data = block(path, fields=fields, prompt_template="alpaca")
    assert texts(tmp_path, data) == [(PLAIN, "Hello.<|endoftext|>")]
