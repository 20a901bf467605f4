"""Evaluation without ranks: scores and their record, who reads it, and the data of each set."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from tests.support.data_cases import TOKENIZER, write_lengths, write_lines
from uspft.commands.train import summary
from uspft.config import Recipe, load
from uspft.config.inputs import DataBlock, Source
from uspft.data.corpus.corpus import Corpus
from uspft.data.corpus.prepare import prepare_sets
from uspft.data.faults import DataError
from uspft.job import Job, intervals
from uspft.metrics import Best, Journal, RunDisplay
from uspft.model import loss
from uspft.model.loss import Head
from uspft.objective.causal import Causal
from uspft.prepare.host import Invocation
from uspft.training.evaluate import Totals
from uspft.training.evaluate import record_of as evaluation_record

HERE = Invocation("")


def score(loss: float, targets: int) -> Totals:
    return {"loss": loss, "target_tokens": targets}


SCORES = {"a.jsonl": score(30.0, 10), "b.jsonl": score(4.0, 30)}
CAUSAL = Causal(object())


def record_of(step: int, scores: dict[str, Totals], seconds: float) -> dict[str, Any]:
    return evaluation_record(step, scores, seconds, CAUSAL)


def test_sets_count_by_their_targets() -> None:
    record = record_of(7, SCORES, 1.5)
    both = 34.0 / 40
    assert record == {
        "step": 7,
        "eval_loss": both,
        "eval_perplexity": math.exp(both),
        "eval_target_tokens": 40,
        "eval_seconds": 1.5,
        "eval_sets": {
            "a.jsonl": {"loss": 3.0, "perplexity": math.exp(3.0), "target_tokens": 10},
            "b.jsonl": {"loss": 4 / 30, "perplexity": math.exp(4 / 30), "target_tokens": 30},
        },
    }
    assert "eval_sets" not in record_of(7, {"a.jsonl": SCORES["a.jsonl"]}, 1.5)


@pytest.mark.parametrize("total", [math.nan, math.inf, 1e6])
def test_what_is_not_finite_is_null(total: float) -> None:
    record = record_of(1, {"a": score(total, 2)}, 0.0)
    assert record["eval_loss"] == (5e5 if total == 1e6 else None)
    assert record["eval_perplexity"] is None
    json.dumps(record, allow_nan=False)


def test_a_set_without_anything_that_is_counted_has_no_loss() -> None:
    record = record_of(1, {"a": score(0.0, 0)}, 0.0)
    assert record["eval_loss"] is None and record["eval_target_tokens"] == 0


def test_it_is_shown_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with RunDisplay(9, 0, is_main=True) as display:
        first = record_of(7, SCORES, 1.5)
        display.evaluation(first, Best())
        display.evaluation(record_of(8, {"a": score(math.nan, 1_000)}, 1.5), Best.of([first]))
    assert capsys.readouterr().out.splitlines() == [
        "evaluation after step 7: loss 0.8500  perplexity 2.3396  40 tokens"
        "  (a.jsonl 3.0000, b.jsonl 0.1333)",
        "evaluation after step 8: loss not finite  perplexity not finite  1,000 tokens"
        "  best 0.8500 after step 7",
    ]


def test_the_journal_keeps_an_evaluation_with_its_step(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    assert journal.evaluations() == []
    for step in (1, 2, 3):
        journal.write({"step": step, "loss": 1.0})
        if step != 2:
            journal.write(record_of(step, SCORES, 0.0))
    assert [record["step"] for record in journal.evaluations()] == [1, 3]
    journal.cut_back(2)
    assert [record["step"] for record in journal.evaluations()] == [1]
    journal.cut_back(1)
    assert [record["step"] for record in journal.evaluations()] == [1]


def recipe(folder: Path, **data: Any) -> Recipe:
    tree = {
        "output_dir": str(folder),
        "model": {"name_or_path": "x"},
        "data": {"train": "x", "sequence_length": 16, **data},
        "training": {"steps": 3, "global_batch_size": 1},
    }
    (folder / "r.yaml").write_text(json.dumps(tree))
    return load(folder / "r.yaml").recipe


def test_the_summary_tells_both_kinds_of_loss_apart(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step, (trained, evaluated) in enumerate([(5.0, 40.0), (4.0, math.nan), (3.0, 20.0)], 1):
        journal.write({"step": step, "loss": trained})
        journal.write(record_of(step, {"a": score(evaluated, 10)}, 0.0))
    said = summary(recipe(tmp_path, eval="x"), Path("r.yaml"), [], HERE, chats=False).splitlines()
    assert said[0].startswith("done: loss 5.000 → 3.000 ")
    assert said[1] == "evaluation: loss 4.000 → 2.000"
    journal.write(record_of(4, {"a": score(35.0, 10)}, 0.0))
    said = summary(recipe(tmp_path, eval="x"), Path("r.yaml"), [], HERE, chats=False).splitlines()
    assert said[1] == "evaluation: loss 4.000 → 3.500, best 2.000 after step 3"
    without = summary(recipe(tmp_path), Path("r.yaml"), [], HERE, chats=False).splitlines()
    assert without[0] == said[0], "goes on from a run that evaluated"
    assert not any(line.startswith("evaluation") for line in without)


def test_no_gradient_is_worked_out_under_no_grad(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    head = Head(nn.Linear(8, 13).weight, tile=3)
    inputs = torch.randn(10, 8), torch.randint(0, 13, (10,)), torch.arange(10)
    made = []
    kept = loss.Gradients
    monkeypatch.setattr(loss, "Gradients", lambda *of: made.append(1) or kept(*of))
    with torch.no_grad():
        alone = head(*inputs, 1.0)
    assert not made and not alone.requires_grad
    assert torch.equal(head(*inputs, 1.0), alone) and made


def test_sets_are_prepared_apart_and_named(tmp_path: Path) -> None:
    one = write_lengths(tmp_path / "one.jsonl", [3, 5])
    two = write_lengths(tmp_path / "two.jsonl", [4])
    data = DataBlock(train=str(one), eval=[str(two), str(one)], sequence_length=16)
    found = prepare_sets(data, None, 10_000, tmp_path / "cache")
    assert list(found) == [str(two), str(one)]
    lengths = [Corpus.open(folder).lengths.tolist() for folder in found.values()]
    assert lengths == [[4], [3, 5]]
    without = data.model_copy(update={"eval": None})
    assert prepare_sets(without, None, 10_000, tmp_path / "cache") == {}


def test_a_set_is_titled_by_what_chooses_it() -> None:
    titles = [Source(path="org/name", **more).title for more in ({}, {"split": "test"})]
    assert titles == ["org/name", "org/name (test)"]
    assert Source(path="org/name", name="en", split="test").title == "org/name (en, test)"


def test_a_fault_of_a_set_names_its_own_key(tmp_path: Path) -> None:
    good = write_lengths(tmp_path / "good.jsonl", [3])
    empty = write_lines(tmp_path / "empty.jsonl", [])
    untrained = write_lines(tmp_path / "no.jsonl", [{"input_ids": [5, 6], "labels": [-100, -100]}])
    text = write_lines(tmp_path / "text.jsonl", [{"text": "hi"}])
    long = write_lengths(tmp_path / "long.jsonl", [3, 17])
    cases: list[tuple[Any, str, str]] = [
        (str(empty), "data.eval", "no sample is left"),
        ([str(good), str(untrained)], "data.eval[1]", "no token of any sample is trained"),
        ([str(good), str(tmp_path / "nowhere")], "data.eval[1].path", "does not exist"),
        ([str(text)], "data.train_on", "text data has no answers (read for data.eval)"),
        ([str(text), str(good)], "model.tokenizer", "(read for data.eval[0])"),
    ]
    for sets, key, what in cases:
        on = "last" if key == "data.train_on" else "assistant"
        bad = "skip" if sets == str(empty) else "error"  # else the file itself is named
        data = DataBlock(
            train=str(good), eval=sets, sequence_length=16, train_on=on, on_bad_sample=bad
        )
        tokenizer = None if key == "model.tokenizer" else str(TOKENIZER)
        with pytest.raises(DataError) as caught:
            prepare_sets(data, tokenizer, 10_000, tmp_path / "cache")
        ((found, said, remedy),) = caught.value.findings
        assert found == key and what in said and remedy
    data = DataBlock(train=str(good), eval=str(long), sequence_length=16)
    with pytest.raises(DataError, match=r"long\.jsonl:2: 17 tokens, a row has 16; set data\.over"):
        prepare_sets(data, None, 100_000, tmp_path / "cache")


@pytest.mark.parametrize("steps", [1, 7, 95, 1000])
def test_a_share_of_all_steps_is_that_of_transformers(tmp_path: Path, steps: int) -> None:
    args = TrainingArguments(tmp_path, save_strategy="steps", eval_strategy="steps")
    for every in (0.1, 0.25, 0.3, 1 / 3, 1, 40):
        args.save_steps, state = every, TrainerState()
        state.compute_steps(args, steps)
        want = [step for step in range(1, steps + 1) if step % state.save_steps == 0]
        assert list(intervals(every, steps)) == want, every
    assert list(intervals(None, steps)) == []
    assert intervals(0.07, 100)[0] == 7, "not 8, as floats round"


def test_ranks_are_told_of_the_steps_that_save_and_evaluate(tmp_path: Path) -> None:
    job = Job(recipe(tmp_path), tmp_path / "c", 900, {}, saved_by_epochs=(3, 7), resume_from=None)
    job.write(tmp_path)
    assert Job.read(tmp_path).saved_steps == (3, 7) and job.saves == 3
    assert list(replace(job, saved_by_epochs=()).saved_steps) == [500]


def test_ranks_are_told_of_the_sets(tmp_path: Path) -> None:
    sets = {"a.jsonl": tmp_path / "a", "b.jsonl": tmp_path / "b"}
    job = Job(recipe(tmp_path, eval=["a.jsonl", "b.jsonl"]), tmp_path / "c", 3, {}, sets)
    job.write(tmp_path)
    assert Job.read(tmp_path).evaluation == sets
    assert list(Job.read(tmp_path).evaluation) == ["a.jsonl", "b.jsonl"]
    # Contents must agree between hosts, where the files lie need not.
    moved = Job(recipe(tmp_path, eval="/z"), tmp_path / "c", 3, {}, {"z": Path("/z/a")})
    only = Job(recipe(tmp_path, eval="/y"), tmp_path / "c", 3, {}, {"y": Path("/y/a")})
    assert moved.fingerprint() == only.fingerprint() != job.fingerprint()
