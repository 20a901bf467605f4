"""Parameters in parts on tensor 2 × data 2: training, saving, resuming and export, beside one
process that holds everything whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.parity.test_training import ZERO
from tests.support.ranks import spawn
from uspft.comm import Books, Group
from uspft.config.recipe import Recipe
from uspft.layout import Layout
from uspft.mesh import Groups, make_mesh
from uspft.parameters.shards import Holders, MatrixSplit, Part, Shards

WIDE, INNER, HEADS, TOKENS, STEPS = 12, 20, 4, 7, 3
# Five matrices in the fused one: no sum of neighbours' parts then is as large as a whole matrix.
SHAPES = {
    "norm.weight": (WIDE,),
    "up.weight": (INNER, WIDE),
    "gates.weight": (5 * INNER, WIDE),
    "per_head.weight": (INNER // HEADS,),
    "down.weight": (WIDE, INNER),
}
SPLITS = {
    "up.weight": MatrixSplit(0),
    "gates.weight": MatrixSplit(0, (INNER,) * 5),
    "down.weight": MatrixSplit(1),
}
PIECES = frozenset({"per_head.weight"})
MATRICES = {name: torch.Size(SHAPES[name]).numel() for name in SPLITS}
"""Elements of what is split."""
FOUR, LAST = Layout(mesh_columns=2, data=2), {"step": STEPS, "rate": 1e-2}


def shards(layout: Layout) -> Shards:
    return Shards(layout, SPLITS, PIECES)


class _Enter(torch.autograd.Function):
    """Into what is split: the gradients of the ranks' parts add up (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return summed(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    """Out of it: the ranks' parts add up (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def summed(x: Tensor, group: Group) -> Tensor:
    x = x.clone()
    if group.size > 1:
        dist.all_reduce(x, group=group.handle)
    return x


class Weight(nn.Module):
    """A parameter under the name that files have for it."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device="meta"))


class Net(nn.Module):
    """A column-split, a fused, a row-split, a replicated parameter, and one whose replicas compute
    a piece of its gradient each."""

    routed = False

    def __init__(self, tensor: Group) -> None:
        super().__init__()
        self._tensor = tensor
        for name, shape in SHAPES.items():
            self.add_module(name.removesuffix(".weight"), Weight(shape))

    def forward(self, batch: Any, scale: float, router_scale: float | None = None) -> Tensor:
        ours = {name: module.weight for name, module in self.named_children()}
        h = _Enter.apply(batch.x * ours["norm"], self._tensor)
        by_head = (h @ ours["up"].T).view(len(h), -1, len(ours["per_head"]))
        up = (by_head * ours["per_head"]).flatten(1)
        gate, value, *plain = (h @ ours["gates"].T).chunk(5, dim=1)
        out = _Leave.apply((up + sum(plain) + F.silu(gate) * value) @ ours["down"].T, self._tensor)
        loss = (out - batch.y).pow(2).sum() * scale
        return torch.stack([loss, torch.zeros_like(loss)])

    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.named_parameters())


def values() -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draws) for name, shape in SHAPES.items()}


def rows(step: int) -> list[tuple[Tensor, Tensor]]:
    """Four rows of a step: input and target [TOKENS, WIDE]."""
    draws = torch.Generator().manual_seed(step)
    pairs = torch.randn(4, 2, TOKENS, WIDE, generator=draws)
    return [(x, 5 * y) for x, y in pairs]


def recipe(zero: str) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"config": "none", "dtype": "float32"},
            "data": {"train": "none", "sequence_length": TOKENS},
            "training": {"steps": STEPS, "global_batch_size": 4, "max_grad_norm": 0.5},
            "optimizer": {"learning_rate": LAST["rate"]},
            "deepspeed": {"zero_optimization": ZERO[zero]},
        }
    )


@dataclass
class Alive:
    """An engine on this rank, and what makes its batches."""

    engine: Any
    holders: Holders
    world: Any

    def step(self, number: int) -> Any:
        replica, replicas = self.holders.zero.index, self.holders.zero.size
        mine = [pair for n, pair in enumerate(rows(number)) if n % replicas == replica]
        batches = [self.batch(x, y, TOKENS) for x, y in mine]
        return self.engine.step(batches, LAST["rate"], stop=False)

    def batch(self, x: Tensor, y: Tensor, targets: int) -> Any:
        return SimpleNamespace(world=self.world, x=x, y=y, targets=targets, rows=(0,))

    def empty(self) -> Any:
        return self.batch(torch.zeros(1, WIDE), torch.zeros(1, WIDE), 0)


def alive(zero: str, layout: Layout, groups: Groups, source: Any, runner: Any = None) -> Alive:
    from uspft.engine.quarantine import prepare_deepspeed
    from uspft.engine.step import in_turn
    from uspft.engine.zero import ZeroEngine, partitioner
    from uspft.parameters.fill import fill

    prepare_deepspeed()
    mesh = make_mesh(layout, groups, Books())
    holders = Holders.of(shards(layout), mesh.rank, groups)
    module = Net(holders.tensor)
    fill(module, torch.float32, source, holders, partitioner(recipe(zero), holders))
    passes, device = 4 // holders.zero.size, torch.device("cpu")
    engine = ZeroEngine(
        module, recipe(zero), holders, device, passes=passes, runner=runner or in_turn
    )
    return Alive(engine, holders, SimpleNamespace(mesh=mesh))


def one_process(
    start: dict[str, Tensor], steps: range, adam: dict[str, Any] | None = None
) -> tuple[list[tuple[float, float]], dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """Losses and norms, the first step's gradients before clipping, and the ends of weights and of
    Adam's state."""
    net = Net(Group())
    for name, module in net.named_children():
        module.weight = nn.Parameter(start[f"{name}.weight"].clone())
    named = net.named()
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LAST["rate"], betas=(0.9, 0.95), eps=1e-8)
    if adam:
        optimizer.load_state_dict(adam)
    numbers, first = [], {}
    for number in steps:
        optimizer.zero_grad()
        pairs = rows(number)
        losses = [net(SimpleNamespace(x=x, y=y), 1 / (4 * TOKENS))[0] for x, y in pairs]
        loss = torch.stack(losses).sum()
        loss.backward()
        first = first or {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = nn.utils.clip_grad_norm_(named.values(), 0.5)
        optimizer.step()
        numbers.append((float(loss.detach()), float(norm)))
    end = {name: p.detach().clone() for name, p in named.items()}
    return numbers, first, end, optimizer.state_dict()


def off(got: dict[str, Tensor], want: dict[str, Tensor], whole: dict[str, Tensor] | None = None):  # type: ignore[no-untyped-def]
    """Names whose values differ by more than rounding, of their size or of `whole`'s."""
    scale = whole or want
    return [
        name
        for name in want
        if name not in got or not (got[name] - want[name]).norm() <= 1e-5 * scale[name].norm()
    ]


class Largest(TorchDispatchMode):
    """Finds tensors of as many elements as a matrix of which this rank has a part."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, Tensor) and one.is_floating_point() and not one.is_meta:
                self.found |= {one.numel()} & set(MATRICES.values())
        return out


@contextmanager
def reads_counted(found: list[int]) -> Iterator[None]:
    """The elements that are read out of safetensors files, one entry for each slice."""
    from uspft.checkpoint import folder as saved
    from uspft.parameters import source

    real = source.safe_open

    class Slice:
        def __init__(self, held: Any) -> None:
            self._held = held

        def get_shape(self) -> Any:
            return self._held.get_shape()

        def __getitem__(self, index: Any) -> Tensor:
            with _disable_current_modes():  # it makes a view of the file, and cuts that
                value: Tensor = self._held[index]
            found.append(value.numel())
            return value

    class File:
        def __init__(self, *args: Any) -> None:
            self._file = real(*args)

        def __enter__(self) -> Any:
            opened = self._file.__enter__()
            keys, get = opened.keys, opened.get_slice
            return SimpleNamespace(keys=keys, get_slice=lambda name: Slice(get(name)))

        def __exit__(self, *error: Any) -> None:
            self._file.__exit__(*error)

    source.safe_open = saved.safe_open = File
    try:
        yield
    finally:
        source.safe_open = saved.safe_open = real


@contextmanager
def moves_counted(found: list[int]) -> Iterator[None]:
    """The values that this rank sends to others when state is gathered."""
    real = dist.all_to_all_single

    def counted(out: Tensor, send: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(send.numel())
        return real(out, send, *args, **kwargs)

    dist.all_to_all_single = counted
    try:
        yield
    finally:
        dist.all_to_all_single = real


def everything(engine: Any, kind: str) -> dict[str, Tensor] | None:
    """Whole values on the first rank; collective."""
    from uspft.engine.state import on_first_rank

    names = list(engine.trained())
    with on_first_rank(engine, names, kind) as read:
        return {name: read(name).clone() for name in names} if read else None


def describe(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return {}


def on_four(rank: int, folder: Path) -> dict[str, Any]:
    """Train, save and export at every stage."""
    from uspft.checkpoint.hf_folder import export_folder
    from uspft.checkpoint.save import save_checkpoint
    from uspft.engine.state import on_first_rank
    from uspft.parameters.source import FolderWeights

    groups, found = Groups(), {}
    for zero in ZERO:
        read: list[int] = []
        with reads_counted(read), Largest() as largest:
            one = alive(zero, FOUR, groups, FolderWeights(folder))
            results = [one.step(1)]
        clipped = min(1.0, 0.5 / (results[0].grad_norm + 1e-6))
        gradients = everything(one.engine, "exp_avg")
        with largest:
            results += [one.step(number) for number in range(2, STEPS + 1)]
        moved: list[int] = []
        with largest, moves_counted(moved):
            save_checkpoint(one.engine, folder / zero, STEPS, 1, lambda at: describe(at / "model"))
        whole = set(largest.found)
        weights, moments = everything(one.engine, "weight"), everything(one.engine, "exp_avg_sq")
        with largest, on_first_rank(one.engine, list(SHAPES)) as values_of:
            if values_of:
                tensors = ((name, values_of(name)) for name in SHAPES)
                export_folder(tensors, torch.float32, describe_export, folder / f"{zero} hf")
        found[zero] = {
            "numbers": [(result.loss, result.grad_norm) for result in results],
            "targets": [result.targets for result in results],
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
    return found


def describe_export(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "llama"}')


def resumed(rank: int, folder: Path, layout: Layout, cases: list[tuple[str, str]]) -> Any:
    """Another split and number of ranks go on from what a stage has saved, under another one."""
    from uspft.checkpoint.folder import Checkpoint
    from uspft.checkpoint.load import load_state
    from uspft.checkpoint.weights_of import CheckpointWeights

    groups, found = Groups(), {}
    for saved, zero in cases:
        checkpoint = Checkpoint.open(folder / saved / "checkpoints" / f"step-{STEPS:08d}")
        with reads_counted([]), Largest() as largest:
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
        losses = [engine.forward(batch, scales) for batch in reversed(batches)]
        for number, loss in enumerate(losses, 1):
            engine.backward(loss.sum(), last=number == len(losses))
        return torch.stack([loss.detach().double() for loss in losses]).sum(0)

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
    from uspft.parameters.source import RandomWeights

    class Draws(RandomWeights):
        def __init__(self) -> None:
            self.asked: list[str] = []

        def _draw(self, name: str, shape: tuple[int, ...]) -> Tensor:
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("zero", ZERO)
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


@pytest.mark.parametrize("zero", ZERO)
def test_only_what_is_held_is_read(zero: str, answers: list[dict[str, Any]]) -> None:
    layout = shards(FOUR)
    for rank, answer in enumerate(answers):
        held = sum(layout.part(name, shape, rank).count for name, shape in SHAPES.items())
        assert answer[zero]["read"] == (held if rank < 2 else 0), "one rank of those that hold it"


@pytest.mark.parametrize("zero", ZERO)
def test_no_rank_holds_a_whole_matrix(zero: str, answers: list[dict[str, Any]]) -> None:
    assert [answer[zero]["whole"] for answer in answers] == [set()] * 4
    seen = [answer[zero]["export whole"] for answer in answers]
    assert seen == [set(MATRICES.values()), set(), set(), set()], "and an export, on one"


@pytest.mark.parametrize("zero", ZERO)
def test_saving_moves_each_value_at_most_once(zero: str, answers: list[dict[str, Any]]) -> None:
    count = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    moved = sum(answer[zero]["moved"] for answer in answers)
    assert moved <= 3 * count
    assert (moved == 0) == (zero == "zero0"), "what all ranks have goes nowhere"


@pytest.mark.parametrize("zero", ZERO)
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_comes_back_under_another_split(
    name: str, folder: Path, answers: list[dict[str, Any]]
) -> None:
    ranks, layout = RESUMED[name]
    stages = list(ZERO)
    cases = list(zip(stages, stages[2:] + stages[:2], strict=True))
    _, _, end, adam = one_process(values(), range(1, STEPS + 1))
    numbers, _, after, _ = one_process(end, range(STEPS + 1, STEPS + 2), adam)
    got = spawn(ranks, resumed, folder, layout, cases)
    for case, (mine, weights, _) in got[0].items():
        assert mine == pytest.approx(numbers[0], rel=1e-5), case
        assert off(weights, after) == [], case
    if layout.tensor > 1:
        assert all(whole == set() for answer in got for _, _, whole in answer.values())


@pytest.mark.timeout(200)
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
    with Largest() as largest:
        make()
    assert largest.found == {MATRICES["up.weight"]}
    part = Part.whole(SHAPES["up.weight"])
    assert len(set(MATRICES.values())) >= 2 and part.is_whole
