"""Fields beside those of a shape: honoured, refused by name, or told; none is lost in silence."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from transformers import AutoTokenizer

from tests.support.data_cases import TEMPLATES, TOKENIZER, write_lines
from tests.support.refused import Ground
from uspft.__main__ import main
from uspft.data.corpus.corpus import Corpus, corpora_in

ASKED, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
WRONG = {"role": "assistant", "content": "Go away"}
HUMAN, GPT = {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}
RUDE = {"from": "gpt", "value": "Go away"}
PAIR = {"prompt": "Hi", "completion": "Hello"}
ALPACA = {"instruction": "Hi", "input": "", "output": "Hello"}
CHAT = {"messages": [ASKED, ANSWER]}
SHARE = {"conversations": [HUMAN, GPT]}
SEEN = {**CHAT, "messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER]}
UNWANTED = "says that the answer is not wanted, and nothing here trains on preferences; "
PREFERS = "is there, and nothing here trains on preferences; "
ANSWERS = "for the answers beside it alone write data.fields: "
CHOSEN = "for the chosen answers alone write data.fields: "
NO_SHAPE = "no shape has the fields "
OPENAI = {
    "input": {"messages": [ASKED], "tools": [], "parallel_tool_calls": True},
    "preferred_output": [ANSWER],
    "non_preferred_output": [WRONG],
}
UNTRAINED = "says that the sample is not to train; data.on_bad_sample: skip trains on the others"
MEDIA = "is there, and only text is trained; leave such records out, or write data.fields: "

# By what it is: the record, and the line that refuses it, behind the file and its number.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "TRL's KTO": ({**PAIR, "label": False}, f"label {UNWANTED}data.on_bad_sample: skip"),
    "ms-swift's KTO": ({**CHAT, "label": False}, f"label {UNWANTED}data.on_bad_sample: skip"),
    "LLaMA-Factory's KTO": ({**SHARE, "kto_tag": False}, f"kto_tag {UNWANTED}data.on_bad_sample"),
    "KTO of Alpaca": ({**ALPACA, "kto_tag": False}, f"kto_tag {UNWANTED}data.on_bad_sample"),
    "KTO as a number": ({**PAIR, "label": 0}, f"label {UNWANTED}data.on_bad_sample: skip"),
    "a rejected answer": (
        {**CHAT, "rejected_response": "Go away"},
        f"rejected_response {PREFERS}{ANSWERS}{{rejected_response: null}}",
    ),
    "rejected turns": (
        {**CHAT, "rejected_messages": [ASKED, WRONG]},
        f"rejected_messages {PREFERS}{ANSWERS}{{rejected_messages: null}}",
    ),
    "a pair with a rejected": (
        {**PAIR, "rejected": "Go away"},
        f"rejected {PREFERS}{ANSWERS}{{rejected: null}}",
    ),
    "LLaMA-Factory's preferences": (
        {"conversations": [HUMAN], "chosen": GPT, "rejected": RUDE},
        f"chosen {PREFERS}for the chosen answers alone write "
        "data.fields: {prompt: conversations, completion: chosen}",
    ),
    "preferences of conversations": (
        {**CHAT, "chosen": [ASKED, ANSWER], "rejected": [ASKED, WRONG]},
        f"chosen {PREFERS}for the chosen answers alone write data.fields: {{messages: chosen}}",
    ),
    "preferences of Alpaca": (
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "Go away"},
        "no shape has the fields instruction, input, chosen, rejected; nothing here trains on "
        "preferences; for the chosen answers alone write data.fields: {output: chosen}",
    ),
    "OpenAI's preferences": (
        OPENAI,
        f"{NO_SHAPE}input, preferred_output, non_preferred_output; nothing here trains on "
        f"preferences; {CHOSEN}{{output: preferred_output}}",
    ),
    "more beside the turns of a question": (
        {"input": {"messages": [ASKED], "metadata": {"a": "b"}}, "output": [ANSWER]},
        "input.metadata is there, and of such an object messages and tools are taken; take it out",
    ),
    "preferences, the other way around": (
        {"prompt": "Hi", "response_chosen": "Hello", "response_rejected": "Go away"},
        f"{NO_SHAPE}prompt, response_chosen, response_rejected; nothing here trains on "
        f"preferences; {CHOSEN}{{completion: response_chosen}}",
    ),
    "preferences of token ids": (
        {"input_ids": [5, 6], "rejected_input_ids": [5, 7]},
        f"rejected_input_ids {PREFERS}{ANSWERS}{{rejected_input_ids: null}}",
    ),
    "preferences of token ids with labels": (
        {
            "chosen_input_ids": [5, 6],
            "chosen_labels": [-100, 6],
            "rejected_input_ids": [5, 7],
            "rejected_labels": [-100, 7],
        },
        f"{NO_SHAPE}chosen_input_ids, chosen_labels, rejected_input_ids, rejected_labels; nothing "
        f"here trains on preferences; {CHOSEN}{{input_ids: chosen_input_ids, labels: "
        "chosen_labels}",
    ),
    "LLaMA-Factory's older preferences": (
        {"instruction": "Hi", "input": "", "output": ["Hello", "Go away"]},
        "output is a list of answers, as preferences are, and nothing here trains on preferences; "
        "write the one to train on alone, as a string",
    ),
    "a list of completions": (
        {"prompt": "Hi", "completion": ["Hello", "Go away"]},
        "completion is a list of answers, as preferences are, ",
    ),
    **{
        f"{key} of a record": ({**record, key: no}, f"{key} {UNTRAINED}")
        for record, key, no in (
            (CHAT, "weight", 0),
            (PAIR, "train", False),
            (ALPACA, "loss", 0.0),
            (SHARE, "training", "false"),
        )
    },
    "turns under two names": (
        {**CHAT, **SHARE},
        "conversations is there together with messages; write data.fields: {conversations: null} "
        "to take messages, or {messages: conversations}",
    ),
    "a history of messages": (
        {**CHAT, "history": [["Hi", "Hello"]]},
        "history is there together with messages; write data.fields: {history: null} to take "
        "messages alone",
    ),
    "system messages under two names": (
        {**ALPACA, "system": "Be brief.", "system_prompt": "Be long."},
        "system_prompt is there together with system; write data.fields: {system_prompt: null} to "
        "take system, or {system: system_prompt}",
    ),
    "images": ({**SEEN, "images": ["a.png"]}, f"images {MEDIA}{{images: null}}"),
    "videos": ({**SEEN, "videos": ["a.mp4"]}, f"videos {MEDIA}{{videos: null}}"),
    "audios": ({**SHARE, "audios": ["a.wav"]}, f"audios {MEDIA}{{audios: null}}"),
    "an image of a pair": ({**PAIR, "image": "a.png"}, f"image {MEDIA}{{image: null}}"),
    "an image of a text": ({"text": "Hi", "image": "a.png"}, f"image {MEDIA}{{image: null}}"),
    "an image of a turn": (
        {"messages": [{**ASKED, "images": ["a.png"]}, ANSWER]},
        "messages[0].images is there, and only text is trained; ",
    ),
    "a part of a turn": (
        {"messages": [ASKED, {**ANSWER, "train_detail": [{"begin_offset": 0, "train": False}]}]},
        "messages[1].train_detail chooses parts of a turn, ",
    ),
    "a weight of a turn": (
        {"messages": [ASKED, {**ANSWER, "loss_scale": 0.5}]},
        "messages[1].loss_scale weighs a turn, ",
    ),
    "no mask": (
        {"messages": [ASKED, {**ANSWER, "loss": 0.5}]},
        "messages[1].loss is 0.5; write 0 or 1, or take it out of the turn",
    ),
    "masks that differ": (
        {"messages": [ASKED, {**ANSWER, "loss": False, "weight": 1}]},
        "messages[1] has weight 1 and loss 0; leave one of them out",
    ),
    "history of another form": ({**ALPACA, "history": ["Hi"]}, "history[0] is no question and ans"),
    "padding": (
        {"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]},
        "attention_mask hides 1 of 3 tokens; leave padding out of input_ids",
    ),
}

# By what it is: the record, and which text of it trains.
HONOURED: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        f"{key} of a turn": ({"messages": [ASKED, {**WRONG, key: no}, ASKED, ANSWER]}, ["Hello"])
        for key, no in (("loss", False), ("train", False), ("training", False), ("weight", 0))
    },
    "train of ShareGPT": ({"conversations": [HUMAN, {**RUDE, "train": 0}, HUMAN, GPT]}, ["Hello"]),
    "training, as axolotl has it": (
        {"messages": [{**ASKED, "training": False}, {**ANSWER, "training": True}]},
        ["Hello"],
    ),
    "history": ({**ALPACA, "history": [["Morning", "Good morning"]]}, ["Good morning", "Hello"]),
    "a wanted answer": ({**CHAT, "label": True}, ["Hello"]),
    "a record that trains": ({**CHAT, "weight": 1, "train": True, "loss": None}, ["Hello"]),
    "one system message under two names": (
        {**CHAT, "system": "Be brief.", "system_prompt": "Be brief."},
        ["Hello"],
    ),
    "a mask of tokens": ({"input_ids": [5, 6, 7], "completion_mask": [0, 0, 1]}, ["$"]),
    "empty fields": (
        {**CHAT, "images": [], "label": None, "rejected": "", "history": [], "audios": [None]},
        ["Hello"],
    ),
}
LEADS = {
    "ShareGPT's system_prompt": {**SHARE, "system_prompt": "Be brief."},
    "a system of messages": {**CHAT, "system": "Be brief."},
    "a system of Alpaca": {**ALPACA, "system": "Be brief."},
}


def use(ground: Ground, path: Path, **data: Any) -> None:
    """The recipe with this data, and the shipped tokenizer and chat template."""
    config = f"{ground.recipe['model']['name_or_path']}/config.json"
    sized = {"model.name_or_path": None, "model.config": config, "model.tokenizer": str(TOKENIZER)}
    sized |= {"model.overrides": {"vocab_size": 8192}, "data.sequence_length": 256}
    sized |= {"data.chat_template": str(TEMPLATES / "chatml.jinja")}
    ground.write({**sized, "data.train": str(path), **{f"data.{k}": v for k, v in data.items()}})


def told(ground: Ground, capsys: pytest.CaptureFixture[str], verb: str) -> list[str]:
    """What a command says that finds nothing wrong."""
    assert main([verb, str(ground.path)]) == 0, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def corpus_of(ground: Ground) -> Corpus:
    (folder,) = corpora_in(ground.folder.parent / "cache/uspft/data")
    return Corpus.open(folder)


def trained(corpus: Corpus, sample: int = 0) -> list[str]:
    """The texts of a sample that train, each without the token that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    found, labels = [[]], corpus.sample(sample).labels.tolist()  # type: ignore[var-annotated]
    for label in labels:
        if label == -100:
            found.append([])
        else:
            found[-1].append(label)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found if ids]


@pytest.mark.parametrize("case", REFUSED)
def test_a_field_that_means_something_else_is_refused(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    record, want = REFUSED[case]
    path = write_lines(ground.folder / "d.jsonl", [record])
    use(ground, path)
    for verb in ("check", "preprocess", "train"):
        (line,) = ground.call(capsys, verb, str(ground.path)).lines
        assert line.startswith(f"{path}:1: {want}"), line


@pytest.mark.parametrize("case", HONOURED)
def test_a_field_whose_meaning_is_known_is_honoured(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    record, texts = HONOURED[case]
    use(ground, write_lines(ground.folder / "d.jsonl", [record]))
    for verb in ("check", "preprocess"):
        assert not [line for line in told(ground, capsys, verb) if "not used" in line]
    assert trained(corpus_of(ground)) == texts


@pytest.mark.parametrize("case", LEADS)
def test_a_system_message_leads(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    use(ground, write_lines(ground.folder / "d.jsonl", [LEADS[case]]))
    for verb in ("check", "preprocess"):
        assert not [line for line in told(ground, capsys, verb) if "not used" in line]
    corpus = corpus_of(ground)
    text = AutoTokenizer.from_pretrained(TOKENIZER).decode(corpus.sample(0).ids.tolist())
    assert "system\nBe brief.<|im_end|>" in text and trained(corpus) == ["Hello"]


def test_other_fields_are_told_once_a_source(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{**PAIR, "score": 3}, {**PAIR, "id": "a", "label": "maths"}, {**PAIR, "score": 4}]
    path = write_lines(ground.folder / "d.jsonl", records)
    use(ground, path)
    line = f"data: {path}: not used: score, label, id"
    for verb in ("check", "preprocess", "preprocess", "inspect"):  # the third from the cache
        assert told(ground, capsys, verb).count(line) == 1, verb
    assert main(["train", str(ground.path)]) == 1 and ground.started  # ranks are stood in for
    assert capsys.readouterr().out.splitlines().count(line) == 1
    ground.started.clear()
    page = ground.folder / "page.html"
    assert main(["inspect", str(ground.path), "--html", str(page)]) == 0
    assert f"{path}: not used: score, label, id" in page.read_text()
    use(ground, path, unused_fields="error")
    remedy = "; take them out of the data, or write data.unused_fields: list"
    for verb in ("check", "preprocess", "train"):  # the tokens are in the cache
        (found,) = ground.call(capsys, verb, str(ground.path)).lines
        assert found == line.removeprefix("data: ") + remedy
    told_of = [{**PAIR, "kto_tag": True}, PAIR]
    use(ground, write_lines(ground.folder / "e.jsonl", told_of), unused_fields="error")
    told(ground, capsys, "check")


def test_each_source_and_evaluation_set_is_told(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ground.folder / "many"
    folder.mkdir()
    for i in range(12):
        write_lines(folder / f"{i}.jsonl", [{**PAIR, f"a{i % 3}": 1}])
    path = write_lines(ground.folder / "e.jsonl", [{**PAIR, "score": 3}])
    use(ground, folder, eval=str(path))
    lines = [f"{folder}: not used: a0, a1, a2", f"{path}: not used: score"]
    assert [one for one in told(ground, capsys, "check") if "not used" in one] == [
        f"data: {line}" for line in lines
    ]
    found = [one for one in told(ground, capsys, "preprocess") if "not used" in one]
    assert found == [f"data: {lines[0]}", f"evaluation data {path}: {lines[1]}"]


def test_keys_of_turns_that_no_template_reads(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"messages": [{**ASKED, "name": "a", "mood": "glad"}, {**ANSWER, "rating": "bad"}]}
    path = write_lines(ground.folder / "d.jsonl", [record])
    use(ground, path)
    for verb in ("check", "preprocess"):
        assert f"data: {path}: not used: messages.mood, messages.rating" in told(
            ground, capsys, verb
        )
    reads = (TEMPLATES / "chatml.jinja").read_text() + "{{- messages[0].mood }}"
    (ground.folder / "a.jinja").write_text(reads)
    use(ground, path, chat_template=str(ground.folder / "a.jinja"))
    assert f"data: {path}: not used: messages.rating" in told(ground, capsys, "check")


def test_what_the_recipe_says_to_leave_alone(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
        ({**PAIR, "label": False}, {"label": None}, ["Hello"]),
        ({**SEEN, "images": ["a.png"]}, {"images": None}, ["Hello"]),
        ({**CHAT, "rejected_response": "No"}, {"rejected_response": None}, ["Hello"]),
        (
            {"conversations": [HUMAN], "chosen": GPT, "rejected": RUDE},
            {"prompt": "conversations", "completion": "chosen"},
            ["Hello"],
        ),
        ({"prompt": "Hi", "chosen": "Yo", "rejected": "No"}, {"completion": "chosen"}, ["Yo"]),
        (OPENAI, {"output": "preferred_output"}, ["Hello"]),
        (
            {"prompt": "Hi", "response_chosen": "Yo", "response_rejected": "No"},
            {"completion": "response_chosen"},
            ["Yo"],
        ),
        (
            {"input_ids": [5, 6], "rejected_input_ids": [5, 7]},
            {"rejected_input_ids": None},
            ["#"],
        ),
        (
            {
                "chosen_input_ids": [5, 6],
                "chosen_labels": [-100, 6],
                "rejected_input_ids": [5, 7],
            },
            {"input_ids": "chosen_input_ids", "labels": "chosen_labels"},
            ["#"],
        ),
        ({**CHAT, "weight": 0}, {"weight": None}, ["Hello"]),
        ({**CHAT, **SHARE}, {"conversations": None}, ["Hello"]),
        ({**CHAT, "conversations": [HUMAN, RUDE]}, {"messages": "conversations"}, ["Go away"]),
        ({**CHAT, "history": [["a", "b"]]}, {"history": None}, ["Hello"]),
        ({**CHAT, "system": "A.", "system_prompt": "B."}, {"system_prompt": None}, ["Hello"]),
    ]
    for i, (record, fields, texts) in enumerate(cases):
        use(ground, write_lines(ground.folder / f"{i}.jsonl", [record]), fields=fields)
        for verb in ("check", "preprocess"):
            assert not [line for line in told(ground, capsys, verb) if "not used" in line]
        assert trained(corpus_of(ground)) == texts
        assert main(["preprocess", str(ground.path), "--clean"]) == 0
    use(ground, ground.folder / "0.jsonl", fields={"label": "other"})
    ground.call(capsys, "check", str(ground.path)).about("data.fields.label", "expected null")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_mark_of_token_ids_is_no_list_of_labels(
    ground: Ground, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for value, hinted in (([5, 6], True), (False, False)):
        record = {"input_ids": [5, 6], "label": value}
        path = ground.folder / f"d.{kind}"
        write_lines(path, [record]) if kind == "jsonl" else write_table(path, [record])
        use(ground, path)
        if hinted:
            (line,) = ground.call(capsys, "check", str(ground.path)).lines
            assert line.endswith("write data.fields: {labels: label}, or null for it"), line
        else:
            assert f"data: {path}: not used: label" in told(ground, capsys, "check")


def test_unwanted_answers_are_left_out_where_the_recipe_says_so(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [{**PAIR, "label": True}, {"prompt": "Hi", "completion": "Go away", "label": False}]
    use(ground, write_lines(ground.folder / "d.jsonl", records), on_bad_sample="skip")
    for verb in ("check", "preprocess"):
        assert any("label says that the answer" in line for line in told(ground, capsys, verb))
    corpus = corpus_of(ground)
    assert len(corpus) == 1 and trained(corpus) == ["Hello"]


def write_table(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as handle:
            table = csv.DictWriter(handle, list(records[0]))
            table.writeheader()
            table.writerows(records)
    else:
        pq.write_table(pa.Table.from_pylist(records), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_of_tables(ground: Ground, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    row = {"prompt": "Hi", "completion": "Hello", "label": True, "score": 3, "note": None}
    path = write_table(ground.folder / f"d.{kind}", [row, row])
    use(ground, path)
    for verb in ("check", "preprocess"):
        assert f"data: {path}: not used: score" in told(ground, capsys, verb)
    other = write_table(ground.folder / f"e.{kind}", [row, {**row, "label": False}])
    use(ground, other)
    for verb in ("check", "preprocess"):
        (line,) = ground.call(capsys, verb, str(ground.path)).lines
        assert line.startswith(f"{other}:{3 if kind == 'csv' else 2}: label {UNWANTED}"), line
    use(ground, other, fields={"label": None})
    told(ground, capsys, "check")


def test_pairs_as_plain_text_beside_a_chat_template(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_table(ground.folder / "qa.csv", [{"question": "Hi", "answer": "Hello"}])
    use(ground, path)
    line = (
        "data: question and answer records train as plain text, not in the chat template; "
        "data.format: messages puts them there"
    )
    for verb in ("check", "preprocess"):
        assert told(ground, capsys, verb).count(line) == 1, verb
    use(ground, path, format="messages")
    for verb in ("check", "preprocess"):
        assert line not in told(ground, capsys, verb)


def test_what_a_conversation_alone_has_is_refused_in_plain_text(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("system", "Be brief."), ("history", [["a", "b"]]), ("tools", [{"a": 1}])):
        path = write_lines(ground.folder / "d.jsonl", [{**ALPACA, name: value}])
        use(ground, path, format="prompt_completion")
        (line,) = ground.call(capsys, "check", str(ground.path)).lines
        assert line == (
            f"{path}:1: {name} has no place in plain text, which prompt_completion is; "
            f"write data.format: messages, or data.fields: {{{name}: null}}"
        )
    assert json.loads(path.read_text())["tools"]


def test_columns_of_a_saved_data_set(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    from datasets import Dataset

    row: dict[str, Any] = {
        "instruction": "Hi",
        "output": "Hello",
        "system_prompt": "Be brief.",
        "score": 3,
    }
    for name, more, want in (("good", {"kto_tag": None}, None), ("bad", {}, "x.png")):
        row |= {"note": None, "images": [], **more}
        rows = [row, {**row, "images": [want] if want else []}]
        path = ground.folder / name
        Dataset.from_list(rows).save_to_disk(str(path))
        use(ground, path)
        if want:
            (line,) = ground.call(capsys, "check", str(ground.path)).lines
            assert line.startswith(f"{path}:2: images {MEDIA}{{images: null}}"), line
            continue
        for verb in ("check", "preprocess"):
            told_of = [line for line in told(ground, capsys, verb) if "not used" in line]
            assert told_of == [f"data: {path}: not used: score"]
        assert trained(corpus_of(ground)) == ["Hello"]
