"""`plan`, every `auto`, `strategies: auto` and `verify` have one list of layouts and one price."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.verify import layouts as of_verify
from uspft.config import RecipeError, read
from uspft.config.recipe import PLANNED
from uspft.planner import mesh, row_time, step
from uspft.planner.rank import Ranked, ranked
from uspft.planner.step_shape import PlacedStep, StepPart, StepTime, seconds_of
from uspft.planner.ways import Space, Way, every_way
from uspft.prepare.examine import Examined
from uspft.prepare.left_open import open_keys
from uspft.prepare.make_plan import (
    examine_for_plan,
    hardware_of,
    own_way,
    ranking_of,
    step_of,
)
from uspft.segments import Segments
from uspft.switching.choose.priced import Setting, priced_layouts

MODELS = (
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
)
LEFT = ("algorithm", "algorithm", "ulysses", "context", "tensor", "all")
"""What of parallel_config is `auto`; `all` is all of it, ZeRO's stage and rows in one forward."""


@dataclass(frozen=True)
class Case:
    model: str
    tensor: int
    context: int
    data: int
    tokens: int
    hardware: str
    stage: int | str
    recompute: str = "nothing"
    left: str = "algorithm"
    """What the recipe leaves to the planner beside the algorithm."""

    @classmethod
    def drawn(cls, draw: random.Random) -> Case:
        left = draw.choice(LEFT)
        drawn = cls(
            draw.choice(MODELS),
            draw.choice((1, 1, 2)),
            draw.choice((2, 2, 4, 4, 4, 6, 8)),
            draw.choice((1, 1, 1, 2)),
            96 * draw.choice((64, 128, 256)),
            draw.choice(("h100", "a800", "l20")),
            draw.choice((1, 3)),
            draw.choice(("auto", "nothing", "attention")),
            left,
        )
        if left != "all":  # one host has most, two the others: layouts multiply with ranks
            few = drawn.tensor * drawn.context <= 6
            return drawn if few else replace(drawn, data=1)
        few = replace(drawn, tensor=1, context=draw.choice((2, 2, 2, 2, 4)), data=1)
        return replace(few, stage="auto", recompute="auto")

    @property
    def parallel(self) -> Any:
        """Its `parallel_config`."""
        degrees = {
            "model_parallel": self.tensor,
            "use_seq_parallel": self.tensor > 1,
            "context_parallel": self.context,
            "context_parallel_algo": "auto",
        }
        if self.left == "ulysses":
            return degrees | {"context_parallel_algo": "hybrid_cp", "ulysses_degree_in_cp": "auto"}
        if self.left == "context":
            return degrees | {"context_parallel": "auto"}
        if self.left == "tensor":
            del degrees["use_seq_parallel"]
            return degrees | {"model_parallel": "auto"}
        return "auto" if self.left == "all" else degrees

    def keeps(self, one: Ranked) -> bool:
        """Whether a layout is what the keys that are set say."""
        layout, tensor, context = one.layout, self.tensor, self.context
        if layout.pipeline > 1:  # a key that is set, to 1
            return False
        split = (layout.tensor, one.way.splits_tokens) == (tensor, tensor > 1)
        if self.left in ("algorithm", "ulysses", "context") and not split:
            return False
        if self.left in ("algorithm", "ulysses", "tensor") and layout.context != context:
            return False
        return self.left != "ulysses" or one.way.row.name in ("hybrid_cp", "ulysses_cp", "ring_cp")

    @property
    def ranks(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def hosts(self) -> int:
        return max(1, self.ranks // 8)

    def written(self, folder: Path) -> Path:
        (folder / "x.txt").write_text("x")
        tree = {
            "model": {"name_or_path": self.model},
            "data": {
                "train": str(folder / "x.txt"),
                "sequence_length": self.tokens,
                "packing": "none",
            },
            "parallel_config": self.parallel,
            "deepspeed": {"zero_optimization": {"stage": self.stage}},
            "memory": {"recompute": self.recompute},
            "training": {
                "steps": 1,
                "global_batch_size": 2 if self.left == "all" else 4,
                "micro_batch_size": "auto" if self.left == "all" else 1,
            },
            "launch": {
                "hardware": self.hardware,
                "processes": self.ranks // self.hosts,
                "device": "cuda",
            },
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(tree))
        return file

    def examined(self, folder: Path, *words: str) -> Examined:
        return examine_for_plan(self.written(folder), words, self.hosts, self.ranks)


def of_plan(case: Case, found: Examined) -> Iterator[Ranked]:
    """`plan`'s layouts that have what the case's recipe says, in its order, as asked for."""
    order = ranking_of(found, step_of(found)).layouts
    return (one for one in order if case.keeps(one))


def names(every: Iterable[Ranked]) -> list[str]:
    return [one.name for one in every]


def of_strategies(found: Examined) -> list[str]:
    """The same of those among which `strategies: auto` chooses, by a row's seconds."""
    own, given = found.layout, Segments.single(found.recipe.data.sequence_length)
    setting = Setting(step_of(found), hardware_of(found), own.ranks, 80e9)
    every = priced_layouts(setting, given.length, given, None)
    alike = [one for one in every if (one.layout.tensor, one.layout.context) == _degrees(own)]
    alike.sort(key=lambda one: one.seconds[1] + one.beside)
    return [one.name.replace(f"tensor{own.tensor}", f"tensor{own.tensor}-tokens") for one in alike]


def _degrees(layout: Any) -> tuple[int, int]:
    return layout.tensor, layout.context


def of_auto(found: Examined) -> str:
    return own_way(found).name


def cases(number: int) -> Iterator[Case]:
    draw = random.Random(7)
    seen: set[Case] = set()
    while len(seen) < number:
        case = Case.drawn(draw)
        heads = {"Qwen/Qwen2.5-7B": 28}.get(case.model, 8)
        if case not in seen and heads % case.tensor == 0:
            seen.add(case)
            yield case


@pytest.mark.parametrize("number", [70, pytest.param(200, marks=pytest.mark.full)])
def test_auto_plan_and_strategies_agree(tmp_path: Path, number: int) -> None:
    chosen, run, left = set(), set(), Counter[str]()
    for case in cases(number):
        found = case.examined(tmp_path)
        others = of_plan(case, found)
        first = next(others)
        left[case.left] += 1
        chosen.add(found.recipe.parallel_config.context_parallel_algo)
        assert of_auto(found) == first.name, case
        if case.left == "all":
            own = own_way(found)
            run.add((own.stage, own.rows, own.recompute))
            assert (own.stage, own.rows, own.recompute) == (
                first.way.stage,
                first.way.rows,
                first.way.recompute,
            ), case
        if case.left == "algorithm" and case.stage == 1 and case.recompute != "auto":
            strategies = of_strategies(found)
            assert set(strategies) == set(names([first, *others])), case
            assert strategies[0] == first.name, case
    assert len(chosen) >= 4 and len(run) >= 3, "the order is no constant"
    assert sum(left.values()) == number and min(left[one] for one in LEFT) >= number // 20


@pytest.fixture
def reversed_price(monkeypatch: pytest.MonkeyPatch) -> None:
    of_step, of_row = step.step_time, row_time.forward_and_backward
    of_product = mesh.product_time

    def step_backwards(*given: Any) -> StepTime:
        return StepTime((StepPart("products", 1e6 / of_step(*given).seconds),))

    def row_backwards(placed: PlacedStep) -> list[StepPart]:
        seconds = seconds_of(of_row(placed.of(placed.step.under(micro_batch=1))))
        return [StepPart("products", placed.options.micro_batch * 1e6 / seconds)]

    class Backwards(StepTime):
        @property
        def seconds(self) -> float:
            return 1e6 / super().seconds

    monkeypatch.setattr(mesh, "product_time", lambda *given: Backwards(of_product(*given).parts))
    monkeypatch.setattr(step, "step_time", step_backwards)
    monkeypatch.setattr(step, "least_seconds", lambda *_: 0.0)
    monkeypatch.setattr(row_time, "forward_and_backward", row_backwards)


CASE = Case("meta-llama/Llama-3.1-8B", 1, 8, 1, 96 * 256, "h100", 1)


def test_a_reversed_price_reverses_all(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    before = CASE.examined(tmp_path)
    plan, strategies = names(of_plan(CASE, before)), of_strategies(before)
    assert of_auto(before) == plan[0]
    request.getfixturevalue("reversed_price")
    after = CASE.examined(tmp_path)
    assert names(of_plan(CASE, after)) == plan[::-1] and len(plan) > 5
    assert of_strategies(after) == strategies[::-1]
    assert of_auto(after) == plan[-1]


SMALL = Case("meta-llama/Llama-3.2-1B", 2, 2, 2, 96 * 64, "h100", 1)
"""All of its layouts fit, whatever is made again."""
AUTO: dict[str, Sequence[Any]] = {
    "parallel_config.model_parallel": (1, 2, 4, 8),
    "parallel_config.context_parallel": (1, 2, 4, 8),
    "parallel_config.pipeline_stage": (1, 2, 4, 8),
    "parallel_config.data_parallel": (1, 2, 4),
    "parallel_config.context_parallel_algo": (
        "ring_cp",
        "ulysses_cp",
        "allgather_cp",
        "planned_cp",
    ),
    "parallel_config.ulysses_degree_in_cp": (1, 2, 4),
    "parallel_config.tensor_mesh": ("[1, 4]", "[2, 2]", "[4, 1]"),
    "parallel_config.expert_parallel": (1, 2, 4),
    "deepspeed.zero_optimization.stage": (0, 1, 2, 3),
    "training.micro_batch_size": (1, 2),
    "memory.recompute": ("nothing", "exchange", "attention"),
}
"""Each key that may be `auto`, and the values that it may then become."""
FIXED = (
    "parallel_config.context_parallel_algo=ring_cp",
    "parallel_config.use_seq_parallel=false",
    "memory.recompute=nothing",
)
"""What the others are then; `data_parallel` is what is left."""
BESIDE = {
    "parallel_config.data_parallel": [
        "parallel_config.model_parallel=1",
        "parallel_config.context_parallel=auto",
    ],
    "parallel_config.pipeline_stage": ["parallel_config.pp_interleave_num=1"],
    "parallel_config.ulysses_degree_in_cp": [
        "parallel_config.context_parallel=4",
        "parallel_config.context_parallel_algo=hybrid_cp",
    ],
    "parallel_config.tensor_mesh": [
        "parallel_config.tensor_parallel_algo=meshslice",
        "parallel_config.model_parallel=4",
        "parallel_config.context_parallel_algo=planned_cp",
        "parallel_config.tensor_slices=1",
    ],
    "parallel_config.expert_parallel": [
        "model.name_or_path=Qwen/Qwen3-30B-A3B",
        "model.overrides={num_hidden_layers: 4}",
    ],
}
"""What a recipe says beside some of them."""
BESIDE["parallel_config.tensor_slices"] = [
    *BESIDE["parallel_config.tensor_mesh"],
    "parallel_config.tensor_mesh=[2, 2]",
]


def price_of(folder: Path, key: str, value: Any) -> float | None:
    """The price of a recipe in which a key is written; None where it is refused."""
    words = [*FIXED, *BESIDE.get(key, ()), f"{key}={value}"]
    try:
        found = SMALL.examined(folder, *words)
    except RecipeError:
        return None
    one = ranked(step_of(found), own_way(found), hardware_of(found), own=True)
    assert one.room is not False
    return one.seconds


@pytest.mark.parametrize("key", AUTO)
def test_every_auto_is_what_takes_least_of_what_may_be_written(
    tmp_path: Path, key: str, request: pytest.FixtureRequest
) -> None:
    """And most where the price is reversed."""
    written = [price_of(tmp_path, key, value) for value in AUTO[key]]
    possible = [one for one in written if one is not None]
    assert len(possible) >= 2 and max(possible) > min(possible)
    assert price_of(tmp_path, key, "auto") == pytest.approx(min(possible))
    request.getfixturevalue("reversed_price")
    assert price_of(tmp_path, key, "auto") == pytest.approx(1e6 / max(possible))


def test_auto_slices_are_those_of_each_product_that_take_least(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The price of a step is a sum over products: one is cut at a time."""
    key, counts = "parallel_config.tensor_slices", [1 << n for n in range(8)]
    whole = price_of(tmp_path, key, [1] * 4)
    assert whole is not None
    least = most = whole
    for product in range(4):
        cut = [[1] * product + [count] + [1] * (3 - product) for count in counts]
        each = [one for one in (price_of(tmp_path, key, slices) for slices in cut) if one]
        assert len(each) == len(counts) and max(each) > 1.01 * min(each)
        least, most = least + min(each) - whole, most + max(each) - whole
    assert price_of(tmp_path, key, "auto") == pytest.approx(least)
    request.getfixturevalue("reversed_price")
    assert price_of(tmp_path, key, "auto") == pytest.approx(1e6 / most)


def test_plan_prices_a_mesh_in_the_slices_that_a_recipe_of_that_mesh_has(tmp_path: Path) -> None:
    """Where these are `auto`, each mesh has its own; where they are written, all have those."""
    *mesh, _ = BESIDE["parallel_config.tensor_mesh"]
    for slices in ("auto", "[2, 1, 4, 2]"):
        orders = []
        for shape in AUTO["parallel_config.tensor_mesh"]:
            words = (
                f"parallel_config.tensor_mesh={shape}",
                f"parallel_config.tensor_slices={slices}",
            )
            found = SMALL.examined(tmp_path, *FIXED, *mesh, *words)
            orders.append(ranking_of(found, step_of(found)))
        own = {
            one.own.name: (one.own.step.options.slices, one.own.seconds)
            for one in orders
            if one.own
        }
        assert len(own) == 3 and len({cut for cut, _ in own.values()}) == 1 + (slices == "auto")
        for order in orders:
            found_here = {one.name: (one.step.options.slices, one.seconds) for one in order.layouts}
            assert own.items() <= found_here.items()


def test_a_mesh_that_another_key_forbids_is_refused_by_that_key(tmp_path: Path) -> None:
    """No mesh is chosen then, and it is not the mesh that is wrong."""
    words = ["tensor_mesh=auto", "model_parallel=4", "context_parallel=1"]
    words = [f"parallel_config.{word}" for word in (*words, "tensor_parallel_algo=meshslice")]
    words += FIXED
    with pytest.raises(RecipeError) as refused:
        SMALL.examined(tmp_path, *words, "memory.recompute=exchange")
    assert [one.key for one in refused.value.problems] == ["memory.recompute"]
    assert SMALL.examined(tmp_path, *words).layout.is_mesh


def test_an_exchange_made_again_is_chosen_with_an_algorithm_that_has_one(tmp_path: Path) -> None:
    """And refused where one rank has a whole row."""
    again = "memory.recompute=exchange"
    few = replace(SMALL, tensor=1, context=4, data=1, tokens=1 << 13)
    assert few.examined(tmp_path).layout.ulysses == 1, "another is faster"
    assert few.examined(tmp_path, again).layout.ulysses > 1
    with pytest.raises(RecipeError, match=r"memory\.recompute: is exchange"):
        few.examined(tmp_path, again, "parallel_config.context_parallel=1")


def test_no_key_that_may_be_auto_is_left_out(tmp_path: Path) -> None:
    """`use_seq_parallel` and `pp_interleave_num` say more of degrees, and are chosen with them."""
    tested = {*AUTO, "parallel_config.tensor_slices"}
    assert {f"parallel_config.{key}" for key in PLANNED} <= tested
    beside = {"parallel_config.use_seq_parallel", "parallel_config.pp_interleave_num"}
    mesh = ["model_parallel=auto", "tensor_parallel_algo=meshslice", "tensor_slices=auto"]
    file = replace(CASE, left="all", stage="auto", recompute="auto").written(tmp_path)
    every = set[str]()
    for words in ([], [f"parallel_config.{word}" for word in mesh]):
        every |= {*open_keys(read(file, words).recipe)}
    assert every == tested | beside


@pytest.mark.parametrize("left", ["algorithm", "context", "tensor", "all"])
def test_a_list_of_two_layouts_is_the_list_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    every = list(every_way(8, Space(tensor={1}, context={8})))
    two = [way for way in every if way.name in ("ring8", "ulysses2-ring4")]

    def listed(ranks: int, space: Space) -> Iterator[Way]:
        yield from two if ranks == 8 else ()  # where they are, no stages are beside them

    monkeypatch.setattr("uspft.planner.ways.every_way", listed)
    case, them = replace(CASE, left=left), {way.name for way in two}
    found = case.examined(tmp_path)
    assert set(names(of_plan(case, found))) == them == set(of_strategies(found))
    assert of_auto(found) in them
    own, *others = of_verify(found.recipe, 8)
    assert {one.layout.name(one.parallel.context_parallel_algo) for one in (own, *others)} == them
