"""The layout of a MindSpore Transformers configuration: degrees, context parallelism, stages,
experts; and the configurations that MindSpore itself refuses, which are refused here too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from uspft.config.algorithms import CONTEXT, AlgorithmRow, Splits
from uspft.convert.conversion import Conversion, short

CONFIG, BLOCK = "model.model_config", "parallel_config"
THEIRS = {row.megatron: row for row in CONTEXT.values()} | {
    name: row for row in CONTEXT.values() for name in (row.name, *row.synonyms)
}
"""The algorithms by Megatron's names and by ours."""
GATHER, RING, OLD = "all_gather", "p2p", {"hybird": "hybrid"}
"""Megatron's names for MindSpore's default algorithm, without and with a ring; and an old
spelling."""
SEQUENCE = (f"{BLOCK}.use_seq_parallel", f"{BLOCK}.sequence_parallel")
ALGORITHM = (f"{BLOCK}.context_parallel_algo", f"{BLOCK}.cp_comm_type")
EXPERTS = (f"{BLOCK}.expert_parallel", f"{BLOCK}.expert_model_parallel_size")
VIRTUAL = (f"{CONFIG}.pp_interleave_num", f"{BLOCK}.virtual_pipeline_model_parallel_size")
SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"
CHUNKS, MESH = f"{BLOCK}.seq_split_num", f"{CONFIG}.use_3d_tensor_parallel"
_REPLICAS = (f"{BLOCK}.data_parallel", f"{BLOCK}.data_parallel_size")


@dataclass(frozen=True)
class TheirDegrees:
    """The effective degrees: `parallel_mode` may overrule the ones in the configuration."""

    data: int
    tensor: int = 1
    context: int = 1
    stages: int = 1
    alone: bool = False
    """Whether the mode allows only data parallelism."""

    @property
    def product(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.context * self.stages

    def told(self, batch: int, micro: int) -> str:
        """Return the layout as a phrase. batch: rows per optimizer step. micro: rows per
        micro-batch."""
        names = {"data": self.data, "tensor": self.tensor, "context": self.context}
        shown = [f"{name} {degree}" for name, degree in names.items() if degree > 1]
        shown += [f"{self.stages} stages"] * (self.stages > 1)
        count = batch // (self.data * micro)
        rows = f"{count} micro-batch{'es' * (count != 1)} of {micro} row{'s' * (micro != 1)}"
        return f"{' × '.join(shown) or 'one device'}, {rows} each"


def degrees_of(run: Conversion) -> TheirDegrees:
    """Return the effective degrees."""
    mode = run.value("parallel.parallel_mode", 1)
    parallel = run.flag("use_parallel", default=True)
    if not parallel or mode in (0, "data_parallel"):
        given = run.given.get(_REPLICAS[0])
        if parallel and not given:
            what = "0 counts devices, which the file does not say"
            run.refuse("parallel.parallel_mode", what, f"add {_REPLICAS[0]}=N")
        return TheirDegrees(given if isinstance(given, int) else 1, alone=True)
    if mode in (2, "auto_parallel"):
        run.refuse("parallel.parallel_mode", "is automatic there", "write 1, or take plan's advice")
    names = (
        ("model_parallel", "tensor_model_parallel_size"),
        ("context_parallel", "context_parallel_size"),
        ("pipeline_stage", "pipeline_model_parallel_size"),
    )
    tensor, context, stages = (
        run.whole(*(f"{BLOCK}.{key}" for key in keys), least=1) for keys in names
    )
    return TheirDegrees(run.whole(*_REPLICAS, least=1), tensor, context, stages)


def layout(run: Conversion, degrees: TheirDegrees, batch: int, ranks: int | None) -> int:
    """Convert the layout, and return its data parallel degree.

    batch: the rows per optimizer step, which stay the same. ranks: the number of processes; None:
    as in the configuration.
    """
    replicas = _replicas(run, degrees, batch, ranks)
    _tensor(run, degrees)
    _context(run, degrees.context)
    _stages(run, degrees.stages)
    _experts(run)
    return replicas


def _replicas(run: Conversion, degrees: TheirDegrees, batch: int, ranks: int | None) -> int:
    rest, key = degrees.product // degrees.data, run.written(*_REPLICAS) or _REPLICAS[0]
    if ranks is not None and ranks != degrees.product:
        replicas, left = divmod(ranks, rest)
        if left or not _divides(replicas, batch):
            what = f"the other degrees take {rest} ranks, not of {ranks}"
            if not left and replicas:
                what = f"{batch} rows do not go into {replicas} replicas"
            far = range(max(2, replicas + 1))
            near = next(n for d in far for n in (replicas - d, replicas + d) if _divides(n, batch))
            run.refuse(key, what, f"write --ranks {rest * near}")
            return degrees.data
        ours = TheirDegrees(replicas, degrees.tensor, degrees.context, degrees.stages)
        there = degrees.told(batch, micro_batch(run, batch, degrees.data))
        here = ours.told(batch, micro_batch(run, batch, replicas))
        what = f"{degrees.product} devices there ({there}), {ranks} ranks here ({here})"
        run.put(_REPLICAS[0], replicas, *_REPLICAS, say=f"{what}; the batch stays {batch} rows")
        if not run.written(*_REPLICAS):
            run.changed(key, f"here {replicas}: {what}")
        return replicas
    if degrees.alone:
        run.put(_REPLICAS[0], degrees.data, "parallel.parallel_mode", "use_parallel")
    names = ("parallel.parallel_mode", "use_parallel")
    run.told("the degrees are those written", *(name for name in names if not run.spoken(name)))
    return degrees.data


def _divides(replicas: int, batch: int) -> bool:
    return replicas > 0 and batch % replicas == 0


def micro_batch(run: Conversion, batch: int, replicas: int) -> int:
    """Return the rows per micro-batch: MindSpore's, or fewer where that does not divide a replica's
    rows."""
    return math.gcd(max(1, batch // replicas), max(1, run.whole("runner_config.batch_size")))


def _tensor(run: Conversion, degrees: TheirDegrees) -> None:
    """Convert how activations are split between matrices, and matrices over a mesh."""
    if degrees.alone:
        inside = [f"{BLOCK}.{key}" for key in run.theirs.block(BLOCK)]
        idle = [key for key in inside if not run.spoken(key)]
        run.dropped("data parallelism alone acts there", *idle)
        return
    asked, mesh = run.written(*SEQUENCE), run.flag(MESH)
    if asked and mesh:
        run.changed(asked, "left out: a mesh splits tokens between matrices by itself")
    elif asked and run.flag(asked) and degrees.tensor == 1:
        run.changed(asked, "left out: there is no tensor degree for it to act with")
    elif asked:
        run.put(f"{BLOCK}.use_seq_parallel", run.flag(asked), asked)
    if mesh:
        sides = [run.whole(f"{CONFIG}.tp_x"), run.whole(f"{CONFIG}.tp_y")]
        run.put(f"{BLOCK}.tensor_parallel_algo", "meshslice", MESH)
        run.put(f"{BLOCK}.tensor_mesh", sides, f"{CONFIG}.tp_x", f"{CONFIG}.tp_y")
    copies = f"{CONFIG}.fine_grain_interleave"
    if (number := run.whole(copies)) > 1 and degrees.tensor > 1:
        run.put(f"{BLOCK}.fine_grain_interleave", number, copies)
    else:
        run.idle("there is one copy, or no tensor degree whose transfers it hides", copies)


def algorithm_of(run: Conversion) -> AlgorithmRow | None:
    """Return the algorithm with a name of Megatron's or ours, or None."""
    key = run.written(*ALGORITHM)
    word = str(run.value(key)) if key else GATHER
    for old, new in OLD.items():
        word = word.replace(old, new)
    return THEIRS.get(word)


def _context(run: Conversion, context: int) -> None:
    """Convert the context-parallel algorithm."""
    key, ring = run.written(*ALGORITHM), f"{CONFIG}.use_ring_attention"
    degree = f"{BLOCK}.ulysses_degree_in_cp"
    if context == 1:
        idle = [one for one in (key, degree, ring) if one and not run.spoken(one)]
        run.idle("context_parallel is 1: rows are whole", *idle)
        return
    row, asked = algorithm_of(run), run.flag(ring)
    if row is None:
        known = ", ".join(name for name in THEIRS if name != "–")
        remedy = f"one algorithm is for all layers: write one of {known}"
        run.refuse(str(key), f"is {run.value(str(key))}", remedy)
        return
    if row.megatron == GATHER and asked:
        row = THEIRS[RING]
    both = row.splits is Splits.BOTH
    say = "between groups a ring, the same numbers" if both and not asked else ""
    run.put(f"{BLOCK}.context_parallel_algo", row.name, key, ring, say=say)
    if both:
        run.put(degree, run.whole(degree), degree)
    else:
        run.idle("it acts where heads and tokens are split", degree)


def _stages(run: Conversion, stages: int) -> None:
    """Convert the pipeline's stages and schedule."""
    interleave = "parallel.pipeline_config.pipeline_interleave"
    offset, each = f"{CONFIG}.offset", f"{CONFIG}.layers_per_stage"
    micro = f"{BLOCK}.micro_batch_num"
    if stages == 1:
        keys = (*VIRTUAL, SCHEDULER, interleave, CHUNKS, offset, each, micro)
        idle = [key for key in keys if not run.spoken(key)]
        run.idle("pipeline_stage is 1: there are no stages", *idle)
        return
    if run.written(CHUNKS):
        run.put(f"{BLOCK}.seq_split_num", run.whole(CHUNKS), CHUNKS)
    if run.written(SCHEDULER):
        theirs = run.value(SCHEDULER)
        ours = theirs if theirs in ("gpipe", "seqpipe") else "auto"
        run.put(f"{BLOCK}.pipeline_scheduler", ours, SCHEDULER)
    if named := run.written(*VIRTUAL):
        run.put(f"{BLOCK}.pp_interleave_num", run.whole(named), named, interleave)
    else:
        run.told("it acts with pp_interleave_num above 1", interleave)
    found = run.value(offset)
    if found is not None and any(all_of(found)):
        run.put(f"{BLOCK}.offset", found, offset)
    elif found is not None:
        run.changed(offset, "zeros: layers are dealt to stages by their cost")
    if (layers := run.value(each)) is not None:
        run.put(f"{BLOCK}.layers_per_stage", layers, each)
    run.changed(micro, "it counts into training.global_batch_size")


def _experts(run: Conversion) -> None:
    """Convert the expert parallel degree, if the model has experts."""
    key, experts = run.written(*EXPERTS), "moe_config.expert_num"
    if key is None or run.spoken(key):
        return
    folder = run.written("pretrained_model_dir", "load_checkpoint")
    may = folder or {"model.name_or_path", "model.config"} & set(run.given)
    if run.whole(key) == 1 or run.whole(experts, default=2 if may else 1) == 1:
        run.ignored(key, "there are no experts, or each rank has all of them")
    else:
        run.put(f"{BLOCK}.expert_parallel", run.whole(key), key)


def all_of(value: Any) -> list[Any]:
    """Return the numbers of nested lists as one list."""
    return [one for item in value for one in all_of(item)] if isinstance(value, list) else [value]


# Configurations that MindSpore refuses.

DEEPEST = 10
"""The deepest nesting of MindSpore's YAML."""
LEAST_MASKED = 2048
"""Rows must be longer than this where masks are compressed."""
_TOO = "an error there too"
_FLASH, _RING = f"{CONFIG}.use_flash_attention", f"{CONFIG}.use_ring_attention"
_MASKS, _EOD = f"{CONFIG}.use_attn_mask_compression", f"{CONFIG}.use_eod_attn_mask_compression"
_HEADS, _EXPERTS = f"{CONFIG}.num_heads", "moe_config.expert_num"
Wrong = Iterator[tuple[str, str, str]]
"""Errors as (key, what is wrong, remedy)."""


def their_errors(run: Conversion, degrees: TheirDegrees) -> None:
    """Refuse what MindSpore itself refuses, and modes other than training."""
    mode = run.value("run_mode", "train")
    if mode not in ("train", "finetune"):
        run.refuse("run_mode", f"is {short(mode)}", "only training is converted: write finetune")
    elif run.written("run_mode"):
        run.changed("run_mode", "a recipe trains")
    for rule in _RULES:
        for key, what, remedy in rule(run, degrees):
            run.refuse(key, f"{what}: {_TOO}", remedy)


def _devices(run: Conversion, degrees: TheirDegrees) -> Wrong:
    for key in run.theirs.values:
        if len(re.split(r"(?<!\\)\.", key)) > DEEPEST:
            yield key, f"is nested deeper than {DEEPEST} blocks", "write it further out"
    key = "parallel.device_num"
    if run.written(key) and not degrees.alone and run.whole(key) != degrees.product:
        what = f"is {run.value(key)}, and the degrees multiply to {degrees.product}"
        yield key, what, f"write {degrees.product}, or other degrees"


def _flash(run: Conversion, degrees: TheirDegrees) -> Wrong:
    """Yield settings that need flash attention, which old configurations turn off by omission."""
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
            yield _FLASH, f"is false, or left out, with {name}", "write true"


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


def _chunks(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = f"{CONFIG}.fine_grain_interleave"
    split = run.flag(*SEQUENCE) or degrees.context > 1
    if run.whole(key) > 1 and not split:
        what = f"is {run.value(key)} without use_seq_parallel or context_parallel"
        yield key, what, "write 1"
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
            yield (
                key,
                f"is true together with seq_split_num {chunks}",
                "write false, or seq_split_num: 1",
            )
    length = run.whole(f"{CONFIG}.seq_length", default=2048)
    if chunks < 1 or length % chunks:
        yield CHUNKS, f"is {chunks}, which does not divide seq_length {length}", "write a divisor"


def _masks(run: Conversion, degrees: TheirDegrees) -> Wrong:
    length = run.whole(f"{CONFIG}.seq_length", default=2048)
    if run.flag(_MASKS) and length <= LEAST_MASKED:
        what = f"is true on rows of {length} tokens, not more than {LEAST_MASKED}"
        yield _MASKS, what, "write false"
    if run.flag(_EOD) and run.flag(_RING):
        yield _EOD, "is true together with use_ring_attention", "write one of them false"


def _stage_layers(run: Conversion, degrees: TheirDegrees) -> Wrong:
    key = f"{BLOCK}.micro_batch_num"
    if degrees.stages > 1 and run.whole(key) < degrees.stages:
        what = f"is {run.whole(key)}, fewer than the {degrees.stages} stages"
        yield key, what, f"write {degrees.stages} or more"
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
        yield MESH, f"is true together with {row.name}", "write colossalai_cp"
    if run.whole(f"{CONFIG}.fine_grain_interleave") > 1:
        yield MESH, "is true together with fine_grain_interleave", "write fine_grain_interleave: 1"


def _expert_ranks(run: Conversion, degrees: TheirDegrees) -> Wrong:
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
    *(_devices, _flash, _heads, _chunks, _masks, _stage_layers, _mesh, _expert_ranks, _shards),
)
