"""Parameters in parts on tensor 2 × data 2: training, saving, resuming and export, beside one
process that holds everything whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.counted import Largest, moves_counted, reads_counted
from tests.support.parts import (
    FOUR,
    IN_TURN,
    MATRICES,
    SHAPES,
    SPLITS,
    STAGES,
    STEPS,
    TOKENS,
    alive,
    off,
    one_process,
    shards,
    values,
)
from tests.support.ranks import spawn
from uspft.layout import Layout
from uspft.mesh import Groups
from uspft.tensor.parts import Part


def everything(engine: Any, kind: str) -> dict[str, Tensor] | None:
    """Whole values on the first rank; collective."""
    from uspft.engine.state import on_first_rank

    names = list(engine.trained())
    with on_first_rank(engine, names, kind) as read:
        return {name: read(name).clone() for name in names} if read else None


def write_config(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')


def on_four(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save and export at every stage."""
    from tests.support.runs import save_checkpoint
    from uspft.checkpoint.hf_folder import export_folder
    from uspft.engine.state import on_first_rank
    from uspft.parameters.source import FolderWeights

    groups, found = Groups(), {}
    for zero in STAGES:
        read: list[int] = []
        with reads_counted(read), Largest(MATRICES.values()) as largest:
            one = alive(zero, FOUR, groups, FolderWeights(folder))
            results = [one.step(1)]
        clipped = min(1.0, 0.5 / (results[0].grad_norm + 1e-6))
        gradients = everything(one.engine, "exp_avg")
        with largest:
            results += [one.step(number) for number in range(2, STEPS + 1)]
        moved: list[int] = []
        with largest, moves_counted(moved):
            save_checkpoint(one.engine, folder / zero, STEPS, write_config)
        whole = set(largest.found)
        weights, moments = everything(one.engine, "weight"), everything(one.engine, "exp_avg_sq")
        with largest, on_first_rank(one.engine, list(SHAPES)) as values_of:
            if values_of:
                tensors = ((name, values_of(name)) for name in SHAPES)
                write_config(files := folder / f"{zero} model")
                export_folder(tensors, torch.float32, files, folder / f"{zero} hf")
        found[zero] = {
            "numbers": [(result.loss, result.grad_norm) for result in results],
            "targets": [result.counts["target_tokens"] for result in results],
            "first": gradients
            and {name: value / (0.1 * clipped) for name, value in gradients.items()},
            "end": weights,
            "moments": moments,
            "read": sum(read),
            "moved": sum(moved),
            "whole": whole,
            "export whole": set(largest.found),
        }
        one.engine.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uspft.engine.zero.find_fragments_in_turn", lambda optimizer: None)
        one = alive(IN_TURN, FOUR, groups, FolderWeights(folder))
        found["as if in order"] = everything(one.engine, "weight")
        one.engine.close()
    return found


def resumed(rank: int, folder: Path, layout: Layout, cases: list[tuple[str, str]]) -> Any:
    """Another split and number of ranks go on from what a stage has saved, under another one."""
    from uspft.checkpoint.folder import Checkpoint
    from uspft.checkpoint.save import load_state
    from uspft.checkpoint.weights import CheckpointWeights

    groups, found = Groups(), {}
    for saved, zero in cases:
        checkpoint = Checkpoint.open(folder / saved / "checkpoints" / f"step-{STEPS:08d}")
        with reads_counted([]), Largest(MATRICES.values()) as largest:
            one = alive(zero, layout, groups, CheckpointWeights(checkpoint))
            load_state(one.engine, checkpoint, one.empty())
            result = one.step(STEPS + 1)
        whole = set(largest.found)
        numbers = result.loss, result.grad_norm
        found[saved, zero] = numbers, everything(one.engine, "weight"), whole
        one.engine.close()
    return found


def in_one_process(rank: int, folder: Path) -> list[Any]:
    """Engines with an mpu and without take turns; one has another runner."""
    from uspft.parameters.source import FolderWeights

    def last_first(engine: Any, batches: Any, scales: Any) -> Tensor:
        """Every forward pass, then every backward one, as a pipeline would."""
        passes = [(engine.forward(batch, scales), batch) for batch in reversed(batches)]
        for number, (loss, batch) in enumerate(passes, 1):
            engine.backward(loss.sum(), batch, last=number == len(passes))
        first = engine.holders.tensor.index == 0
        return torch.stack([loss.detach().double() * first for loss, _ in passes]).sum(0)

    groups, found = Groups(), []
    for layout, runner in ((FOUR, None), (Layout(data=4), None), (FOUR, last_first)):
        one = alive("zero1", layout, groups, FolderWeights(folder), runner)
        results = [one.step(number) for number in range(1, STEPS + 1)]
        numbers = [(result.loss, result.grad_norm) for result in results]
        found.append((numbers, everything(one.engine, "weight")))
        one.engine.close()
    return found


def drawn(rank: int) -> Any:
    """Weights from the seed: who draws whole tensors, and what comes together of the parts."""
    from uspft.parameters.fill import RandomWeights

    class Draws(RandomWeights):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
            self.asked.append(name)
            return values()[name]

    source = Draws()
    one = alive("zero2", FOUR, Groups(), source)
    end = everything(one.engine, "weight")
    one.engine.close()
    return source.asked, end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    save_file(values(), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[dict[str, Any]]:
    return spawn(4, on_four, folder)


@pytest.mark.parametrize("zero", STAGES)
def test_training_in_parts_equals_one_process(zero: str, answers: list[dict[str, Any]]) -> None:
    numbers, first, end, adam = one_process(values(), range(1, STEPS + 1))
    got = answers[0][zero]
    assert got["targets"] == [4 * TOKENS] * STEPS
    for mine, theirs in zip(got["numbers"], numbers, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert theirs[1] > 0.5, "clipping must be active"
    assert off(got["first"], first) == []
    assert off(got["end"], end) == []
    moments = dict(zip(by_decay(), (s["exp_avg_sq"] for s in adam["state"].values()), strict=True))
    assert off(got["moments"], moments) == []
    assert all(answer[zero]["numbers"] == got["numbers"] for answer in answers)


def test_what_is_found_as_if_parameters_lay_in_order_would_be_seen(
    answers: list[dict[str, Any]],
) -> None:
    assert off(answers[0]["as if in order"], values()) != []


def by_decay() -> list[str]:
    """Names in the order of the optimizer's groups."""
    return sorted(SHAPES, key=lambda name: len(SHAPES[name]) == 1)


@pytest.mark.parametrize(
    "fault", ["norm.weight", "up.weight", "gates.weight", "per_head.weight", "down.weight"]
)
def test_a_gradient_that_is_not_summed_would_be_seen(fault: str) -> None:
    _, first, _, _ = one_process(values(), range(1, 2))
    wrong = {**first, fault: first[fault] / 2}
    assert off(wrong, first) == [fault]


@pytest.mark.parametrize("zero", STAGES)
def test_only_what_is_held_is_read(zero: str, answers: list[dict[str, Any]]) -> None:
    layout = shards(FOUR)
    for rank, answer in enumerate(answers):
        held = sum(layout.part(name, shape, rank).count for name, shape in SHAPES.items())
        assert answer[zero]["read"] == (held if rank < 2 else 0), "one rank of those that hold it"


@pytest.mark.parametrize("zero", STAGES)
def test_no_rank_holds_a_whole_matrix(zero: str, answers: list[dict[str, Any]]) -> None:
    assert [answer[zero]["whole"] for answer in answers] == [set()] * 4
    seen = [answer[zero]["export whole"] for answer in answers]
    assert seen == [set(MATRICES.values()), set(), set(), set()], "and an export, on one"


@pytest.mark.parametrize("zero", STAGES)
def test_saving_moves_each_value_at_most_once(zero: str, answers: list[dict[str, Any]]) -> None:
    count = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    moved = sum(answer[zero]["moved"] for answer in answers)
    assert moved <= 3 * count
    assert (moved == 0) == (zero == "zero0"), "what all ranks have goes nowhere"


@pytest.mark.parametrize("zero", STAGES)
def test_the_export_is_the_hugging_face_model(
    zero: str, folder: Path, answers: list[dict[str, Any]]
) -> None:
    written = load_file(folder / f"{zero} hf" / "model.safetensors")
    assert written.keys() == SHAPES.keys()
    assert all(torch.equal(written[name], answers[0][zero]["end"][name]) for name in SHAPES)


RESUMED: dict[str, tuple[int, Layout]] = {
    "one rank": (1, Layout()),
    "tensor 2": (2, Layout(mesh_columns=2)),
    "data 2": (2, Layout(data=2)),
    "tensor 4": (4, Layout(mesh_columns=4)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_comes_back_under_another_split(
    name: str, folder: Path, answers: list[dict[str, Any]]
) -> None:
    ranks, layout = RESUMED[name]
    stages = list(STAGES)
    cases = list(zip(stages, stages[2:] + stages[:2], strict=True))
    _, _, end, adam = one_process(values(), range(1, STEPS + 1))
    numbers, _, after, _ = one_process(end, range(STEPS + 1, STEPS + 2), adam)
    got = spawn(ranks, resumed, folder, layout, cases)
    for case, (mine, weights, _) in got[0].items():
        assert mine == pytest.approx(numbers[0], rel=1e-5), case
        assert off(weights, after) == [], case
    if layout.tensor > 1:
        assert all(whole == set() for answer in got for _, _, whole in answer.values())


def test_engines_with_an_mpu_and_without_take_turns(folder: Path) -> None:
    numbers, _, end, _ = one_process(values(), range(1, STEPS + 1))
    for mine, weights in spawn(4, in_one_process, folder)[0]:
        for one, other in zip(mine, numbers, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        assert off(weights, end) == []


def test_the_seed_is_drawn_from_on_one_rank(folder: Path) -> None:
    got = spawn(4, drawn)
    assert off(got[0][1], values()) == []
    replicated = [name for name in SHAPES if name not in SPLITS]
    assert sorted(got[0][0]) == sorted(SHAPES)
    assert sorted(got[1][0]) == sorted(replicated)
    assert [asked for asked, _ in got[2:]] == [[], []]


def test_the_count_sees_a_whole_matrix() -> None:
    make: Callable[[], Tensor] = lambda: torch.zeros(SHAPES["up.weight"])  # noqa: E731
    with Largest(MATRICES.values()) as largest:
        make()
    assert largest.found == {MATRICES["up.weight"]}
    part = Part.whole(SHAPES["up.weight"])
    assert len(set(MATRICES.values())) >= 2 and part.is_whole
