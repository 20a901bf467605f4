"""Runs of pipelines, and what plain transformers in one process gives for the same data."""

from __future__ import annotations

import faulthandler
import json
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.models import ARCHITECTURES, Documents, Reference, make_documents, reference
from tests.support.runs import held, prepared, small_recipe
from tests.support.stages import ZERO
from uspft.pipeline.stages import dealt_out

ROW, STEPS, RATE, CLIP = 48, 2, 1e-3, 0.5
LENGTHS = [[31, 17], [48], [20, 28], [40, 8], [33, 15], [25, 23], [29, 19], [26, 22]]
"""Of each row's documents."""
FEW, MANY = 5, 9
"""Layers of a model: stages of it differ."""


@dataclass(frozen=True)
class Case:
    """One run."""

    kind: str
    ranks: int
    virtual: int = 1
    zero: str = "zero1"
    rows: int = 4
    data: int = 1
    context: int = 1
    tensor: int = 1
    tied: bool = False
    algorithm: str = "ring_cp"
    beside: tuple[str, ...] = ()
    """What else the recipe asks for, by its names in BESIDE."""
    depth: int = 0
    """Layers of the model; 0: as many as its stages want."""

    @property
    def title(self) -> str:
        degrees = f"p{self.ranks}v{self.virtual}m{-(-self.rows // self.data)}"
        beside = f"d{self.data}c{self.context}t{self.tensor}"
        words = " ".join([self.algorithm * (self.context > 1), *self.beside]).strip()
        return f"{self.kind}{'-tied' * self.tied} {degrees} {beside} {self.zero} {words}".strip()

    @property
    def world(self) -> int:
        return self.ranks * self.data * self.context * self.tensor

    @property
    def steps(self) -> int:
        """How many the data have rows for, at most STEPS."""
        return min(STEPS, len(LENGTHS) // self.rows)

    @property
    def layers(self) -> int:
        return self.depth or (FEW if self.ranks * self.virtual <= FEW else MANY)

    @property
    def alone(self) -> Case:
        """The same without stages."""
        return replace(self, ranks=1, virtual=1, depth=self.layers)

    @property
    def model(self) -> str:
        return f"{self.kind}-{self.layers}{'-tied' * self.tied}"

    @property
    def frozen(self) -> str:
        """The expression whose parameters do not train; empty: all do."""
        every = [BESIDE[name].get("model", {}).get("freeze", []) for name in self.beside]
        return "|".join(chain(*every))


BESIDE: dict[str, dict[str, Any]] = {
    "gpipe": {"parallel_config": {"pipeline_scheduler": "gpipe"}},
    "chunks": {"parallel_config": {"seq_split_num": 3}},
    "copies": {"parallel_config": {"fine_grain_interleave": 2}},
    "by tokens": {"parallel_config": {"seq_split_num": 4, "sequence_chunks": "tokens"}},
    "tokens": {"parallel_config": {"use_seq_parallel": True}},
    "mesh rows": {"parallel_config": {"tensor_parallel_algo": "meshslice", "tensor_mesh": [2, 1]}},
    "hybrid": {"parallel_config": {"ulysses_degree_in_cp": 2}},
    "mesh": {"parallel_config": {"tensor_parallel_algo": "meshslice", "tensor_mesh": [1, 2]}},
    "tiles": {"memory": {"loss_tile_tokens": 5, "mlp_tile_tokens": 7}},
    "adapter": {"model": {"adapter": {"type": "lora", "rank": 4, "alpha": 8}}},
    "dropout": {"model": {"adapter": {"type": "lora", "rank": 4, "alpha": 8, "dropout": 0.3}}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "groups": {"memory": {"attention_heads": 1, "mlp_tile_tokens": 7}},
    "recompute": {"memory": {"gradient_checkpointing": True}},
    "nothing": {"memory": {"gradient_checkpointing": True, "recompute": "nothing"}},
    "exchange": {"memory": {"gradient_checkpointing": True, "recompute": "exchange"}},
    "attention": {"memory": {"gradient_checkpointing": True, "recompute": "attention"}},
    "kept": {"memory": {"gradient_checkpointing": False}},
    "host": {"memory": {"offload_activations": "cpu"}},
    "overlap": {"zero": {"overlap_comm": True}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "first frozen": {"model": {"freeze": [r"embed_tokens|layers\.[01]\."]}},
    "table alone": {"model": {"freeze": [r"layers\.|norm|lm_head"]}},
    "odd frozen": {"model": {"freeze": [r"layers\.[1-9]\.|model\.norm|lm_head"]}},
}


def make(folder: Path, case: Case) -> Path:
    """The case's model, of random weights, on disk."""
    path = folder / case.model
    if path.exists():
        return path
    name, own = ARCHITECTURES[case.kind]
    if case.kind == "mistral":
        own = {"sliding_window": 7}
    elif case.kind == "smollm3":
        own = {"no_rope_layers": [layer % 2 for layer in range(case.layers)]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=case.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        initializer_range=0.08,
        max_position_embeddings=512,
        **{**own, "tie_word_embeddings": case.tied},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def inputs(folder: Path, cases: list[Case]) -> Documents:
    """The cases' models in a folder, and their data."""
    for case in cases:
        make(folder, case)
    return make_documents(folder / "d.jsonl", list(chain(*LENGTHS)), masked=[0.0, 0.9, 0.3])


def recipe(case: Case, folder: Path, data: Path) -> dict[str, Any]:
    """What the case's recipe says."""
    parallel: dict[str, Any] = {
        "pipeline_stage": case.ranks,
        "pp_interleave_num": case.virtual,
        "model_parallel": case.tensor,
    }
    if case.ranks > 1:  # as many in each as can be, whatever they cost
        sizes = dealt_out([1.0] * case.layers, case.ranks, case.virtual).sizes
        rows = [list(sizes[at : at + case.ranks]) for at in range(0, len(sizes), case.ranks)]
        parallel["layers_per_stage"] = rows
    if case.context > 1:
        parallel |= {"context_parallel": case.context, "context_parallel_algo": case.algorithm}
    blocks: dict[str, dict[str, Any]] = {
        "parallel_config": parallel,
        "model": {},
        "memory": {},
        "zero": dict(ZERO[case.zero]),
    }
    for name in case.beside:
        if case.ranks == 1 and name in ("gpipe", "chunks", "by tokens"):
            continue
        for block, keys in BESIDE[name].items():
            blocks[block] |= keys
    zero = blocks.pop("zero")
    return small_recipe(
        folder / case.model,
        data,
        ROW,
        data={"packing": "best_fit", "eval": str(data)},
        deepspeed={"zero_optimization": zero},
        training={"steps": case.steps, "global_batch_size": case.rows, "max_grad_norm": CLIP},
        **blocks,
    )


@contextmanager
def assembled(case: Case, folder: Path, data: Path, output: str, **how: Any) -> Iterator[Any]:
    """The case's run; collective."""
    faulthandler.dump_traceback_later(400, exit=True)
    run = prepared(recipe(case, folder, data), folder / output, **how)
    yield run
    run.engine.close()
    faulthandler.cancel_dump_traceback_later()


def saved(run: Any, folder: Path) -> None:
    """Save the run's first step, without what is beside the weights."""
    from tests.support.runs import save_checkpoint
    from uspft.checkpoint.hf_folder import write_model_files

    def write_model(at: Path) -> None:
        write_model_files(at, run.config, run.job, 1)

    folder.mkdir(exist_ok=True)
    save_checkpoint(run.engine, folder, 1, write_model, run.job.identity)


def trained(
    case: Case,
    folder: Path,
    data: Path,
    output: str,
    *,
    save: Path | None = None,
    within: AbstractContextManager[Any] | None = None,
    evaluates: bool = True,
) -> dict[str, Any]:
    """What a case's steps give; collective. save: where its first step is saved, if anywhere.
    within: what surrounds the steps. evaluates: whether an evaluation comes before them."""
    from uspft.training.evaluate import evaluate, told

    found: dict[str, Any] = {"losses": [], "norms": [], "targets": []}
    with assembled(case, folder, data, output) as run:
        if evaluates:
            scores: Any = evaluate(run.engine, run.evaluation, lambda: False)
            (score,) = scores.values()
            found["evaluated"] = told(score, run.engine.module.objective)["loss"]
        books = run.world.mesh.pipeline.books
        books.bytes.clear()
        with within or nullcontext():
            for step in range(1, case.steps + 1):
                batches = run.loader.batches(step)
                result = run.engine.step(batches, RATE, False)
                assert len(result.seconds) == len(batches)
                found["losses"].append(result.loss)
                found["norms"].append(result.grad_norm)
                found["targets"].append(result.counts["target_tokens"])
                if step == 1:
                    found["moments"] = held(run.engine, "exp_avg")
                    if save:
                        saved(run, save)
        found["sent"] = books.bytes["pipeline"]
        found["end"] = held(run.engine)
    return found


def plain(case: Case, folder: Path, data: Documents) -> Reference:
    """What one process of plain transformers gives for a case."""
    return _plain(folder / case.model, data.path, case.frozen, case.steps, case.rows)


@cache
def _plain(model: Path, data: Path, frozen: str, steps: int, rows: int) -> Reference:
    documents = iter(_documents(data))
    every = [[next(documents) for _ in row] for row in LENGTHS]
    taken = [list(chain(*every[n : n + rows])) for n in range(0, rows * steps, rows)]

    def prepare(net: Any) -> dict[str, torch.nn.Parameter]:
        for name, parameter in net.named_parameters():
            parameter.requires_grad_(not frozen or not re.search(frozen, name))
        return {name: p for name, p in net.named_parameters() if p.requires_grad}

    return reference(model, taken, rate=RATE, clip=CLIP, prepare=prepare)


def _documents(data: Path) -> list[tuple[list[int], list[int]]]:
    """The ids and labels of each document in a file."""
    records = map(json.loads, data.read_text().splitlines())
    return [(one["input_ids"], one["labels"]) for one in records]


@cache
def _evaluated(model: Path, data: Path) -> float:
    """The loss of all documents, each alone, before any step."""
    net = transformers.AutoModelForCausalLM.from_pretrained(
        model, attn_implementation="eager", dtype=torch.float32
    )
    found, targets = 0.0, 0
    with torch.no_grad():
        for ids, labels in _documents(data):
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            wanted = torch.tensor(labels[1:])
            found += torch.nn.functional.cross_entropy(logits, wanted, reduction="sum").item()
            targets += int((wanted != -100).sum())
    return found / targets


def far(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference, and whose it is; what is tiny is measured by the mean."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    total = sum(float(one.double().norm()) ** 2 for one in want.values())
    count = sum(one.numel() for one in want.values())

    def of(name: str) -> float:
        least = 1e-3 * (total * want[name].numel() / count) ** 0.5
        size = max(float(want[name].double().norm()), least)
        return float((got[name].double() - want[name].double()).norm()) / size

    with torch.no_grad():
        return max((of(name), name) for name in want)


MOVED = 5e-3
"""By how much of their change weights may differ after Adam, which makes rounding of gradients near
0 a step: ranks alone come to 1.4e-3, and a table that does not come back to 4e-2."""


def moved_apart(end: dict[str, torch.Tensor], want: Reference) -> float:
    """The largest difference of a parameter's change, relative to it; of those that train."""
    changes = [{name: at[name] - old for name, old in want.start.items()} for at in (end, want.end)]
    return far(*changes)[0]


def mismatch(case: Case, got: dict[str, Any], folder: Path, data: Documents) -> list[str]:
    """What of a case's answer differs from plain transformers by more than rounding in float32."""
    want = plain(case, folder, data)
    found = []

    def near(what: str, ours: list[Any], theirs: list[Any], most: float) -> None:
        pairs = zip(ours, theirs, strict=True)
        if not all(abs(a - b) <= most * abs(b) for a, b in pairs):
            found.append(f"{what} {ours} != {theirs}")

    near("losses", got["losses"], want.losses, 1e-6)
    near("first norm", got["norms"][:1], want.grad_norms[:1], 3e-6)
    near("norms", got["norms"], want.grad_norms, 1e-5)  # an update has made rounding larger
    near("targets", got["targets"], want.targets, 0)
    near("evaluated", [got["evaluated"]], [_evaluated(folder / case.model, data.path)], 1e-6)
    if not min(want.grad_norms) > 1.1 * CLIP:
        found.append(f"clipping is not active at {want.grad_norms}")
    apart, whose = far(got["moments"], want.first)
    if not apart < 1e-5:
        found.append(f"gradient of {whose} is {apart:.1e} off")
    if not (moved := moved_apart(got["end"], want)) < MOVED:
        found.append(f"weights are {moved:.1e} off")
    return found


TABLE = "model.embed_tokens.weight"
ROUNDED = 4e-3
"""By how much the gradient of a tied table may differ in bfloat16, to whose sum one process adds
what embedding and head give in each micro-batch, and stages what the head gave in all."""
EXACT, BESIDE_ROUNDED = (3e-6, 3e-6), {"losses": (3e-6, 1e-3), "norms": (1e-4, 1e-2)}
"""By how much the first step and later ones may differ: beside such a gradient the norm does, and
then weights in bfloat16."""
AS_FAR, OF_LOSSES = 1.25, 0.1
"""How much further from float32 than rows that are whole in bfloat16 those in chunks may be, whose
gradients are rounded chunk by chunk; what share of this losses may be off."""


def rounds_more(
    case: Case, got: dict[str, Any], whole: dict[str, Any], folder: Path, data: Documents
) -> list[str]:
    """What of a run in chunks in bfloat16 is further from plain transformers in float32 than that
    of a run without stages, whose rows are whole; a chunk's backward in the wrong place is 0.88
    off."""
    want = plain(case, folder, data)
    far_whole, far_got = (off(one["moments"], want.first) for one in (whole, got))
    most = AS_FAR * far_whole
    found = [f"gradients are {far_got:.1e} off, {far_whole:.1e} whole"] * (not far_got <= most)
    pairs = [*zip(got["losses"], want.losses, strict=True)]
    pairs.append((got["evaluated"], _evaluated(folder / case.model, data.path)))
    for a, b in pairs:
        found += [f"a loss is {a} and not {b}"] * (not abs(a / b - 1) <= OF_LOSSES * most)
    for a, b in zip(got["norms"], want.grad_norms, strict=True):
        found += [f"a norm is {a} and not {b}"] * (not abs(a / b - 1) <= most)
    return found + ["other targets"] * (got["targets"] != want.targets)


def off(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The norm of all differences, relative to the norm of all."""
    assert got.keys() == want.keys(), got.keys() ^ want.keys()
    every = [(got[name].double() - one.double(), one.double()) for name, one in want.items()]
    error, size = (sum(float(pair[n].norm()) ** 2 for pair in every) for n in (0, 1))
    return float((error / size) ** 0.5)


def unlike(got: dict[str, Any], want: dict[str, Any], *, rounds_table: bool = False) -> list[str]:
    """What of two runs of this project differs by more than rounding in float32; rounds_table: or
    of a tied table in bfloat16."""
    found = []
    bounds = BESIDE_ROUNDED if rounds_table else {}
    for what in ("losses", "norms", "targets"):
        first, later = bounds.get(what, EXACT)
        for step, (a, b) in enumerate(zip(got[what], want[what], strict=True)):
            if not abs(a - b) <= (later if step else first) * abs(b):
                found.append(f"{what} of step {step + 1}: {a} != {b}")
    if not abs(got["evaluated"] / want["evaluated"] - 1) <= 3e-6:
        found.append(f"evaluated {got['evaluated']} != {want['evaluated']}")
    # Clipping divides every gradient by the norm, which differs where the table's does.
    means = [
        {name: mean * one["norms"][0] for name, mean in one["moments"].items()}
        for one in (got, want)
    ]
    if rounds_table:
        table, _ = far(*({TABLE: one.pop(TABLE)} for one in means))
        found += [f"gradient of the table is {table:.1e} off"] * (not table < ROUNDED)
    apart, whose = far(*means)
    return found + [f"gradient of {whose} is {apart:.1e} off"] * (not apart < 1e-5)
