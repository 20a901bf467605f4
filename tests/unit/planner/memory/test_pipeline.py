"""What is predicted of each rank of a pipeline beside what is counted: its own runner, on meta
tensors, with every message that it keeps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.memory.count import count_stages
from benchmarks.memory.predicted import predicted_of_ranks
from tests.support.ranks import spawn
from tests.support.shapes import hub
from tests.unit.planner.memory.test_formula import SAVING, TOKENS, TRAINED, config_of
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.pipeline.schedules import Schedule, warm_up
from uspft.pipeline.stages import Stages
from uspft.planner.memory.passes import pass_bytes
from uspft.planner.memory.pipeline import moments, rank_bytes
from uspft.planner.options import Options
from uspft.planner.stages import cut_by_flops
from uspft.prepare.host import CONFIGS
from uspft.segments import Segments
from uspft.sequence import chunk_multiple
from uspft.sequence.chunked import Cut


class Case(NamedTuple):
    """What is counted."""

    model: str
    saving: str
    trained: str
    dtype: str
    layout: Layout
    schedule: Schedule
    micro_batches: int
    parallel: dict[str, Any] = {}  # noqa: RUF012
    algorithm: str = "ulysses_cp"
    config: dict[str, Any] = {}  # noqa: RUF012

    @property
    def layers(self) -> int:
        return sum(self.schedule.sizes)


TIED = {"vocab_size": 4096, "tie_word_embeddings": True}
PLAIN, GPIPE = Schedule(sizes=(2, 1, 1, 2)), Schedule("gpipe", 1, (3, 2))
SAVING = {
    **SAVING,
    "first layers": {"gradient_checkpointing": (2, 1, 0), "loss_tile_tokens": 1024},
}
TRAINED = {**TRAINED, "behind two layers": {"freeze": [r"layers\.[01]\.", "embed"]}}
TRAINED |= {"head": {"freeze": ["model"]}}
FEW = {
    "1f1b": Case("llama", "nothing", "all", "bfloat16", Layout(pipeline=4), PLAIN, 4),
    "gpipe": Case("llama", "nothing", "all", "bfloat16", Layout(pipeline=2), GPIPE, 3),
    "interleaved": Case(
        *("many heads", "attention", "all", "bfloat16", Layout(pipeline=2)),
        *(Schedule(virtual=2, sizes=(1, 2, 1, 1)), 3),
    ),
    "nothing made again": Case(
        *("llama", "none", "all", "float32", Layout(pipeline=3)),
        *(Schedule("gpipe", 1, (2, 1, 2)), 3),
    ),
    "tokens split": Case(
        *("many heads", "nothing", "all", "bfloat16", Layout(2, pipeline=2)),
        *(Schedule(sizes=(1, 2)), 2, {"use_seq_parallel": True}),
    ),
    "offloaded": Case(
        *("llama", "offload", "all", "bfloat16", Layout(pipeline=2)),
        *(Schedule(sizes=(2, 2)), 3),
    ),
    "first layer frozen": Case(
        *("llama", "nothing", "last layer", "bfloat16", Layout(pipeline=3)),
        *(Schedule(sizes=(1, 2, 1)), 7),
    ),
    "first layers frozen": Case(
        *("llama", "nothing", "behind two layers", "bfloat16", Layout(pipeline=2)),
        *(Schedule(sizes=(2, 2)), 4),
    ),
    "tied": Case(
        *("llama", "nothing", "all", "bfloat16", Layout(pipeline=3)),
        *(Schedule(sizes=(2, 2, 1)), 4, {}, "ulysses_cp", {**TIED, "vocab_size": 32768}),
    ),
    "tied, frozen": Case(
        *("llama", "attention", "last layer", "bfloat16", Layout(2, pipeline=2)),
        *(Schedule(sizes=(2, 2)), 3, {}, "ulysses_cp", TIED),
    ),
    "some layers checkpointed": Case(
        *("llama", "first layers", "all", "bfloat16", Layout(pipeline=3)),
        *(Schedule(sizes=(3, 2, 1)), 3),
    ),
    "chunks": Case(
        *("llama", "nothing", "all", "bfloat16", Layout(pipeline=4)),
        *(Schedule("seqpipe", 1, (3, 2, 2, 3), 4), 6),
    ),
    "chunks, nothing made again": Case(
        *("llama", "none", "all", "float32", Layout(pipeline=2)),
        *(Schedule("seqpipe", 2, (1, 2, 1, 2), 3), 3),
    ),
    "chunks of ranks": Case(
        *("many heads", "nothing", "all", "bfloat16", Layout(ulysses=2, pipeline=2)),
        *(Schedule("seqpipe", 1, (2, 2), 2), 3),
    ),
    "chunks, many heads": Case(
        *("many heads", "attention", "all", "bfloat16", Layout(pipeline=2)),
        *(Schedule("seqpipe", 1, (2, 2), 2), 3),
    ),
    "chunks of a ring": Case(
        *("many heads", "nothing", "all", "bfloat16", Layout(ring=2, pipeline=2)),
        *(Schedule("seqpipe", 1, (2, 2), 3), 3, {}, "ring_cp"),
    ),
    "chunks of an exchange": Case(
        *("llama", "attention", "all", "bfloat16", Layout(ring=4, pipeline=2)),
        *(Schedule("seqpipe", 1, (2, 2), 4), 3, {}, "planned_cp"),
    ),
    "chunks of layers with a state": Case(
        *("states", "nothing", "all", "bfloat16", Layout(pipeline=2)),
        *(Schedule("seqpipe", 1, (1, 1), 4), 3),
    ),
    "chunks before the first layer that trains": Case(
        *("many heads", "attention", "behind two layers", "bfloat16", Layout(pipeline=2)),
        *(Schedule("seqpipe", 1, (2, 2), 4), 3),
    ),
    "only the head": Case(
        *("llama", "nothing", "head", "bfloat16", Layout(pipeline=3)),
        *(Schedule(sizes=(2, 1, 2)), 3),
    ),
    "a stage without experts": Case(
        *("glm", "nothing", "all", "bfloat16", Layout(pipeline=2)),
        *(Schedule(sizes=(1, 2)), 3),
    ),
    "divided experts beside none": Case(
        *("glm", "attention", "last layer", "bfloat16", Layout(ulysses=2, pipeline=2, experts=2)),
        *(Schedule(virtual=2, sizes=(1, 1, 1, 1)), 3),
    ),
    "adapters": Case(
        *("qwen3", "nothing", "lora", "bfloat16", Layout(ulysses=2, pipeline=2)),
        *(Schedule(virtual=2, sizes=(1, 2, 1, 1)), 3),
    ),
}


def counted(rank: int, folder: Path) -> dict[str, list[int]]:
    """By case what each rank has, in a process that has no process group yet."""
    torch.distributed.destroy_process_group()
    found = {}
    for name, case in FEW.items():
        config = config_of(
            case.model, case.dtype, {"num_hidden_layers": case.layers, **case.config}
        )
        config.save_pretrained(folder / name)
        found[name] = count_stages(
            config,
            TOKENS * case.layout.context,
            MemoryBlock(**SAVING[case.saving]),
            case.layout,
            case.schedule,
            case.micro_batches,
            trained=TRAINED[case.trained],
            parallel=case.parallel,
            cut=cut_of(case, folder / name),
            algorithm=case.algorithm,
        )
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    return found


def cut_of(case: Case, folder: Path) -> Cut | None:
    """How rows are cut into chunks, if they are: the first ones are longest."""
    shape = read_shape(ModelBlock(config=folder), CONFIGS)
    assert isinstance(shape, ModelShape)
    if case.schedule.chunks == 1:
        return None
    multiple = chunk_multiple(case.layout, "use_seq_parallel" in case.parallel)
    cut = cut_by_flops(shape, case.schedule.chunks, multiple)
    _, first, *_ = cut.bounds(Segments.single(TOKENS * case.layout.context))
    assert first > 1.05 * (TOKENS * case.layout.context / case.schedule.chunks), "unequal"
    return cut


def predicted(case: Case, folder: Path) -> list[int]:
    """What is predicted of each rank."""
    shape = read_shape(ModelBlock(config=folder), CONFIGS)
    assert isinstance(shape, ModelShape)
    return predicted_of_ranks(
        shape,
        TOKENS * case.layout.context,
        MemoryBlock(**SAVING[case.saving]),
        case.layout,
        case.schedule,
        case.micro_batches,
        dtype=case.dtype,
        parallel=case.parallel,
        trained=TRAINED[case.trained],
        algorithm=case.algorithm,
    )


def test_every_rank_of_a_pipeline_is_predicted_within_two_percent(tmp_path: Path) -> None:
    found = spawn(1, counted, tmp_path)[0]
    off = {}
    for name, case in FEW.items():
        ratios = [
            want / have
            for want, have in zip(predicted(case, tmp_path / name), found[name], strict=True)
        ]
        if max(abs(ratio - 1) for ratio in ratios) > 0.02:
            off[name] = ratios
    assert off == {}
    # A schedule that keeps other micro-batches is found out.
    case = FEW["gpipe"]
    one_at_a_time = case._replace(schedule=case.schedule._replace(scheduler="1f1b"))
    other = predicted(one_at_a_time, tmp_path / "gpipe")
    assert other[0] / found["gpipe"][0] < 0.9


def test_offloaded_layers_and_rotary_angles_are_counted() -> None:
    """Of every micro-batch under way, and the angles of the one at work too."""
    shape, layout = hub("meta-llama/Llama-3.1-8B"), Layout(pipeline=2)
    schedule = Schedule(sizes=(16, 16))
    options = Options(schedule=schedule, offload_activations=True)
    one, _ = pass_bytes(shape, layout, TOKENS, options)
    stages = Stages.of_sizes(schedule.sizes, 2)
    more = 1 << 20
    layers = tuple(replace(each, held=each.held + more) for each in one.layers)
    held, angles = replace(one, layers=layers), replace(one, angles=one.angles + more)
    for rank, others in ((0, 1), (1, 0)):
        before, stays, turned = (
            rank_bytes([each], stages, schedule, 4, rank) for each in (one, held, angles)
        )
        of_layers = 16 * more
        assert stays.kept - before.kept == others * of_layers
        assert before.on_host - stays.on_host == (others + 1) * of_layers
        peaks = [each.kept + each.at_work for each in (before, turned)]
        assert peaks[1] - peaks[0] == (others + 1) * more


def test_as_many_are_under_way_as_the_warm_up_and_one() -> None:
    for ranks in (2, 4, 8):
        for virtual in (1, 2, 3):
            schedule = Schedule(virtual=virtual)
            for rank in range(ranks):
                every = moments(ranks, schedule, 3 * ranks, rank)
                most = max(sum(map(sum, one.under_way)) for one in every)
                assert most == warm_up(rank, ranks, virtual)
                later = moments(ranks, schedule, 9 * ranks, rank)
                assert set(later) == set(every), "three rounds show all there is"
            all_first = moments(ranks, Schedule("gpipe"), 5, 0)
            assert max(one.under_way for one in all_first) == ((4,),)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_messages_are_those_that_are_posted_and_those_that_lines_keep(rank: int) -> None:
    """One posted for each neighbour, and two gradients on the line to the one before."""
    most = max(one.messages for one in moments(4, Schedule(), 12, rank))
    assert most == {0: 1, 1: 4, 3: 3}[rank]
