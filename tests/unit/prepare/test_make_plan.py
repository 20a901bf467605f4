"""The step that is predicted for a recipe."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from tests.support.launch import ROOT
from tests.support.shapes import TINY
from uspft.config import Fault, RecipeError, dump
from uspft.config.strategies import row_lengths, strategies_of
from uspft.data.corpus.prepare import prepare
from uspft.launcher.meeting import Meeting
from uspft.prepare.examine import Examined, examine
from uspft.prepare.host import Invocation
from uspft.prepare.make_plan import (
    corpus_here,
    knowing_memory,
    lengths_of,
    prices_of,
    step_of,
    weighed_here,
    weighing,
)


@pytest.mark.parametrize(
    ("device", "asked", "overlaps"),
    [
        ("cuda", None, True),
        ("cuda", False, False),
        ("cpu", None, False),
        ("cpu", True, False),
    ],
)
def test_stage_3_overlaps_where_there_are_streams(
    device: str, asked: bool | None, overlaps: bool, tmp_path: Path
) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json")},
        "data": {"train": str(tmp_path / "d.jsonl"), "sequence_length": 64},
        "deepspeed": {"zero_optimization": {"stage": 3, "overlap_comm": asked}},
        "training": {"steps": 1, "global_batch_size": 2},
        "launch": {"device": device, "processes": 2},
    }
    if asked is None:
        tree["deepspeed"] = {"zero_optimization": {"stage": 3}}
    path = tmp_path / "r.yaml"
    path.write_text(json.dumps(tree))
    assert step_of(examine(path, [], 1, None, trains=False)).options.hides == overlaps


TENSOR = {"model_parallel": 2}
TOKENS = {**TENSOR, "use_seq_parallel": True}
RING = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}


def row_bytes(folder: Path, *layouts: dict[str, Any]) -> list[float]:
    """Of rows of 64, 128, … tokens on four ranks, each in its layout; the bytes of one token of the
    first."""
    (folder / "d.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    listed = [{"max_length": 64 << n, **layout} for n, layout in enumerate(layouts)]
    tree = {
        "model": {"config": str(ROOT / "configs/models/quickstart.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": listed[-1]["max_length"]},
        "parallel_config": {"strategies": listed},
        "training": {"steps": 1, "global_batch_size": 4},
        "launch": {"device": "cpu", "processes": 4},
    }
    path = folder / "r.yaml"
    path.write_text(json.dumps(tree))
    prices = prices_of(examine(path, [], 1, None))
    assert prices
    return [each / prices.row_bytes[0] * 64 for each in prices.row_bytes]


def test_a_row_takes_its_tokens_and_what_the_tensor_degree_leaves_of_each(tmp_path: Path) -> None:
    """The bound was once tokens alone: groups of whole matrices then took as many as the longest
    row has, each of which takes more where no matrix is split."""
    first, two, four = row_bytes(tmp_path, {}, RING, {**RING, "context_parallel": 4})
    assert first == 64 and 64 <= two < 64 * 1.5 and 64 <= four < 64 * 1.5
    assert row_bytes(tmp_path, {}, TOKENS) == pytest.approx([64, 64], rel=0.1)
    _, some = row_bytes(tmp_path, {}, TENSOR)
    assert 64 * 1.1 < some < 128 * 0.9
    _, more, both = row_bytes(tmp_path, {}, TENSOR, {**TENSOR, **RING})
    assert more == both == some


SIZES = {"model_type": "llama", **TINY}
ROW = 512
FLAT = [ROW] * 40
KEY = "parallel_config.strategies"


def tail() -> list[int]:
    random = Random(0)
    return [max(2, min(ROW, int(random.lognormvariate(2.5, 1.2)))) for _ in range(300)] + [ROW]


def written(folder: Path, lengths: list[int], **blocks: Any) -> Path:
    """A recipe with `strategies: auto` on two CPU processes, whose data has these lengths."""
    (folder / "config.json").write_text(json.dumps(SIZES))
    lines = [json.dumps({"input_ids": [1 + n % 90 for n in range(size)]}) for size in lengths]
    (folder / "d.jsonl").write_text("\n".join(lines))
    base: dict[str, Any] = {
        "model": {"config": str(folder / "config.json"), "dtype": "float32"},
        "data": {"train": str(folder / "d.jsonl"), "sequence_length": ROW, "packing": "none"},
        "parallel_config": {"strategies": "auto"},
        "training": {"steps": 2, "global_batch_size": 16},
        "launch": {"device": "cpu", "processes": 2},
    }
    file = folder / "r.yaml"
    tree = {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    file.write_text(yaml.safe_dump(tree))
    return file


def read(file: Path, *words: str) -> Examined:
    return examine(file, words, 1, None, trains=False)


def test_a_tail_becomes_a_list_that_reads_as_it_was_written(tmp_path: Path) -> None:
    open_yet = read(written(tmp_path, tail()))
    assert open_yet.is_open and open_yet.why_strategies is None and open_yet.strategies == []
    assert "2 processes, split as the lengths of the data ask" in open_yet.sentence
    found = weighing(open_yet, tail())
    lengths = row_lengths(found.recipe)
    assert len(lengths) > 1 and list(lengths) == sorted(set(lengths)) and lengths[-1] == ROW
    assert found.recipe.parallel_config.switching == "in_place" and not found.is_open
    assert found.recipe.training.global_batch_size == 16
    assert found.why_strategies and found.why_strategies.startswith("several layouts, since by the")
    assert len(found.strategies) == len(lengths)
    (tmp_path / "again.yaml").write_text(dump(found.recipe))
    again = read(tmp_path / "again.yaml", f"output_dir={found.recipe.output_dir}")
    assert again.recipe == found.recipe.model_copy(update={"model": again.recipe.model})


def test_without_a_tail_the_recipe_is_that_of_the_one_layout(tmp_path: Path) -> None:
    given = weighing(read(written(tmp_path, FLAT, data={"packing": "best_fit"})), FLAT)
    weighed = given.known.weighed
    assert weighed and weighed.choice.best_static and not strategies_of(given.recipe)
    best = weighed.choice.best_static.priced
    assert given.layout == best.layout
    words = ["strategies=null", f"model_parallel={best.layout.tensor}"]
    words += [f"context_parallel={best.layout.context}"]
    if best.layout.context > 1:
        words += [f"context_parallel_algo={best.row.name}"]
    static = read(tmp_path / "r.yaml", *(f"parallel_config.{word}" for word in words))
    assert given.recipe == static.recipe
    assert given.why_strategies and given.why_strategies.endswith("16 samples a step make 16 rows")


def test_packed_rows_of_one_layout_hold_as_many_samples_a_step(tmp_path: Path) -> None:
    halves = [ROW // 2] * 40
    found = weighing(read(written(tmp_path, halves, data={"packing": "best_fit"})), halves)
    assert not strategies_of(found.recipe)
    assert found.recipe.training.global_batch_size == 8


@pytest.mark.parametrize("keeps", [True, False])
def test_a_checkpoint_keeps_what_its_steps_count(tmp_path: Path, keeps: bool) -> None:
    """Samples where it has several layouts, rows where it has one: whatever is faster here."""
    found = weighing(read(written(tmp_path, tail() if not keeps else FLAT)), FLAT, keeps=keeps)
    assert bool(strategies_of(found.recipe)) == keeps
    assert found.why_strategies and "the checkpoint has " in found.why_strategies
    other = weighing(read(tmp_path / "r.yaml"), tail(), keeps=keeps)
    assert bool(strategies_of(other.recipe)) == keeps


def test_a_way_of_switching_that_is_asked_for_is_kept(tmp_path: Path) -> None:
    file = written(tmp_path, tail(), parallel_config={"switching": "move"})
    moved = weighing(read(file), tail(), keeps=True)
    assert moved.recipe.parallel_config.switching == "move"
    assert len({one.model_parallel for one in strategies_of(moved.recipe)}) > 1
    with pytest.raises(RecipeError, match="is 3, and with switching: move weights belong to owner"):
        read(file, "deepspeed.zero_optimization.stage=3")
    beside = read(file, "parallel_config.switching=in_place")
    assert weighing(beside, tail()).recipe.parallel_config.switching == "in_place"


WRONG = {
    "launch.processes=auto": f"{KEY}: is auto, and nothing says on how many processes; write",
    "parallel_config.context_parallel=2": "parallel_config.context_parallel: is 2, and "
    f"{KEY}: auto chooses the layouts; leave it out, or list {KEY}",
    "parallel_config.model_parallel=2": "parallel_config.model_parallel: is 2, and",
    "parallel_config.tensor_parallel_algo=meshslice": "tensor_parallel_algo: is meshslice, and",
    "deepspeed.zero_optimization.stage=0": "zero_optimization.stage: is 0, and layouts that switch",
}


@pytest.mark.parametrize("word", WRONG)
def test_what_speaks_against_it_is_named(tmp_path: Path, word: str) -> None:
    words = [word] + ["parallel_config.context_parallel_algo=auto"] * ("context" in word)
    with pytest.raises(RecipeError) as raised:
        read(written(tmp_path, tail()), *words)
    (line,) = map(str, raised.value.problems)
    assert WRONG[word] in line


def test_rows_for_which_no_rank_has_room_are_refused(tmp_path: Path) -> None:
    """By the memory of the host that has least, whatever this one has."""

    class Other(Meeting):
        def least(self, name: str, mine: int, limit_seconds: float) -> int:
            return min(mine, 1 << 20)

    with pytest.raises(Fault) as raised:
        weighing(knowing_memory(read(written(tmp_path, tail())), Other()), tail())
    ((key, what, remedy),) = raised.value.findings
    assert key == KEY and "1 × 512 tokens in 0.000488 GiB a rank" in what
    assert remedy.startswith("take shorter rows")


def test_lengths_are_those_of_the_tokenised_data_or_of_its_first_records(tmp_path: Path) -> None:
    """Once a run has tokenised the data, they are all of them; before, those that were looked at,
    as `overlong` leaves them."""
    sizes = [ROW + 8, *tail()]
    found = read(written(tmp_path, sizes, data={"overlong": "split"}))
    place = Invocation("", cache=tmp_path)
    assert corpus_here(found, place, None) is None
    looked_at = weighed_here(found, place, None, sizes)
    assert looked_at.known.weighed and looked_at.known.weighed.source == "first records"
    split = sorted([ROW, 8, *tail()])
    assert sorted(looked_at.known.weighed.drawn.lengths) == split
    assert weighed_here(found, place, None, []) is found
    folder = prepare(found.recipe.data, None, SIZES["vocab_size"], tmp_path / "data")
    assert corpus_here(found, place, None) == folder
    assert sorted(lengths_of(found.recipe, folder)) == split
    whole = weighed_here(found, place, None, sizes)
    assert whole.known.weighed and whole.known.weighed.source == "data"


def test_a_list_is_predicted_beside_every_layout_alone(tmp_path: Path) -> None:
    listed = [{"max_length": 64}, {"max_length": ROW, "model_parallel": 2}]
    found = read(written(tmp_path, tail(), parallel_config={"strategies": listed}))
    weighed = weighing(found, tail()).known.weighed
    assert weighed and weighed.choice.layouts and weighed.choice.layouts.bounds == (64, ROW)
    assert [one.layout.tensor for one in weighed.choice.layouts.buckets] == [1, 2]
    assert weighed.choice.best_static and weighed.choice.switching_seconds > 0
