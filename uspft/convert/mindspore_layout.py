"""The layout of a run of MindSpore Transformers: degrees, context, stages, experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from uspft.config.algorithms import CONTEXT, AlgorithmRow, Splits
from uspft.convert.conversion import Conversion

CONFIG, BLOCK = "model.model_config", "parallel_config"
THEIRS = {row.megatron: row for row in CONTEXT.values()} | {
    name: row for row in CONTEXT.values() for name in (row.name, *row.synonyms)
}
"""The algorithms by their names in both vocabularies."""
GATHER, RING, OLD = "all_gather", "p2p", {"hybird": "hybrid"}
"""Megatron's words for what their default is, without and with a ring; and an old spelling."""
SEQUENCE = (f"{BLOCK}.use_seq_parallel", f"{BLOCK}.sequence_parallel")
ALGORITHM = (f"{BLOCK}.context_parallel_algo", f"{BLOCK}.cp_comm_type")
EXPERTS = (f"{BLOCK}.expert_parallel", f"{BLOCK}.expert_model_parallel_size")
VIRTUAL = (f"{CONFIG}.pp_interleave_num", f"{BLOCK}.virtual_pipeline_model_parallel_size")
SCHEDULER = "parallel.pipeline_config.pipeline_scheduler"
CHUNKS, MESH = f"{BLOCK}.seq_split_num", f"{CONFIG}.use_3d_tensor_parallel"
_REPLICAS = (f"{BLOCK}.data_parallel", f"{BLOCK}.data_parallel_size")


@dataclass(frozen=True)
class TheirDegrees:
    """The degrees that are in effect there: `parallel_mode` may overrule those that are written."""

    data: int
    tensor: int = 1
    context: int = 1
    stages: int = 1
    alone: bool = False
    """Whether data parallelism is all there is, whatever the block says."""

    @property
    def product(self) -> int:
        """The number of devices."""
        return self.data * self.tensor * self.context * self.stages

    def told(self, batch: int, micro: int) -> str:
        """Return the layout in words. batch: rows of an update. micro: those of a micro-batch."""
        names = {"data": self.data, "tensor": self.tensor, "context": self.context}
        shown = [f"{name} {degree}" for name, degree in names.items() if degree > 1]
        shown += [f"{self.stages} stages"] * (self.stages > 1)
        count = batch // (self.data * micro)
        rows = f"{count} micro-batch{'es' * (count != 1)} of {micro} row{'s' * (micro != 1)}"
        return f"{' × '.join(shown) or 'one device'}, {rows} each"


def degrees_of(run: Conversion) -> TheirDegrees:
    """Return the degrees as they are in effect; where the file counts devices, those given."""
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
    """Write the layout, and return its data parallel degree: what other ranks leave for it.

    batch: the rows of an update, which stays. ranks: how many processes there are; None: as many as
    there.
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
    for name in ("parallel.parallel_mode", "use_parallel"):
        if run.written(name) and not run.spoken(name):
            run.changed(name, "the degrees are those written")
    return degrees.data


def _divides(replicas: int, batch: int) -> bool:
    return replicas > 0 and batch % replicas == 0


def micro_batch(run: Conversion, batch: int, replicas: int) -> int:
    """Return the rows of a micro-batch: theirs, or fewer where a replica's rows are no multiple."""
    return math.gcd(max(1, batch // replicas), max(1, run.whole("runner_config.batch_size")))


def _tensor(run: Conversion, degrees: TheirDegrees) -> None:
    """Write how activations are split between matrices, and matrices over a mesh."""
    if degrees.alone:
        for key in run.theirs.values:
            if key.startswith(f"{BLOCK}.") and not run.spoken(key):
                run.ignored(key, "data parallelism alone acts there")
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
    elif run.written(copies):
        run.ignored(copies, "there is one copy, or no tensor degree whose transfers it hides")


def algorithm_of(run: Conversion) -> AlgorithmRow | None:
    """Return the algorithm that a word of either vocabulary names; None where none is called so."""
    key = run.written(*ALGORITHM)
    word = str(run.value(key)) if key else GATHER
    for old, new in OLD.items():
        word = word.replace(old, new)
    return THEIRS.get(word)


def _context(run: Conversion, context: int) -> None:
    """Write the algorithm of context parallelism."""
    key, ring = run.written(*ALGORITHM), f"{CONFIG}.use_ring_attention"
    degree = f"{BLOCK}.ulysses_degree_in_cp"
    if context == 1:
        for idle in (key, degree, ring):
            if idle and run.written(idle) and not run.spoken(idle):
                run.ignored(idle, "context_parallel is 1: rows are whole")
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
    keys = (key, ring) if key else (ring,)
    run.put(f"{BLOCK}.context_parallel_algo", row.name, *keys, say=say)
    if both:
        run.put(degree, run.whole(degree), degree)
    elif run.written(degree):
        run.ignored(degree, "it acts where heads and tokens are split")


def _stages(run: Conversion, stages: int) -> None:
    """Write how layers are split over stages, and in which order they work."""
    interleave = "parallel.pipeline_config.pipeline_interleave"
    offset, each = f"{CONFIG}.offset", f"{CONFIG}.layers_per_stage"
    micro = f"{BLOCK}.micro_batch_num"
    if stages == 1:
        for key in (*VIRTUAL, SCHEDULER, interleave, CHUNKS, offset, each, micro):
            if run.written(key) and not run.spoken(key):
                run.ignored(key, "pipeline_stage is 1: there are no stages")
        return
    if run.written(CHUNKS):
        run.put(f"{BLOCK}.seq_split_num", run.whole(CHUNKS), CHUNKS)
    if run.written(SCHEDULER):
        theirs = run.value(SCHEDULER)
        ours = theirs if theirs in ("gpipe", "seqpipe") else "auto"
        run.put(f"{BLOCK}.pipeline_scheduler", ours, SCHEDULER)
    if named := run.written(*VIRTUAL):
        run.put(f"{BLOCK}.pp_interleave_num", run.whole(named), named, interleave)
    elif run.written(interleave):
        run.changed(interleave, "it acts with pp_interleave_num above 1")
    found = run.value(offset)
    if found is not None and any(all_of(found)):
        run.put(f"{BLOCK}.offset", found, offset)
    elif found is not None:
        run.changed(offset, "zeros: layers are dealt to stages by their cost")
    if (layers := run.value(each)) is not None:
        run.put(f"{BLOCK}.layers_per_stage", layers, each)
    run.changed(micro, "it counts into training.global_batch_size")


def _experts(run: Conversion) -> None:
    """Write how many ranks experts are spread over, where the model has any."""
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
    """Return the numbers of nested lists."""
    return [one for item in value for one in all_of(item)] if isinstance(value, list) else [value]
