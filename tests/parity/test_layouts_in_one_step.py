"""One optimizer step whose rows run under three layouts, beside one process of transformers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.models import Documents, make_documents, make_model, mismatch, reference
from tests.support.ranks import spawn
from tests.support.runs import GROUPS, close, held, prepared, small_recipe
from tests.support.stages import ZERO
from uspft.comm import Books
from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.layout import Layout
from uspft.mesh import make_mesh
from uspft.segments import Segments
from uspft.sequence import Algorithm, Heads, make_algorithm
from uspft.world import World

ROW, STEPS, RATE = 64, 2, 1e-3
ROWS_PER_STEP = 8
HEADS = Heads(4, 2, 16)
ELEMENT_BYTES = 4
CASES = {"zero1": False, "zero2": False, "zero3": False, "zero1 wrong": True}
"""ZeRO stage; whether two replicas read the same row, which must show."""


class Turn:
    """Some rows of a step under a layout; rows: of each pass, by replica."""

    def __init__(self, name: str, layout: Layout, rows: list[list[int]], **options: Any) -> None:
        self.row = CONTEXT.get(name, WHOLE)
        self.layout, self.rows = layout, rows
        self.algorithm: Algorithm = make_algorithm(
            self.row, layout.ulysses, layout.ring, keep=False, **options
        )

    def world(self, like: World) -> World:
        named = self.row, self.algorithm, like.tensor
        return World(make_mesh(self.layout, GROUPS, Books()), *named, like.kernel, like.device)

    def sends(self) -> Counter[str]:
        """The bytes that each rank sends in one layer for its rows: all are one document."""
        one = self.algorithm.cost(Segments.single(ROW), HEADS, ELEMENT_BYTES)
        sent = {"all_to_all": one.all_to_all, "ring": one.ring, "gather": one.gather}
        each = Counter({kind: traffic.bytes for kind, traffic in sent.items()})
        return sum((each for _ in self.rows), Counter())


TURNS = [
    Turn("hybrid_cp", Layout(ulysses=2, ring=2), [[0], [1]]),
    Turn("planned_cp", Layout(ring=2, data=2), [[2, 3]]),
    Turn("whole", Layout(data=4), [[4, 5, 6, 7]]),
]


def work(rank: int, folder: Path, data: Documents) -> dict[str, Any]:
    from uspft.data.rows.loader import StepLoader
    from uspft.training.meter import Meter

    answers = {}
    for case, wrong in CASES.items():
        blocks = {
            "parallel_config": {
                "context_parallel": 4,
                "context_parallel_algo": "hybrid_cp",
                "ulysses_degree_in_cp": 2,
            },
            "deepspeed": {"zero_optimization": ZERO[case.split()[0]]},
            "training": {"steps": STEPS, "global_batch_size": ROWS_PER_STEP, "max_grad_norm": 0.5},
        }
        run = prepared(small_recipe(folder / "model", data.path, ROW, **blocks), folder / case)
        groups_before = len(GROUPS.sets)
        worlds = [turn.world(run.world) for turn in TURNS]
        loaders = [
            StepLoader(
                run.loader.stream,
                world,
                row_tokens=ROW,
                rows_per_step=ROWS_PER_STEP,
                rows_per_batch=1,
            )
            for world in worlds
        ]
        meter, records = Meter(run), []
        for step in range(STEPS):
            batches = [
                loader.batch([step * ROWS_PER_STEP + rows[0 if wrong else world.replica]])
                for turn, world, loader in zip(TURNS, worlds, loaders, strict=True)
                for rows in turn.rows
            ]
            run.loader.require_same_rows(batches)
            run.loader.require_shares(batches)
            result = run.engine.step(batches, RATE, stop=False)
            record = meter.record(step + 1, batches, result, 1.0)
            records.append({**record, "learning_rate": RATE})
        answers[case] = records, held(run.engine), len(GROUPS.sets) - groups_before
        close(run)
    return answers if dist.get_rank() == 0 else {}


def test_rows_of_three_layouts_are_one_step(tmp_path: Path) -> None:
    make_model(tmp_path / "model", "llama", heads=HEADS.query, kv_heads=HEADS.kv)
    lengths = [ROW] * (STEPS * ROWS_PER_STEP)
    data = make_documents(tmp_path / "d.jsonl", lengths, masked=[0.0, 0.9, 0.4])
    answers = spawn(4, work, tmp_path, data)[0]
    steps = [data.documents[i * ROWS_PER_STEP : (i + 1) * ROWS_PER_STEP] for i in range(STEPS)]
    want = reference(tmp_path / "model", steps, rate=RATE, clip=0.5)
    layers = 2
    moved = sum((turn.sends() for turn in TURNS), Counter())
    assert set(moved) >= {"all_to_all", "ring", "gather"}
    assert len(mismatch((answers.pop("zero1 wrong")[0], want.end), want)) > 2
    for case, (records, end, made) in answers.items():
        assert mismatch((records, end), want) == [], case
        assert made == 0, "planned's rings have the members of the hybrid's Ulysses groups"
        for record in records:
            assert record["comm_bytes"] == {kind: layers * n for kind, n in moved.items() if n}
            assert record["strategy"] == "ulysses2-ring2 + planned2-data2 + data4"
            assert record["attention_balance"] == pytest.approx(1, abs=0.05)
