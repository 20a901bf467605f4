"""The seconds of one step by part: a model under a layout, on a cluster.

What is not predicted stands in NOT_PREDICTED. Shapes are those of the slowest rank: the one with
most tokens, most heads and most pairs of query and key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import cast

from uspft.families import ModelShape
from uspft.layout import COPIES, Layout
from uspft.planner.attention_work import (
    AttentionWork,
    DrawnRows,
    attention_of_row,
    attention_of_sample,
    is_whole,
)
from uspft.planner.flops import step_flops
from uspft.planner.links import Collective
from uspft.planner.machine import Hardware
from uspft.planner.mesh_step import mesh_parts
from uspft.planner.products import (
    head_projection,
    layer_projections,
    met_parameters,
    parameters_of,
)
from uspft.planner.spread import Spread
from uspft.planner.step_shape import StepPart, StepShape, StepTime
from uspft.planner.wire import gathered_elements, wire_of
from uspft.sequence import Algorithm, Cost, Heads, Traffic
from uspft.sequence.rows.heads import split_heads

NOT_PREDICTED = (
    "the time of pipelines, offloading and MLPs in tiles",
    "host time: Python, reading data, launches that a device waits for",
    "replicas or tensor ranks that wait for one another, and transfers that meet on one link",
)
UPDATE_BYTES = 30
"""AdamW reads weight, gradient and two moments in float32, writes all but the gradient, and rounds
the weight to 16 bits."""
JOIN_BYTES = (18, 10)
"""Read and written for each element of a query where what one arrival of keys gives is joined with
what is there: forward (kernels/merge.py), and backward its gradient."""
HIDING = ("products", "elementwise")
"""The parts behind which ZeRO's transfers pass."""
LOSS_PASSES = 8
"""Times that a tile of logits in float32 is read or written (model/loss.py)."""


def step_time(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> StepTime:
    """Return what a step takes; the algorithm splits its rows at the layout's degrees."""
    passes = step.passes(layout)
    one = forward_and_backward(step, layout, algorithm, hardware)
    behind = sum(part.seconds for part in one if part.name in HIDING)
    each = hidden_behind(step, zero_in_each_pass(step, layout, hardware), behind)
    parts = [part.times(passes) for part in (*one, *each)]
    summed, *others = zero_once(step, layout, hardware)
    return StepTime((*parts, *hidden_behind(step, [summed], passes * behind), *others))


def forward_and_backward(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> list[StepPart]:
    """Return what one forward and backward of `step.rows` rows takes, without ZeRO's part in it.

    Attention is that of the row's documents. With 0 rows it is what a pass takes beside its rows,
    reading every weight included.
    """
    return [
        *_matrices(step, layout, hardware),
        _elementwise(step, layout, hardware),
        *_attention(step, layout, algorithm, hardware),
    ]


def model_flops(step: StepShape) -> float:
    """Return the step's FLOPs as MFU counts them."""
    model, layers = step.model, Counter(step.windows)
    rows = step.sample or DrawnRows((step.row,))
    pairs = sum(count * rows.pairs(window) for window, count in layers.items())
    tokens, parameters = step.step_rows * step.row.length, met_parameters(model)
    shape = (len(step.windows), model.heads, model.head_dim)
    mean = int(step.step_rows * pairs / max(1, len(step.windows)))
    return step_flops(parameters, tokens, mean, shape, frozen=int((1 - step.trained) * parameters))


def _matrices(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the matrix products of one forward and backward, and what tensor ranks move for them.

    On MeshSlice's mesh transfers pass behind products.
    """
    if step.slices is None or layout.tensor == 1:
        yield from _products(step, layout, hardware)
        yield from _tensor(step, layout, hardware)
        return
    for part in mesh_parts(step, layout, step.slices, hardware):
        yield StepPart("products", part.computed)
        yield StepPart("tensor", part.moved, part.hidden, part.bytes)


def _products(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the matrix products of one forward and backward."""
    model, tokens = step.model, step.tokens(layout)
    forward = backward = 0.0
    for one in layer_projections(model):
        part = one.on(layout.tensor)
        sizes = tokens * part.per_token, part.inputs, part.outputs
        there, back = step.product_seconds(sizes, hardware)
        forward, backward = forward + there, backward + back
    head = head_projection(model).on(layout.tensor)
    yield StepPart("products", model.layers * (step.forwards * forward + backward))
    both = step.product_seconds((tokens, head.inputs, head.outputs), hardware)
    yield StepPart("products", sum(both))


def _elementwise(step: StepShape, layout: Layout, hardware: Hardware) -> StepPart:
    """Return the work between products, which memory bounds."""
    tokens = step.tokens(layout)
    moved = 2 * step.element_bytes * tokens * _elements_per_token(step, layout)
    # Its backward reads and writes twice as much.
    between = step.model.layers * (step.forwards + 2) * moved
    logits = LOSS_PASSES * 4 * tokens * head_projection(step.model).on(layout.mesh_columns).outputs
    return StepPart("elementwise", hardware.memory_seconds(between + logits))


def _elements_per_token(step: StepShape, layout: Layout) -> float:
    """Return how many elements a layer makes of a token on a tensor rank.

    They are norms and residuals, which Megatron's ranks divide under use_seq_parallel alone; q, k,
    v before and after rotation; and the inside of the MLP.
    """
    model, tensor = step.model, layout.mesh_columns
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    inner = sum(
        one.on(tensor).outputs * one.per_token
        for one in layer_projections(model)
        if one.splits == "outputs" and one.unit == 1
    )
    divided = step.use_seq_parallel or step.slices is not None
    outside = 8 * model.hidden_size / (tensor if divided else 1)
    return outside + 3 * heads / tensor + 2 * inner


def _attention(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware
) -> Iterator[StepPart]:
    """Yield the attention of one forward and backward of all layers, and what it moves."""
    for window, layers in Counter(step.windows).items():
        forward = attention_forward(step, layout, algorithm, hardware, window)
        backward = _attention_backward(step, layout, algorithm, hardware, window)
        again = {"attention": step.attention.keys, "all_to_all": step.attention.heads}
        for part in forward:
            yield part.times(layers * again.get(part.name, step.attention.keys))
        for part in backward:
            yield part.times(layers)


def attention_forward(
    step: StepShape,
    layout: Layout,
    algorithm: Algorithm,
    hardware: Hardware,
    window: int | None = None,
) -> list[StepPart]:
    """Return what one layer's attention takes forward, once, and what it moves."""
    work = _work(step, layout, algorithm, window)
    return _one_way(step, layout, hardware, work, work.forward, backward=False)


def _attention_backward(
    step: StepShape, layout: Layout, algorithm: Algorithm, hardware: Hardware, window: int | None
) -> list[StepPart]:
    work = _work(step, layout, algorithm, window)
    return _one_way(step, layout, hardware, work, work.backward, backward=True)


def _work(
    step: StepShape, layout: Layout, algorithm: Algorithm, window: int | None
) -> AttentionWork:
    heads = local_heads(step.model, layout.mesh_columns)
    frozen = cast("Hashable", algorithm)  # a dataclass that is
    if step.sample is None and (step.dealt or is_whole(step.row, window)):
        return attention_of_row(frozen, step.row, heads, step.element_bytes, window)
    rows = step.sample or DrawnRows((step.row,))
    return attention_of_sample(frozen, rows, heads, step.element_bytes, window, dealt=step.dealt)


def _one_way(
    step: StepShape,
    layout: Layout,
    hardware: Hardware,
    work: AttentionWork,
    sent: Cost,
    *,
    backward: bool,
) -> list[StepPart]:
    """Return what attention takes in one direction, and what it moves.

    Keys come while attention to those that are there goes on: of what both could do at the same
    time, the hardware's `hide` is done so. Nothing hides what waits for the last to arrive, nor the
    gradients of these that go home after it. Heads are exchanged before and after, and nothing
    hides that.
    """
    heads = local_heads(step.model, layout.mesh_columns)
    shares = split_heads(heads.query, heads.kv, layout.ulysses).query
    most = max(last - first for first, last in shares)
    pairs, arrivals = step.rows * work.pairs, work.forward.arrivals
    computed = hardware.attention_seconds(pairs, most, heads.dim, backward=backward)
    joined = JOIN_BYTES[backward] * step.rows * work.joined * most * heads.dim
    beside = arrivals * hardware.attention.launch_seconds + hardware.memory_seconds(joined)
    cost = _times(sent, step.rows)
    wire = wire_of(cost, layout, hardware)
    waits = (layout.ring - 1) / (layout.ring * max(1, arrivals))
    found = [StepPart("attention", computed + beside)]
    for name, seconds, traffic in (
        ("ring", wire.ring, cost.ring),
        ("gather", wire.gather, cost.gather),
    ):
        able = seconds * (1 - work.home_share / max(1, arrivals) if backward else 1)
        hidden = hardware.hide * min(able, computed * (1 - waits))
        found.append(StepPart(name, seconds, hidden, traffic.bytes))
    found.append(StepPart("all_to_all", wire.all_to_all, bytes=cost.all_to_all.bytes))
    return found


def local_heads(model: ModelShape, tensor: int) -> Heads:
    """Return the heads of one layer on a tensor rank.

    A KV head that does not divide is replicated.
    """
    return Heads(-(-model.heads // tensor), -(-model.kv_heads // tensor), model.head_dim)


def _times(cost: Cost, rows: int) -> Cost:
    """Return the cost of so many rows that go through attention together."""

    def more(one: Traffic) -> Traffic:
        return one._replace(bytes=rows * one.bytes)

    return Cost(more(cost.all_to_all), more(cost.ring), more(cost.gather), cost.arrivals)


def _tensor(step: StepShape, layout: Layout, hardware: Hardware) -> Iterator[StepPart]:
    """Yield the transfers of Megatron's tensor parallelism.

    Each layer sums activations over the tensor ranks twice forward (again when it is recomputed)
    and twice backward, the embedding once forward, the head's input gradient once; the loss makes
    three sums of a number for each token. Under use_seq_parallel a sum is a reduce-scatter and an
    all-gather of the same bytes. Ranks that share a head of a fused projection gather it.
    """
    if layout.tensor == 1:
        return
    model, tokens = step.model, step.tokens(layout)
    spread = Spread.of(layout, ("mesh_columns",), hardware.ranks_per_host)
    activations = tokens * model.hidden_size * step.element_bytes
    count = model.layers * (2 * step.forwards + 2) + 2
    if step.use_seq_parallel:
        ways: tuple[Collective, ...] = ("reduce_scatter", "all_gather")
        each = sum(hardware.by_host_seconds(kind, activations, spread) for kind in ways)
    else:
        each = hardware.collective_seconds("all_reduce", activations, spread)
    of_loss = hardware.collective_seconds("all_reduce", 4 * tokens, spread)
    yield StepPart("tensor", count * each + 3 * of_loss, bytes=count * activations + 12 * tokens)
    if heads := tokens * step.element_bytes * gathered_elements(model, layout.tensor):
        seconds = hardware.collective_seconds("all_to_all", heads, spread)
        times = model.layers * (step.forwards + 1)
        yield StepPart("tensor", times * seconds, bytes=times * heads)


def zero_in_each_pass(step: StepShape, layout: Layout, hardware: Hardware) -> list[StepPart]:
    """Return DeepSpeed's transfers of every forward and backward, which stages 2 and 3 have.

    Stage 2 sums gradients by all-reduces of buckets (its use_multi_rank_bucket_allreduce). Stage 3
    gathers each layer's weights forward and backward, and reduce-scatters its gradients.
    """
    spread = Spread.of(layout, COPIES, hardware.ranks_per_host)
    if spread.ranks == 1 or step.stage < 2:
        return []
    gradients, weights = _state_bytes(step, layout)
    if step.stage == 2:
        summed = hardware.collective_seconds("all_reduce", gradients, spread)
        return [StepPart("gradients", summed, bytes=gradients)]
    pieces = step.model.layers + 1
    summed = hardware.collective_seconds("reduce_scatter", gradients / pieces, spread)
    gathered = hardware.collective_seconds("all_gather", weights / pieces, spread)
    return [
        StepPart("gradients", pieces * summed, bytes=gradients),
        StepPart("weights", 2 * pieces * gathered, bytes=2 * weights),
    ]


def zero_once(step: StepShape, layout: Layout, hardware: Hardware) -> list[StepPart]:
    """Return the sum of gradients at stages 0 and 1, then the other parts that a step has once.

    These are the update, and at stages 1 and 2 the gathering of the new weights.
    """
    spread = Spread.of(layout, COPIES, hardware.ranks_per_host)
    gradients, weights = _state_bytes(step, layout)
    held = gradients / step.gradient_bytes / (spread.ranks if step.stage else 1)
    found = [StepPart("gradients", 0.0)]
    if spread.ranks > 1 and step.stage < 2:
        kind: Collective = "reduce_scatter" if step.scatters else "all_reduce"
        summed = hardware.collective_seconds(kind, gradients, spread)
        found = [StepPart("gradients", summed, bytes=gradients)]
    found.append(StepPart("update", hardware.memory_seconds(UPDATE_BYTES * held)))
    if spread.ranks > 1 and step.stage in (1, 2):
        new = weights * step.trained
        seconds = hardware.collective_seconds("all_gather", new, spread)
        found.append(StepPart("weights", seconds, bytes=new))
    return found


def _state_bytes(step: StepShape, layout: Layout) -> tuple[float, float]:
    """Return the bytes of the gradients and of the weights that a rank's layout gives it, before
    ZeRO divides them."""
    outside, layer = parameters_of(step.model, layout.mesh_columns)
    whole = (outside + step.model.layers * layer) / layout.mesh_rows
    return step.gradient_bytes * whole * step.trained, step.element_bytes * whole


def hidden_behind(step: StepShape, parts: Sequence[StepPart], behind: float) -> Iterator[StepPart]:
    """Yield ZeRO's transfers with what passes behind so many seconds of products: under
    overlap_comm all of each but one layer's."""
    pieces = step.model.layers + 1
    for part in parts:
        hidden = min(part.seconds * (1 - 1 / pieces), behind) if step.hides else 0.0
        behind -= hidden
        yield part._replace(hidden=hidden)
