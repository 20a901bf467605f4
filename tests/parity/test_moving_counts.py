"""What an engine whose weights move holds and sends, counted; and what it does not do."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.degrees import RATE, ROW, ROWS_PER_STEP
from tests.support.models import Documents, make_documents, make_model
from tests.support.moving import MOVED, Moving, started
from tests.support.ranks import spawn
from uspft.parameters.shards import owned_parts
from uspft.switching.move.moving import MovingEngine
from uspft.tensor.parts import Part

SMALL = 1024
"""Bytes of a tensor that is left out of what is counted: scalars, batches, rotary frequencies."""
CASES = [
    Moving("llama", "tensor 2", dtype="bfloat16"),
    Moving("llama", trains="adapter"),
    Moving("llama", straight=True),
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Documents]:
    folder = tmp_path_factory.mktemp("counts")
    make_model(folder / "llama", **MOVED["llama"])
    return folder, make_documents(folder / "d.jsonl", [ROW] * ROWS_PER_STEP, masked=[0.0, 0.9])


def storages() -> dict[int, torch.UntypedStorage]:
    """What all tensors of this process live in, by where it is."""
    gc.collect()
    every = (one for one in gc.get_objects() if type(one) in (Tensor, torch.nn.Parameter))
    memory = [one.untyped_storage() for one in every]
    return {one.data_ptr(): one for one in memory}


@contextmanager
def forwards_seen(engine: Any, see: Any) -> Iterator[None]:
    forward = engine.forward

    def seen(batch: Any, scales: Any) -> Any:
        see(batch)
        return forward(batch, scales)

    engine.forward = seen
    yield
    del engine.forward


class Sizes:
    """What a rank holds and owns of a run's parameters: from who holds what alone."""

    def __init__(self, run: Any, case: Moving) -> None:
        self._every, self._bytes = run.every, 2 if case.dtype == "bfloat16" else 4
        self._home = run.engine.holders.shards
        self._shapes = {name: run.engine.part_of(name).shape for name in run.engine.named}
        self._trained = set(run.engine.trained())

    def _of(self, layout: Any) -> Any:
        return next(s for s in self._every if s.layout.tensor == layout.tensor)

    def held(self, layout: Any, rank: int, *, trained: bool) -> int:
        names = self._trained if trained else self._shapes
        shards = self._of(layout)
        return sum(shards.part(name, self._shapes[name], rank).count for name in names)

    def owned(self, rank: int, *, trained: bool) -> int:
        names = self._trained if trained else self._shapes
        every = (owned_parts(self._home, name, self._shapes[name])[rank] for name in names)
        return sum(part.count for parts in every for part in parts)

    def bytes_while(self, layout: Any, rank: int) -> int:
        """As the engine's formula has it."""
        b, trains, all_of_it = self._bytes, {"trained": True}, {"trained": False}
        owned, mine = self.owned(rank, **trains), self.owned(rank, **all_of_it)
        always = 16 * owned + b * (mine - owned)
        here = b * self.held(layout, rank, **all_of_it) + 4 * self.held(layout, rank, **trains)
        return always + here

    def needed(self, layout: Any, rank: int, *, trained: bool) -> int:
        """Elements that a layout gives others of what a rank owns."""
        names, shards = self._trained if trained else self._shapes, self._of(layout)
        found = 0
        for name in names:
            shape = self._shapes[name]
            for other in range(4):
                theirs = shards.part(name, shape, other)
                for part in owned_parts(self._home, name, shape)[rank] if other != rank else ():
                    found += shared(part, theirs)
        return found

    def given(self, layout: Any, rank: int) -> int:
        """Elements of gradients that a rank makes of what others own."""
        shards, found = self._of(layout), 0
        for name in self._trained:
            mine = shards.part(name, self._shapes[name], rank)
            for other, parts in enumerate(owned_parts(self._home, name, self._shapes[name])):
                found += sum(shared(part, mine) for part in parts) if other != rank else 0
        return found

    def sent(self, layouts: list[Any], rank: int) -> int:
        return sum(
            self._bytes * self.needed(layout, rank, trained=False) + 4 * self.given(layout, rank)
            for layout in layouts
        )

    def straight(self, layouts: list[Any], rank: int) -> int:
        """Bytes that a rank gets where weights and reduced gradients go from layout to layout."""
        found, before, home = 0, self._home, self._home
        for number, layout in enumerate(layouts):
            shards = self._of(layout)
            for name, shape in self._shapes.items():
                part = shards.part(name, shape, rank)
                comes = part.count - shared(part, before.part(name, shape, rank))
                found += self._bytes * comes
                if name not in self._trained:
                    continue
                holders = shards.parts(name, shape)[part]
                piece = sum(p.count for p in owned_parts(shards, name, shape)[rank])
                found += 4 * piece * (len(holders) - 1) + (4 * comes if number else 0)
                found += 4 * (part.count - piece) if layout.tensor != home.layout.tensor else 0
            before = shards
        for name, shape in self._shapes.items():
            piece = sum(p.count for p in owned_parts(home, name, shape)[rank])
            found += self._bytes * (home.part(name, shape, rank).count - piece)
        return found


def shared(one: Part, other: Part) -> int:
    return sum(torch.Size([b - a for a, b in box]).numel() for box, _ in one.meets(other))


def counted(rank: int, folder: Path, data: Documents) -> list[Any]:
    return [count(case, rank, folder, data, number) for number, case in enumerate(CASES)]


def count(case: Moving, rank: int, folder: Path, data: Documents, number: int) -> Any:
    before = storages()  # kept, so that nothing else comes to lie where they are
    run = started(case, folder, data, folder / f"run-{number}")
    sizes, batches = Sizes(run, case), run.batches(0)
    seen: list[tuple[int, int]] = []
    layouts: list[Any] = []

    def see(batch: Any) -> None:
        new = [one.nbytes() for place, one in storages().items() if place not in before]
        layout = batch.world.layout
        if layouts and layouts[-1].tensor == layout.tensor:
            return  # what the micro-batch before it has left
        layouts.append(layout)
        said = sizes.bytes_while(layout, rank)
        if case.straight and len(layouts) > 1:  # the sums of the layouts before
            said += 4 * sizes.held(layout, rank, trained=True)
        seen.append((sum(n for n in new if n > SMALL), said))

    run.engine.holders.everyone.books.close()
    with forwards_seen(run.engine, see):
        run.engine.step(batches, RATE, stop=False)
    sent = run.engine.holders.everyone.books.close()
    run.engine.close()
    said = sizes.straight(layouts, rank) if case.straight else sizes.sent(layouts, rank)
    return seen, sent, said, [one.tensor for one in layouts]


def test_bytes_held_and_sent_are_those_of_the_formulas(setting: tuple[Path, Documents]) -> None:
    every = zip(CASES, zip(*spawn(4, counted, *setting), strict=True), strict=True)
    for case, answers in every:
        for seen, sent, said, order in answers:
            assert order == sorted(order), "from the least to the most sharded"
            assert len(seen) == len(order) >= 2 and all(got == want for got, want in seen), (
                case,
                seen,
            )
            assert sent.keys() == {"switch"}
            assert case.straight or sent["switch"] == said, case
        # Straight, who sends is the planner's choice, and what arrives is not.
        assert sum(sent["switch"] for _, sent, _, _ in answers) == sum(a[2] for a in answers)


def kept(rank: int, folder: Path, data: Documents) -> Any:
    """Whether weights that were fetched before are gone when others come, and in the end."""
    found: dict[str, list[bool]] = {}
    fetch = MovingEngine.fetch
    for fault in ("none", "one parameter's"):
        run = started(Moving("llama"), folder, data, folder / f"kept-{fault}")
        refs: list[StorageWeakRef] = []
        leaked: list[Tensor] = []

        def see(self: Any, shards: Any, refs: Any = refs, fault: str = fault) -> Tensor:
            found.setdefault(fault, []).append(all(ref.expired() for ref in refs))
            weights = fetch(self, shards)
            refs.append(StorageWeakRef(weights.untyped_storage()))
            return weights

        def keep(batch: Any, run: Any = run, leaked: Any = leaked, fault: str = fault) -> None:
            if fault != "none":
                leaked.append(next(iter(run.engine.named.values())).data)

        with pytest.MonkeyPatch.context() as patch, forwards_seen(run.engine, keep):
            patch.setattr(MovingEngine, "fetch", see)
            run.engine.step(run.batches(0), RATE, stop=False)
            with run.engine.evaluating():
                run.engine.terms(run.batches(0)[0])
        found[fault].append(all(ref.expired() for ref in refs))
        found[fault].append(all(not p.numel() for p in run.engine.named.values()))
        run.engine.close()
    return found


def test_no_weights_outlive_their_layout(setting: tuple[Path, Documents]) -> None:
    for found in spawn(4, kept, *setting):
        assert found["none"] == [True] * 6, "three layouts, an evaluation, the end, parameters"
        assert not all(found["one parameter's"])
