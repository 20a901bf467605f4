"""A step by part: bytes by formula, what is hidden, what grows with what, and published runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from benchmarks.experts.counted import crossover_tokens, expert_parameters, token_cost
from tests.support.algorithms import named
from tests.support.hardware import H100, made
from tests.support.shapes import hub, windowed
from tests.support.steps import changed, mesh_time, step_of
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.machine import Hardware, read_hardware
from uspft.planner.step import model_flops, step_time
from uspft.planner.step_shape import PlacedStep, StepShape, StepTime
from uspft.planner.trained import Trains, counts_of
from uspft.prepare.known import shipped
from uspft.segments import Segments

LLAMA = hub("meta-llama/Llama-3.1-8B")
PARAMETERS = 8_030_261_248
ONE = Layout()


def step(**changes: Any) -> StepShape:
    return changed(step_of(LLAMA, 1 << 15, step_rows=8, checkpointing=False), **changes)


def timed(
    layout: Layout, hardware: Hardware = H100, algorithm: str = "", **changes: Any
) -> StepTime:
    """The row's algorithm: named, or Ulysses or the ring where only one of them is above 1."""
    usual = "ulysses_cp" if layout.ulysses > 1 else "ring_cp"
    chosen = algorithm or (usual if layout.context > 1 else "whole")
    return step_time(
        PlacedStep(step(**changes), layout, hardware, named(chosen, layout.ulysses, layout.ring))
    )


def test_parts_sum_to_the_step() -> None:
    found = timed(Layout(ulysses=4, ring=2), algorithm="hybrid_cp", zero_stage=3, overlaps=True)
    names = {part.name for part in found.parts}
    assert names >= {"products", "attention", "elementwise", "update", "all_to_all", "ring"}
    assert found.of(*names) - found.hidden == pytest.approx(found.seconds)
    assert found.hidden > 0 and all(0 <= part.hidden <= part.seconds for part in found.parts)


def test_one_rank_computes_all_and_moves_nothing() -> None:
    found = timed(ONE)
    computed = found.of("products", "attention", "elementwise", "update")
    assert found.seconds == pytest.approx(computed) and found.hidden == 0
    tokens = 8 << 15
    products = 6 * (PARAMETERS - LLAMA.vocab_size * LLAMA.hidden_size) * tokens
    assert found.of("products") == pytest.approx(products / (0.803 * 989e12), rel=0.02)
    pairs = 8 * 32 * (1 << 15) * ((1 << 15) + 1) / 2
    attention = pairs * 32 * 128 * (4 / 370e12 + 10 / 323e12)
    assert found.of("attention") == pytest.approx(attention, rel=0.01)
    update = 34 + 20 + 34 + 7 * 26  # bytes of DeepSpeed's passes and update at stage 1
    assert found.of("update") == pytest.approx(update * PARAMETERS / 3.35e12, rel=1e-3)


def test_layers_with_heads_of_two_sizes_cost_what_they_would_apart() -> None:
    """Those that see all have fewer KV heads, of twice the features."""
    layout, slides = Layout(ulysses=2, ring=2), (True,) * 20 + (False,) * 12
    alike = windowed(LLAMA, 512, slides)
    both = replace(alike, seeing_all=(4, 256))
    wide = replace(LLAMA, kv_heads=4, head_dim=256)
    names = "attention", "ring", "all_to_all", "products"
    parts = [
        timed(layout, algorithm="hybrid_cp", model=model)
        for model in (
            *(both, windowed(LLAMA, 512, slides[:20]), windowed(wide, 512, slides[20:])),
            *(replace(LLAMA, layers=1), replace(LLAMA, layers=2)),
        )
    ]
    for name in names:
        whole, *apart, one, two = (part.of(name) for part in parts)
        head = 2 * one - two
        assert whole == pytest.approx(sum(apart) - head, rel=1e-6), name
    flops = [model_flops(step(model=one)) for one in (both, alike)]
    assert flops[0] > 1.1 * flops[1]


def test_recomputing_adds_a_forward_of_the_layers_and_no_attention() -> None:
    kept, again = timed(ONE), timed(ONE, checkpointing=True)
    head = LLAMA.vocab_size * LLAMA.hidden_size
    layers = PARAMETERS - 2 * head
    ratio = (4 * layers + 3 * head) / (3 * layers + 3 * head)
    assert again.of("products") / kept.of("products") == pytest.approx(ratio, rel=0.01)
    assert again.of("attention") == kept.of("attention")


def test_frozen_parameters_have_no_gradient_of_their_own() -> None:
    frozen = timed(Layout(data=2), trains=Trains(freeze=(r"layers\.",)))
    whole = timed(Layout(data=2))
    trained = (2 * LLAMA.vocab_size + 1) * LLAMA.hidden_size / PARAMETERS
    assert frozen.of("products") / whole.of("products") == pytest.approx(
        (2 + trained) / 3, rel=0.01
    )
    assert frozen.bytes_of("gradients") == pytest.approx(trained * whole.bytes_of("gradients"))


@pytest.mark.parametrize(
    ("stage", "gradients", "weights"),
    [(0, 4, 0), (1, 4, 2), (2, 4 * 4, 2), (3, 4 * 4, 2 * 4 * 2)],
)
def test_bytes_of_zero(stage: int, gradients: int, weights: int) -> None:
    """Four forwards a step on each of two replicas; for each parameter 4 bytes of gradient and 2 of
    weight, as often as the stage moves them."""
    found = timed(Layout(data=2), zero_stage=stage)
    assert found.bytes_of("gradients") == pytest.approx(gradients * PARAMETERS, rel=1e-3)
    assert found.bytes_of("weights") == pytest.approx(weights * PARAMETERS, rel=1e-3)
    few, many = (timed(Layout(data=n), zero_stage=stage, step_rows=n).of("update") for n in (2, 8))
    assert many < few if stage else many == few, "from stage 1 on ranks share it"


def test_zero_divides_over_context_ranks_too() -> None:
    apart = timed(Layout(ulysses=8), zero_stage=1).bytes_of("gradients")
    assert apart == timed(Layout(data=8), zero_stage=1).bytes_of("gradients")


def test_copies_by_turns_hide_all_but_an_nth_of_the_shorter() -> None:
    """Of a layer's blocks: the larger of products and transfers, and an nth of the other."""
    fast = H100.model_copy(update={"hide": 1.0})
    for hardware in (fast, fast.model_copy(update={"ranks_per_host": 1})):
        one, two = (
            timed(Layout(2), hardware, step_rows=1, use_seq_parallel=True, copies=n) for n in (1, 2)
        )
        of_layers, blocks = (
            next(part.seconds for part in two.parts if part.name == name)
            for name in ("products", "tensor")
        )
        assert one.hidden == 0
        assert two.hidden == pytest.approx(min(of_layers, blocks) / 2)
        assert two.bytes_of("tensor") == one.bytes_of("tensor")
    by_host = fast.model_copy(update={"ranks_per_host": 2})
    assert timed(Layout(4), by_host, step_rows=1, use_seq_parallel=True, copies=2).hidden == 0


def test_bytes_of_tensor_parallelism() -> None:
    """Four sums of activations a layer, two more, and three numbers a token for the loss; a forward
    that is run again ends before the last of a layer."""
    activations = (1 << 15) * 4096 * 2
    of_loss = 3 * 4 * (1 << 15)
    found = timed(Layout(4), step_rows=1)
    assert found.bytes_of("tensor") == pytest.approx((4 * 32 + 2) * activations + of_loss)
    again = timed(Layout(4), step_rows=1, checkpointing=True)
    assert again.bytes_of("tensor") == pytest.approx((5 * 32 + 2) * activations + of_loss)
    split = timed(Layout(4), step_rows=1, checkpointing=True, use_seq_parallel=True)
    assert split.bytes_of("tensor") == pytest.approx((5.5 * 32 + 2) * activations + of_loss)
    groups = {
        "recompute": "attention",
        "at_once": 1,
        "checkpointing": True,
        "use_seq_parallel": True,
    }
    gathered = timed(Layout(4), step_rows=1, **groups)
    assert gathered.bytes_of("tensor") == pytest.approx((6 * 32 + 2) * activations + of_loss)
    once = {"at_once": 1, "use_seq_parallel": True}
    for tiles in (0, 1):  # which are made again in the backward
        found = timed(Layout(4), step_rows=1, mlp_tile=tiles, **once)
        sums = (4.5 + tiles / 2) * 32 + 2
        assert found.bytes_of("tensor") == pytest.approx(sums * activations + of_loss)
    found = timed(Layout(4), step_rows=1)
    halves = timed(Layout(4, ulysses=2), step_rows=1)
    assert halves.bytes_of("tensor") == pytest.approx(found.bytes_of("tensor") / 2)


SUMS = [
    ("mistralai/Mixtral-8x7B-v0.1", 32 * 4, 32 * 5),
    ("zai-org/GLM-4.5-Air", 4 + 45 * 6, 5 + 45 * 8),
    ("google/gemma-3-12b-it", 48 * 4, 48 * 6),
]
"""What tensor ranks sum of activations in all layers, and with recomputation: shared experts once
more, and a norm behind an MLP has its sum made again."""


@pytest.mark.parametrize(("name", "once", "again"), SUMS)
def test_sums_of_activations_are_those_of_each_layers_blocks(
    name: str, once: int, again: int
) -> None:
    model = hub(name)
    activations, of_loss = (1 << 15) * model.hidden_size * 2, 12 * (1 << 15)
    for recompute, sums in ((False, once), (True, again)):
        found = timed(Layout(2), model=model, step_rows=1, checkpointing=recompute)
        assert found.bytes_of("tensor") == pytest.approx((sums + 2) * activations + of_loss)


def test_ranks_that_share_a_head_of_a_fused_projection_gather_it() -> None:
    """Half of the keys and values of 8 heads of 128, there and back, where two ranks share one."""
    phi = replace(LLAMA, model_type="phi3")
    for tensor, elements in ((8, 0.0), (16, 128.0)):
        plain, fused = (
            timed(Layout(tensor), model=model, step_rows=1).bytes_of("tensor")
            for model in (LLAMA, phi)
        )
        assert fused - plain == pytest.approx(2 * 32 * elements * 2 * (1 << 15))


def test_activations_that_are_sharded_take_as_many_bytes_and_less_memory(tmp_path: Path) -> None:
    plain = made(tmp_path)  # whose all-reduce is a reduce-scatter and an all-gather
    whole, sharded = (
        timed(Layout(4), plain, step_rows=1, use_seq_parallel=on) for on in (False, True)
    )
    assert sharded.of("tensor") == pytest.approx(whole.of("tensor"))
    assert sharded.of("elementwise") < whole.of("elementwise")


def test_a_mesh_is_in_the_step_with_what_it_hides() -> None:
    """Products and transfers of four slices; tokens are half a row's, heads a quarter, and ranks of
    a mesh hold each parameter once."""
    layout = Layout(4, ring=2, data=2, mesh_rows=2)
    found = timed(layout, slices=(4, 4, 4, 4))
    each = mesh_time(PlacedStep(step(slices=(4, 4, 4, 4)), layout, H100))
    for name in ("products", "tensor"):
        assert found.of(name) == pytest.approx(4 * each.of(name))
    assert found.bytes_of("tensor") == pytest.approx(4 * each.bytes_of("tensor"))
    hidden = sum(part.hidden for part in found.parts if part.name == "tensor")
    assert hidden == pytest.approx(4 * each.hidden) and hidden > 0
    assert found.bytes_of("gradients") == pytest.approx(4 * PARAMETERS / 8, rel=1e-3)
    flat = timed(Layout(8, data=2))
    assert found.of("attention") == pytest.approx(flat.of("attention"), rel=0.02)
    assert found.of("elementwise") < flat.of("elementwise")


def test_bytes_of_heads_are_the_algorithms_own() -> None:
    """2 · (U − 1) / U · (2H + 2G) · tokens · D elements of 2 bytes a layer, both ways."""
    found = timed(Layout(ulysses=8), step_rows=1)
    each = 2 * 7 / 8 * (2 * 32 + 2 * 8) * ((1 << 15) / 8) * 128 * 2
    assert found.bytes_of("all_to_all") == pytest.approx(32 * each)
    assert found.hidden == 0, "heads are waited for"


def slow_links(rate: float) -> Hardware:
    """An H100 whose links inside a host carry so many bytes a second."""
    own = {"bytes_per_second": rate, "point_to_point": None}
    return H100.model_copy(update={"inside": H100.inside.model_copy(update=own)})


def test_a_ring_hides_behind_attention_while_attention_lasts() -> None:
    fast = timed(Layout(ring=8), step_rows=1)
    at_home = 1 / 7 / 3  # of what both ways send, the last gradients that go home
    assert fast.hidden == pytest.approx(H100.hide * fast.of("ring") * (1 - at_home), rel=0.02)
    found = timed(Layout(ring=8), slow_links(1e6), step_rows=1)
    attention = timed(Layout(ulysses=8), step_rows=1).of("attention")  # as much, in one piece
    assert found.hidden == pytest.approx(H100.hide * 7 / 8 * attention, rel=1e-3)
    assert found.hidden < found.of("ring")
    joined = found.of("attention") - attention
    assert 0 < joined < 0.1 * attention


def test_what_a_ring_hides_is_the_machines() -> None:
    layout = Layout(ring=8)
    none, half, all_of_it = (
        timed(layout, H100.model_copy(update={"hide": share}), step_rows=1).hidden
        for share in (0.0, 0.5, 1.0)
    )
    assert none == 0 and all_of_it == pytest.approx(2 * half) and half > 0


def test_gradients_of_keys_that_came_last_go_home_behind_nothing() -> None:
    """On a ring of two all gradients of the other's keys do."""
    two = timed(Layout(ring=2), step_rows=1)
    assert two.hidden == pytest.approx(H100.hide * two.of("ring") * 2 / 3, rel=0.02)


def test_keys_that_come_at_once_hide_behind_a_ranks_own() -> None:
    found = timed(Layout(ring=8), slow_links(1e8), "allgather_cp", step_rows=1)
    attention = timed(Layout(ulysses=8), step_rows=1).of("attention")
    assert found.hidden == pytest.approx(H100.hide * 1 / 8 * attention, rel=1e-3)


def test_stage_3_hides_behind_products_where_it_overlaps() -> None:
    layout = Layout(data=8)
    alone, behind = (timed(layout, zero_stage=3, overlaps=on) for on in (False, True))
    assert alone.hidden == 0
    moved = behind.of("gradients", "weights")
    assert behind.hidden == pytest.approx(moved * 32 / 33)
    assert behind.hidden <= behind.of("products", "elementwise")


@pytest.mark.parametrize("change", [{"step_rows": 16}, {"row": Segments.single(1 << 16)}])
def test_more_work_takes_longer(change: dict[str, Any]) -> None:
    for layout in (ONE, Layout(ulysses=8), Layout(ring=8), Layout(8), Layout(data=8)):
        assert timed(layout, **change).seconds > timed(layout).seconds


def test_documents_and_windows_have_less_attention() -> None:
    packed = Segments(tuple(range(0, (1 << 15) + 1, 1 << 12)), 1 << 15)
    whole = timed(ONE).of("attention")
    assert timed(ONE, row=packed).of("attention") == pytest.approx(whole / 8, rel=0.01)
    some = windowed(LLAMA, 4096, (True, False) * 16)
    assert whole / 2 < timed(ONE, model=some).of("attention") < 0.7 * whole
    flops = [model_flops(step(row=row)) for row in (packed, Segments.single(1 << 15))]
    assert flops[0] < flops[1]


def test_flops_are_those_of_mfu() -> None:
    tokens = 8 << 15
    parameters = PARAMETERS - LLAMA.vocab_size * LLAMA.hidden_size
    pairs = 8 * (1 << 15) * ((1 << 15) + 1) / 2
    want = 6 * parameters * tokens + 12 * 32 * 32 * 128 * pairs
    assert model_flops(step()) == pytest.approx(want, rel=1e-4)


LLAMA_2 = replace(LLAMA, kv_heads=32, intermediate_size=11008, vocab_size=32000)
# USP paper (arXiv 2405.07719), table 5: LLaMA-2-7B on 8 A800, ZeRO-1, no recomputation, sharded
# activations where tensor is above 1: (tensor, Ulysses, ring), rows of a step, TFLOP/s a GPU.
PUBLISHED = [
    (65536, 1, (4, 2, 1), 154.49),
    (65536, 1, (4, 1, 2), 151.40),
    (65536, 1, (8, 1, 1), 141.85),
    (30720, 16, (1, 8, 1), 163.42),
    (30720, 16, (2, 4, 1), 155.98),
    (30720, 16, (4, 1, 1), 150.05),
    (30720, 16, (2, 1, 4), 147.77),
    (30720, 16, (8, 1, 1), 129.12),
]


def rated(length: int, rows: int, degrees: tuple[int, int, int]) -> float:
    """Predicted TFLOP/s of a GPU."""
    tensor, ulysses, ring = degrees
    layout = Layout(tensor, ulysses, ring, 8 // prod(degrees))
    chosen = named("hybrid_cp" if ulysses * ring > 1 else "whole", ulysses, ring)
    given = step(
        model=LLAMA_2,
        row=Segments.single(length),
        step_rows=rows,
        use_seq_parallel=tensor > 1,
    )
    found = step_time(PlacedStep(given, layout, read_hardware(shipped()["a800"]), chosen))
    return model_flops(given) / found.seconds / 8 / 1e12


def test_published_runs_are_rated_a_little_too_high_and_in_their_order() -> None:
    predicted = {(row[0], row[2]): rated(*row[:3]) for row in PUBLISHED}
    ratios = [predicted[row[0], row[2]] / row[3] for row in PUBLISHED]
    assert all(1.05 < ratio < 1.35 for ratio in ratios), ratios
    for first, second in pairwise(PUBLISHED):
        if first[0] == second[0] and first[3] > 1.1 * second[3]:
            assert predicted[first[0], first[2]] > predicted[second[0], second[2]]
    slowest = min((row for row in PUBLISHED if row[0] == 30720), key=lambda row: row[3])
    assert min(predicted, key=lambda key: predicted[key]) == (30720, slowest[2])


QWEN = hub("Qwen/Qwen3-30B-A3B")
LINE = {"launch_seconds": 0.0, "hop_seconds": 0.0, "bytes_per_second": 1e9}


def timed_under_zero(layout: Layout, hardware: Hardware, tokens: int, stage: int = 3) -> StepTime:
    given = step_of(QWEN, tokens, step_rows=layout.data, zero_stage=stage)
    return step_time(PlacedStep(given, layout, hardware, named("whole", 1, 1)))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_of_divided_experts_a_part_moves(stage: int) -> None:
    """Of every parameter 4 bytes of gradient, and 2 of weight, twice at stage 3."""
    experts = QWEN.layers * expert_parameters(QWEN)
    rest = counts_of(QWEN).every - experts
    assert experts == 48 * 3 * 128 * 2048 * 768
    for degree in (1, 2, 4):
        found = timed_under_zero(Layout(data=8, experts=degree), H100, 4096, stage)
        here = rest + experts / degree
        assert found.bytes_of("gradients") == pytest.approx(4 * here, rel=1e-6)
        times = 4 if stage == 3 else 2
        assert found.bytes_of("weights") == pytest.approx(times * here, rel=1e-6)
        alone = timed_under_zero(Layout(data=8), H100, 4096, stage)
        assert (found.of("update") < alone.of("update")) == (degree > 1), "it has fewer to sum"
        assert (found.bytes_of("experts") > 0) == (degree > 1)
    whole = timed_under_zero(Layout(data=8, experts=8), H100, 4096, stage)
    assert whole.bytes_of("weights") == pytest.approx(times * rest, rel=1e-6), "no one has the same"


def test_dispatch_takes_as_long_as_it_spares_at_the_crossover(tmp_path: Path) -> None:
    """On links of one rate, of which nothing is hidden: below it experts are best divided."""
    line = made(tmp_path, inside=LINE, between=LINE, ranks_per_host=8)
    for degree in (2, 4, 8):
        token = token_cost(QWEN, 2, degree, forwards=2)
        tokens = crossover_tokens(QWEN, degree, 2 * 2 + 4, token)

        def moved(layout: Layout, share: float, tokens: float = tokens) -> float:
            found = timed_under_zero(layout, line, round(share * tokens))
            return found.of("experts", "weights", "gradients")

        local, divided = Layout(data=8), Layout(data=8, experts=degree)
        assert moved(divided, 1.0) == pytest.approx(moved(local, 1.0), rel=1e-3)
        assert moved(divided, 0.97) < moved(local, 0.97)
        assert moved(divided, 1.03) > moved(local, 1.03)


def test_matrices_of_many_experts_are_read_for_few_tokens() -> None:
    few, dense = 64, replace(QWEN, raw={**QWEN.raw, "num_experts": 8})
    model: ModelShape
    for model, experts in ((QWEN, 128), (dense, 8)):
        given = step_of(model, few, step_rows=1, checkpointing=False)
        found = step_time(PlacedStep(given, Layout(), H100, named("whole", 1, 1)))
        read = 3 * 48 * 2 * expert_parameters(model) / H100.memory.bytes_per_second
        assert found.of("products") > read
        assert expert_parameters(model) == 3 * experts * 2048 * 768
