"""A save beside the steps that follow: the same bytes, one at a time, whole or not there."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_documents, make_model
from tests.support.ranks import spawn
from tests.support.runs import run_recipe, small_recipe
from uspft.checkpoint.folder import Checkpoint, folder_of

RANKS, ROW, STEPS, SLOW_SECONDS = 2, 32, 4, 0.3
BAD_STEP = 2


def recipe(folder: Path, data: Path, *, overlap: bool, **training: Any) -> dict[str, Any]:
    return small_recipe(
        folder / "model",
        data,
        ROW,
        parallel_config={"context_parallel": RANKS, "context_parallel_algo": "ring_cp"},
        training={"steps": STEPS, **training},
        checkpoint={"every_steps": 1, "keep_last": 9, "overlap": overlap},
    )


def work(rank: int, folder: Path, data: Path) -> dict[str, list[str]]:
    """Two runs whose files take long to be written, and what happened in the order in which it did:
    steps that begin, saves that begin, and saves that are named. And two that end while a save is
    written beside their steps: at a bad step, and by an error of what writes."""
    from uspft.checkpoint import save
    from uspft.engine.step import NotFinite
    from uspft.engine.zero import ZeroEngine

    plain, step, begin, finish = (
        save.write_part,
        ZeroEngine.step,
        save.Save.__init__,
        save.Save.finish,
    )
    events: list[str] = []

    def slowly(*given: Any) -> Any:
        time.sleep(SLOW_SECONDS)
        return plain(*given)

    def noted(what: str, inner: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            events.append(what)
            return inner(*given, **more)

        return call

    def named(*given: Any, **more: Any) -> Any:
        size = finish(*given, **more)
        events.append("named")
        return size

    def is_bad(self: Any, *given: Any, **more: Any) -> Any:
        result = step(self, *given, **more)
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken == BAD_STEP:
            raise NotFinite("the loss is nan", result)
        return result

    def fails(*given: Any) -> Any:
        raise ValueError("of the thread that writes")

    found = {}
    save.write_part = slowly
    ZeroEngine.step = noted("step", step)  # type: ignore[method-assign]
    save.Save.__init__ = noted("save", begin)  # type: ignore[method-assign]
    save.Save.finish = named  # type: ignore[method-assign]
    try:
        for name in ("in turn", "beside"):
            events.clear()
            run_recipe(recipe(folder, data, overlap=name == "beside"), folder / name)
            found[name] = list(events)
        for name, part, taken, error in (
            ("bad step", slowly, is_bad, NotFinite),
            ("fails", fails, step, ValueError),
        ):
            save.write_part, ZeroEngine.step = part, taken  # type: ignore[method-assign]
            with pytest.raises(error):
                run_recipe(recipe(folder, data, overlap=True), folder / name)
    finally:
        save.write_part, ZeroEngine.step = plain, step  # type: ignore[method-assign]
        save.Save.__init__, save.Save.finish = begin, finish  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    folder = tmp_path_factory.mktemp("overlap")
    make_model(folder / "model", "llama")
    data = make_documents(folder / "d.jsonl", [ROW] * STEPS, masked=[0.0]).path
    found, other = spawn(RANKS, work, folder, data)
    assert found == other
    return folder, found


def test_steps_are_taken_while_a_save_is_written_and_the_next_save_waits(
    ran: tuple[Path, dict[str, list[str]]],
) -> None:
    _, events = ran
    assert events["in turn"] == ["step", "save", "named"] * STEPS
    # Each save but the last is still under way when the next step begins, and named before the
    # next save begins.
    beside = ["step", "save", *["step", "named", "save"] * (STEPS - 1), "named"]
    assert events["beside"] == beside


def test_the_same_bytes_are_on_the_disk(ran: tuple[Path, dict[str, list[str]]]) -> None:
    folder, _ = ran
    for step in range(1, STEPS + 1):
        one, other = (folder_of(folder / name, step) for name in ("in turn", "beside"))
        states = [Checkpoint.open(at).state for at in (one, other)]
        for key in ("files", "parts", "course", "adam_steps", "step"):
            assert states[0][key] == states[1][key]
        parts = sorted(set(states[0]["files"].values()))
        assert len(parts) == RANKS
        assert all((one / name).read_bytes() == (other / name).read_bytes() for name in parts)


def test_a_save_under_way_is_finished_where_a_bad_step_ends_the_run(
    ran: tuple[Path, dict[str, list[str]]],
) -> None:
    assert Checkpoint.open(folder_of(ran[0] / "bad step", BAD_STEP - 1)).step == BAD_STEP - 1


def test_what_could_not_be_written_gets_no_name(ran: tuple[Path, dict[str, list[str]]]) -> None:
    checkpoints = ran[0] / "fails/checkpoints"
    assert [at.name for at in checkpoints.iterdir()] == [".step-00000001.partial"]


@pytest.mark.parametrize("name", ["in turn", "beside"])
def test_each_save_is_in_the_journal(ran: tuple[Path, dict[str, list[str]]], name: str) -> None:
    out = ran[0] / name
    records = [json.loads(line) for line in (out / "metrics.jsonl").open()]
    saves = [one for one in records if "save_bytes" in one]
    assert [one["step"] for one in saves] == list(range(1, STEPS + 1))
    for one in saves:
        files = [f for f in folder_of(out, one["step"]).rglob("*") if f.is_file()]
        assert one["save_bytes"] == sum(file.stat().st_size for file in files)
        assert SLOW_SECONDS <= one["save_seconds"] < 60
        assert (one["save_waited_seconds"] < one["save_seconds"]) == (name == "beside") or (
            name == "in turn"
        )
