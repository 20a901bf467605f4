"""`plan`, every `auto`, `strategies: auto` and `verify` have one list of layouts and one price."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.verify import layouts as of_verify
from uspft.planner import row_time, step
from uspft.planner.step_shape import StepPart
from uspft.planner.ways import Space, Way, every_way
from uspft.prepare.examine import Examined
from uspft.prepare.make_plan import examine_for_plan, hardware_of, ranking_of, step_of
from uspft.segments import Segments
from uspft.switching.priced import priced_layouts
from uspft.switching.setting import Setting

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
)
CASES = 200


@dataclass(frozen=True)
class Case:
    model: str
    tensor: int
    context: int
    data: int
    tokens: int
    hardware: str
    stage: int
    recompute: str = "nothing"

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        return cls(
            draw.choice(MODELS),
            draw.choice((1, 1, 2)),
            draw.choice((2, 4, 6, 8, 8)),
            draw.choice((1, 1, 2)),
            96 * draw.choice((64, 128, 256)),
            draw.choice(("h100", "a800", "l20")),
            draw.choice((1, 3)),
            draw.choice(("auto", "nothing", "attention")),
        )

    def examined(self, folder: Path, **parallel: Any) -> Examined:
        ranks = self.tensor * self.context * self.data
        (folder / "x.txt").write_text("x")
        tree = {
            "model": {"name_or_path": self.model},
            "data": {
                "train": str(folder / "x.txt"),
                "sequence_length": self.tokens,
                "packing": "none",
            },
            "parallel_config": {
                "model_parallel": self.tensor,
                "use_seq_parallel": self.tensor > 1,
                "context_parallel": self.context,
                "context_parallel_algo": "auto",
                **parallel,
            },
            "deepspeed": {"zero_optimization": {"stage": self.stage}},
            "memory": {"recompute": self.recompute},
            "training": {"steps": 1, "global_batch_size": 4},
            "launch": {"hardware": self.hardware, "processes": ranks, "device": "cuda"},
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(tree))
        hosts = max(1, ranks // 8)
        if ranks > 8:
            tree["launch"]["processes"] = ranks // hosts
            file.write_text(yaml.safe_dump(tree))
        return examine_for_plan(file, [], hosts, ranks)


def of_plan(found: Examined, hosts: int) -> list[str]:
    """The names of `plan`'s layouts of the recipe's tensor and context degrees, in its order."""
    own = found.layout
    order = ranking_of(found, step_of(found), hardware_of(found, hosts)).layouts
    return [
        one.name
        for one in order
        if (one.layout.tensor, one.layout.context) == (own.tensor, own.context)
        and one.way.splits_tokens == (own.tensor > 1)
    ]


def of_strategies(found: Examined, hosts: int) -> list[str]:
    """The same of those among which `strategies: auto` chooses, by a row's seconds."""
    own, given = found.layout, Segments.single(found.recipe.data.sequence_length)
    setting = Setting(step_of(found), hardware_of(found, hosts), own.ranks, 80e9)
    every = priced_layouts(setting, given.length, given, None)
    alike = [one for one in every if (one.layout.tensor, one.layout.context) == _degrees(own)]
    alike.sort(key=lambda one: one.seconds[1] + one.beside)
    return [one.name.replace(f"tensor{own.tensor}", f"tensor{own.tensor}-tokens") for one in alike]


def _degrees(layout: Any) -> tuple[int, int]:
    return layout.tensor, layout.context


def of_auto(found: Examined) -> str:
    parallel = found.recipe.parallel_config
    tokens = "-tokens" * (found.layout.tensor > 1)
    name = found.layout.name(parallel.context_parallel_algo)
    return name.replace(f"tensor{found.layout.tensor}", f"tensor{found.layout.tensor}{tokens}")


def cases() -> Iterator[Case]:
    draw = random.Random(7)
    seen: set[Case] = set()
    while len(seen) < CASES:
        case = Case.drawn(draw)
        heads = {"Qwen/Qwen2.5-7B": 28}.get(case.model, 8)
        if case not in seen and heads % case.tensor == 0:
            seen.add(case)
            yield case


def test_auto_plan_and_strategies_agree(tmp_path: Path) -> None:
    chosen = set()
    for case in cases():
        found = case.examined(tmp_path)
        hosts = max(1, found.layout.ranks // 8)
        first, *others = of_plan(found, hosts)
        chosen.add(found.recipe.parallel_config.context_parallel_algo)
        assert of_auto(found) == first, case
        if case.stage == 1 and case.recompute != "auto":
            strategies = of_strategies(found, hosts)
            assert set(strategies) == {first, *others} and strategies[0] == first, case
    assert len(chosen) >= 3, "the order is no constant"


@pytest.fixture
def reversed_price(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.forward_and_backward

    def backwards(shape: Any, *given: Any) -> list[StepPart]:
        alone = real(type(shape)(**{**vars(shape), "rows": 1}), *given)
        seconds = sum(part.seconds - part.hidden for part in alone)
        return [StepPart("products", shape.rows * 1e6 / seconds)]

    for module in (step, row_time):
        monkeypatch.setattr(module, "forward_and_backward", backwards)


CASE = Case("meta-llama/Llama-3.1-8B", 1, 8, 1, 96 * 256, "h100", 1)


def test_a_reversed_price_reverses_all(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = CASE.examined(tmp_path)
    plan, strategies, auto = of_plan(before, 1), of_strategies(before, 1), of_auto(before)
    assert auto == plan[0]
    request.getfixturevalue("reversed_price")
    after = CASE.examined(tmp_path)
    assert of_plan(after, 1) == plan[::-1] and len(plan) > 5
    assert of_strategies(after, 1) == strategies[::-1]
    assert of_auto(after) == plan[-1]


def test_a_list_of_two_layouts_is_the_list_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = list(every_way(8, Space(tensor={1}, context={8})))
    two = [way for way in every if way.name in ("ring8", "ulysses2-ring4")]

    def listed(ranks: int, space: Space) -> Iterator[Way]:
        assert ranks == 8
        yield from two

    monkeypatch.setattr("uspft.planner.ways.every_way", listed)
    found, names = CASE.examined(tmp_path), {way.name for way in two}
    assert set(of_plan(found, 1)) == names == set(of_strategies(found, 1))
    assert of_auto(found) in names
    own, *others = of_verify(found.recipe, 8)
    assert {one.layout.name(one.parallel.context_parallel_algo) for one in (own, *others)} == names
