"""The command that verifies: its exit code, and the words that it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_documents, make_model
from tests.support.refused import Ground
from tests.support.verify import REFERENCE, result
from uspft.__main__ import main
from uspft.planner.ways import MAX_LAYOUTS
from uspft.verify import work as verify_work
from uspft.verify.work import Measured, Result, VerifyJob


@pytest.fixture
def ranks_answer(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the layouts' ranks leave, in turn, in place of running; the one process leaves 2.0."""
    answers: list[Result] = []

    def answer(words: Any, *rest: Any, **more: Any) -> int:
        work = VerifyJob.read(Path(words[0]))
        if work.is_reference:
            Result(REFERENCE, {}).leave(work.folder / verify_work.REFERENCE)
            return 0
        for one in answers[: len(work.layouts)]:
            one.leave(work.folder / verify_work.LAYOUTS)
        return 0 if answers else 1

    monkeypatch.setattr("uspft.commands.verify.start_ranks", answer)
    return answers


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A recipe to verify on two ranks; its output folder is beside it."""
    make_model(tmp_path / "model", "llama")
    given = {
        "model": {"name_or_path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path)},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
        "output_dir": str(tmp_path / "out"),
    }
    given["data"] |= {"sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "r.yaml").write_text(json.dumps(given))
    return tmp_path / "r.yaml"


@pytest.fixture
def verify(
    ranks_answer: list[Result], written: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Any]:
    """By the results of layouts and the words of the command: its exit code, verdict and output."""

    def run(results: list[Result], words: list[str]) -> tuple[int, str | None, str]:
        ranks_answer.extend(results)
        code = main(["verify", str(written), *words])
        path = written.parent / "out" / "verify" / "verify.json"
        verdict = json.loads(path.read_text())["verdict"] if path.exists() else None
        return code, verdict, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("last", "words", "code", "verdict"),
    [
        (result(), [], 0, "equal"),
        (result(off=1e-3), [], 1, "differs"),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), [], 1, "differs"),
        (result(), ["--inject", "mask"], 1, "not caught"),
        (None, [], 1, None),
    ],
)
def test_the_command_says_it_by_its_exit_code(
    last: Result | None,
    words: list[str],
    code: int,
    verdict: str | None,
    verify: Callable[..., Any],
) -> None:
    results = [*[result(off=0.1 if words else 0.0)] * 7, last] if last else []
    *found, out = verify(results, words)
    assert found == [code, verdict]
    assert verdict is None or "8 layouts" in out


def test_the_yardstick_is_one_process_and_no_layout(
    written: Path, verify: Callable[..., Any]
) -> None:
    """Layouts that all answer the same are wrong together."""
    code, verdict, _ = verify([result(loss=2.1)] * 8, [])
    assert (code, verdict) == (1, "differs")
    found = json.loads((written.parent / "out/verify/verify.json").read_text())
    assert found["one_process"]["losses"] == REFERENCE.losses == [2.0]
    tried = [one for one in found["layouts"] if one["verdict"] != "not tried"]
    assert len(tried) == 8
    for one in tried:
        assert one["losses"] == [2.1] and one["verdict"] == "DIFFERS"
        assert one["wrong"] == ["loss off by 5.0e-02"]


@pytest.mark.parametrize("tail", [True, False])
def test_strategies_that_auto_chose_are_the_first_layout(
    tail: bool, ranks_answer: list[Result], written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = json.loads(written.read_text())
    lengths = [128, *[12, 30, 9, 50, 22, 41] * 4] if tail else [64] * 6
    make_documents(written.parent / "d.jsonl", lengths, masked=[0.0])
    tree["data"] |= {"sequence_length": 128, "packing": "none" if tail else "best_fit"}
    tree["training"]["global_batch_size"] = 64
    tree["parallel_config"] = {"strategies": "auto"}
    written.write_text(json.dumps(tree))
    ranks_answer.extend([result()] * MAX_LAYOUTS)
    code, out = main(["verify", str(written)]), capsys.readouterr().out
    found = json.loads((written.parent / "out/verify/verify.json").read_text())
    names = [one["name"] for one in found["layouts"]]
    assert (code, found["verdict"]) == (0, "equal")
    assert f"strategies: {'several layouts' if tail else 'one layout'}, since by the len" in out
    assert found["global_batch_size"] == (64 if tail else 32)  # of samples, or of rows
    assert {"ring2", "tensor2", "data2"} <= set(names)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--inject", "banana"], "unknown fault `banana`; write one of order, mask, scale, label"),
        (["--inject"], "unknown fault ``"),
        (["--steps", "0"], "`0` is no whole number above 0"),
        (["--ranks", "2"], "verify takes no such option; write launch.processes=N"),
        (["--quick"], "unknown option"),
        (["training.stepz=3"], "did you mean `steps`"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "model": {"config": "configs/models/quickstart.json", "tokenizer": "data/tokenizer"},
        "data": {"train": "README.md", "sequence_length": 64, "overlong": "split"},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
    }
    ground = Ground(tmp_path, tree)
    ground.write({})
    lines = ground.call(capsys, "verify", str(ground.path), *words).lines
    assert len(lines) == 1 and told in lines[0]
