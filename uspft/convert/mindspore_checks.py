"""What MindSpore Transformers' own checks refuse, in our words, before ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from uspft.config.algorithms import Splits
from uspft.convert.conversion import Conversion, short
from uspft.convert.mindspore_layout import (
    ALGORITHM,
    BLOCK,
    CHUNKS,
    CONFIG,
    EXPERTS,
    MESH,
    SCHEDULER,
    SEQUENCE,
    VIRTUAL,
    TheirDegrees,
    algorithm_of,
    all_of,
)

DEEPEST = 10
"""How deep their YAML may be."""
LEAST_MASKED = 2048
"""The length that rows must exceed where masks are compressed."""
_TOO = "an error there too"
_FLASH, _RING = f"{CONFIG}.use_flash_attention", f"{CONFIG}.use_ring_attention"
_MASKS, _EOD = f"{CONFIG}.use_attn_mask_compression", f"{CONFIG}.use_eod_attn_mask_compression"
_HEADS, _EXPERTS = f"{CONFIG}.num_heads", "moe_config.expert_num"
Wrong = Iterator[tuple[str, str, str]]
"""Of each error the key, what is wrong, and the remedy."""


def their_errors(run: Conversion, degrees: TheirDegrees) -> None:
    """Refuse what their own checks refuse; other modes than training too."""
    mode = run.value("run_mode", "train")
    if mode not in ("train", "finetune"):
        run.refuse("run_mode", f"is {short(mode)}", "only training is converted: write finetune")
    elif run.written("run_mode"):
        run.changed("run_mode", "a recipe trains")
    for rule in _RULES:
        for key, what, remedy in rule(run, degrees):
            run.refuse(key, f"{what}: {_TOO}", remedy)


def _depth(run: Conversion, degrees: TheirDegrees) -> Wrong:
    for key in run.theirs.values:
        if len(re.split(r"(?<!\\)\.", key)) > DEEPEST:
            yield key, f"stands deeper than {DEEPEST} blocks", "write it further out"


def _devices(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = "parallel.device_num"
    if run.written(key) and not degrees.alone and run.whole(key) != degrees.product:
        what = f"is {run.value(key)}, and the degrees multiply to {degrees.product}"
        yield key, what, f"write {degrees.product}, or other degrees"


def _flash(run: Conversion, degrees: TheirDegrees) -> Wrong:
    """What needs flash attention, which is off where an old configuration leaves it out."""
    default = run.value(f"{CONFIG}.type") != "LlamaConfig"
    if run.flag(_FLASH, default=default):
        return
    for asked, name in (
        (degrees.context > 1, "context_parallel above 1"),
        (run.whole(CHUNKS) > 1, "seq_split_num above 1"),
        (run.flag(_EOD), "use_eod_attn_mask_compression"),
        (run.flag(MESH), "use_3d_tensor_parallel"),
    ):
        if asked:
            yield _FLASH, f"is false, or left out, beside {name}", "write true"


def _heads(run: Conversion, degrees: TheirDegrees) -> Wrong:
    row = algorithm_of(run)
    if row is None or degrees.context == 1 or not run.written(_HEADS):
        return
    heads = run.whole(_HEADS)
    keys = run.whole(f"{CONFIG}.n_kv_heads", default=heads)
    if row.splits is Splits.HEADS and degrees.context * degrees.tensor > keys:
        what = f"over {degrees.context} × {degrees.tensor} ranks splits {keys} KV heads"
        yield run.written(*ALGORITHM) or "", what, "write the hybrid, or smaller degrees"
    if row.splits is Splits.BOTH:
        degree = run.whole(f"{BLOCK}.ulysses_degree_in_cp")
        parts = max(1, degrees.tensor * degree)
        if degree < 1 or degrees.context % degree:
            what = f"is {degree}, which does not divide context_parallel {degrees.context}"
            yield f"{BLOCK}.ulysses_degree_in_cp", what, "write a divisor of it"
        elif heads % parts or keys % parts:
            what = f"times model_parallel is {parts}, over {heads} heads and {keys} KV heads"
            yield f"{BLOCK}.ulysses_degree_in_cp", what, "write one that divides both"


def _copies(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = f"{CONFIG}.fine_grain_interleave"
    split = run.flag(*SEQUENCE) or degrees.context > 1
    if run.whole(key) > 1 and not split:
        what = f"is {run.value(key)} without use_seq_parallel or context_parallel"
        yield key, what, "write 1"


def _chunks(run: Conversion, degrees: TheirDegrees) -> Wrong:
    chunks, scheduler = run.whole(CHUNKS), str(run.value(SCHEDULER))
    if chunks == 1 and scheduler == "seqvpp":
        yield SCHEDULER, "is seqvpp, and seq_split_num is 1", "write seq_split_num above 1, or 1f1b"
    if chunks == 1 or degrees.stages == 1:
        return
    if scheduler not in ("seqpipe", "seqvpp"):
        what = f"is {chunks}, and pipeline_scheduler is not seqpipe"
        yield CHUNKS, what, "write pipeline_config.pipeline_scheduler: seqpipe"
    for key in (_RING, _EOD):
        if run.flag(key):
            yield key, f"is true beside seq_split_num {chunks}", "write false, or seq_split_num: 1"
    length = run.whole(f"{CONFIG}.seq_length", default=2048)
    if chunks < 1 or length % chunks:
        yield CHUNKS, f"is {chunks}, which does not divide seq_length {length}", "write a divisor"


def _masks(run: Conversion, degrees: TheirDegrees) -> Wrong:
    length = run.whole(f"{CONFIG}.seq_length", default=2048)
    if run.flag(_MASKS) and length <= LEAST_MASKED:
        what = f"is true on rows of {length} tokens, not more than {LEAST_MASKED}"
        yield _MASKS, what, "write false"
    if run.flag(_EOD) and run.flag(_RING):
        yield _EOD, "is true beside use_ring_attention", "write one of them false"


def _micro_batches(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = f"{BLOCK}.micro_batch_num"
    if degrees.stages > 1 and run.whole(key) < degrees.stages:
        what = f"is {run.whole(key)}, fewer than the {degrees.stages} stages"
        yield key, what, f"write {degrees.stages} or more"


def _offsets(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key, layers = f"{CONFIG}.offset", f"{CONFIG}.num_layers"
    found = run.value(key)
    if degrees.stages == 1 or not isinstance(found, list) or not run.written(layers):
        return
    each = all_of(found)
    parts = degrees.stages * max(1, run.whole(*VIRTUAL))
    if not all(isinstance(one, int) for one in each):
        yield key, f"is {short(found)}", "write whole numbers"
    elif sum(each) != run.whole(layers) % parts:
        what = f"sums to {sum(each)}, and {run.whole(layers)} layers leave"
        yield key, f"{what} {run.whole(layers) % parts} over {parts}", "write offsets of that sum"


def _mesh(run: Conversion, degrees: TheirDegrees) -> Wrong:
    if not run.flag(MESH):
        return
    sides = [run.whole(f"{CONFIG}.tp_{name}") for name in "xyz"]
    if sides[0] * sides[1] * sides[2] != degrees.tensor:
        what = f"is true with tp_x, tp_y, tp_z {sides}, and model_parallel is {degrees.tensor}"
        yield MESH, what, "write sides whose product it is"
    if not run.flag(*SEQUENCE):
        yield MESH, "is true without use_seq_parallel", "write use_seq_parallel: true"
    row = algorithm_of(run)
    if row is not None and row.splits is Splits.HEADS and degrees.context > 1:
        yield MESH, f"is true beside {row.name}", "write colossalai_cp"
    if run.whole(f"{CONFIG}.fine_grain_interleave") > 1:
        yield MESH, "is true beside fine_grain_interleave", "write fine_grain_interleave: 1"


def _experts(run: Conversion, degrees: TheirDegrees) -> Wrong:
    experts, key = run.whole(_EXPERTS), run.written(*EXPERTS)
    spread = run.whole(*EXPERTS)
    if experts > 1 and degrees.tensor > 1 and not run.flag(*SEQUENCE):
        what = "is above 1, and model_parallel too, without use_seq_parallel"
        yield _EXPERTS, what, "write use_seq_parallel: true"
    if key and spread > 1 and experts > 1 and experts % spread:
        yield key, f"is {spread}, which does not divide {experts} experts", "write a divisor"
    if key and spread > 1 and (degrees.data * degrees.context) % spread:
        what = f"is {spread}, which does not divide data × context ranks"
        yield key, what, f"write a divisor of {degrees.data * degrees.context}"


def _shards(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
    size = run.whole(key, default=-1)
    if size not in (-1, 0) and (size < 0 or degrees.data % size):
        what = f"is {size}, which does not divide data_parallel {degrees.data}"
        yield key, what, "write -1, or a divisor"


def _strategy(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key, whole = "parallel.dataset_strategy", "parallel.full_batch"
    if run.flag(whole, default=True) or degrees.alone:
        return
    found = run.value(key)
    first = found[0] if isinstance(found, list) and found else None
    first = first[0] if isinstance(first, list) and first else first
    if found is None:
        yield whole, "is false without dataset_strategy", "write true"
    elif first != degrees.data:
        what = f"begins with {short(first)}, and data_parallel is {degrees.data}"
        yield key, what, f"begin each column with {degrees.data}"


_RULES: tuple[Callable[[Conversion, TheirDegrees], Wrong], ...] = (
    _depth,
    _devices,
    _flash,
    _heads,
    _copies,
    _chunks,
    _masks,
    _micro_batches,
    _offsets,
    _mesh,
    _experts,
    _shards,
    _strategy,
)
