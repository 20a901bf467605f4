"""Runs of models with experts on four ranks: which there are, and what differs from one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from tests.support.adapters import peft_adapter
from tests.support.models import BESIDE_MLP, Documents, make_model, trained_of
from tests.support.quantised import quantise
from tests.support.ranks import spawn
from tests.support.routers import (
    CLIP,
    FACTOR,
    OFFICIAL,
    ROW,
    STEPS,
    Wanted,
    documents,
    problems,
    wanted,
)
from tests.support.runs import close, held, prepared, small_recipe
from tests.support.stages import ZERO
from uspft.parameters.experts import CORRECTION

RANK, ALPHA, SEED = 4, 6.0, 7
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4}),
    "gpt_oss": ("gpt_oss", {}),
    "qwen3_next": ("qwen3_next", {"num_experts": 4}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"num_experts": 4}),
    "glm4_moe": ("glm4_moe", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_start_index": 1}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 4}),
    "gemma4_text": ("gemma4_text", BESIDE_MLP),
    "quantised": ("gpt_oss", {}),
    "forced": ("gpt_oss", {}),
}
"""Of the last one every token meets the first two experts alone; the one before has its experts in
MXFP4."""


@dataclass(frozen=True)
class Case:
    """One run on four ranks."""

    model: str
    experts: int
    zero: str
    algorithm: str = "ring_cp"
    context: int = 1
    rows: int = 4
    each: int = 1
    tensor: int = 1
    tokens: bool = False
    """Whether tensor ranks divide tokens between blocks."""
    beside: tuple[str, ...] = ()
    """What else the recipe asks for, by its names in BESIDE."""

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The recipe's adapter, whose names of parameters are those that the model has."""
        found = [BESIDE[name]["model"]["adapter"] for name in self.beside if "lora" in name]
        if not found:
            return None
        named = MODELS[self.model][0] in ("gpt_oss", "granitemoe")
        other = "gate.weight" if named else "router.weight"
        names = [name for name in found[0]["target_parameters"] if name != other]
        return {**found[0], "target_parameters": names}

    @property
    def packed(self) -> bool:
        return not {"strategies", "tensors", "single"} & set(self.beside)

    @property
    def frozen(self) -> list[str]:
        return [
            one for name in self.beside for one in BESIDE[name].get("model", {}).get("freeze", [])
        ]


Controls = Mapping[str, tuple[Case, float]]
"""What is left out, the run that shows it, and the largest relative error that was measured of it,
of a loss, a norm, or a parameter's gradients."""


BESIDE: dict[str, dict[str, Any]] = {
    "again": {"memory": {"gradient_checkpointing": True}},
    "attention": {"memory": {"gradient_checkpointing": True, "recompute": "attention"}},
    "tiles": {"memory": {"mlp_tile_tokens": 5}},
    "host": {"memory": {"gradient_checkpointing": True, "offload_activations": "cpu"}},
    "frozen": {"model": {"freeze": [r"experts\."]}},
    "below": {"model": {"freeze": [r"embed_tokens|layers\.0\.(self|input|post)|router|gate\.w"]}},
    "offload": {"zero": {"offload_optimizer": {"device": "cpu"}}},
    "strategies": {
        "parallel_config": {
            "strategies": [
                {"max_length": 20},
                {"max_length": 28, "context_parallel": 2, "context_parallel_algo": "ring_cp"},
                {
                    "max_length": ROW,
                    "context_parallel": 4,
                    "context_parallel_algo": "hybrid_cp",
                    "ulysses_degree_in_cp": 2,
                },
            ]
        }
    },
    "tensors": {
        "parallel_config": {
            "strategies": [
                {"max_length": 20},
                {"max_length": 28, "model_parallel": 2},
                {"max_length": ROW, "model_parallel": 4, "use_seq_parallel": True},
            ]
        }
    },
    "stages": {"parallel_config": {"pipeline_stage": 2}},
    "lora": {
        "model": {
            "adapter": {
                "type": "lora",
                "rank": RANK,
                "alpha": ALPHA,
                "target_modules": [],
                "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
            }
        }
    },
    "lora on all": {
        "model": {
            "adapter": {
                "type": "lora",
                "rank": RANK,
                "alpha": ALPHA,
                "target_modules": ["q_proj", "o_proj"],
                "target_parameters": ["down_proj", "gate_up_proj", "gate.weight", "router.weight"],
            }
        }
    },
    "moved": {"parallel_config": {"switching": "move"}},
    "single": {},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "exported": {"export": {"huggingface": True}},
    "saved": {"checkpoint": {"every_steps": 1}},
}


def run(
    case: Case,
    folder: Path,
    data: Documents,
    name: str,
    *,
    steps: int = STEPS,
    resume: bool = False,
) -> Any:
    """Train; rank 0 gets (records of metrics.jsonl, final master weights, Adam's means of clipped
    gradients)."""
    from uspft.training.loop import train

    parallel: dict[str, Any] = {"expert_parallel": case.experts}
    if case.tensor > 1:
        parallel |= {"model_parallel": case.tensor, "use_seq_parallel": case.tokens}
    if case.context > 1:
        parallel |= {"context_parallel": case.context, "context_parallel_algo": case.algorithm}
    if case.algorithm == "hybrid_cp":
        parallel["ulysses_degree_in_cp"] = 2
    balance = balanced(case)
    overrides = {"output_router_logits": balance, "router_aux_loss_coef": FACTOR} if balance else {}
    tokens = {"packing": "best_fit" if case.packed else "none"}
    blocks: dict[str, dict[str, Any]] = {
        "model": {"overrides": overrides},
        "data": {**tokens, "eval": str(data.path)} if case.model == "forced" else tokens,
        "parallel_config": parallel,
        "training": {
            "steps": steps,
            "global_batch_size": case.rows,
            "micro_batch_size": case.each,
            "max_grad_norm": CLIP,
        },
        "memory": {"gradient_checkpointing": False},
    }
    zero = dict(ZERO[case.zero])
    for one in case.beside:
        for key, block in BESIDE[one].items():
            if key == "zero":
                zero |= block
            else:
                blocks[key] = {**blocks.get(key, {}), **block}
    if case.adapter:
        blocks["model"]["adapter"] = case.adapter
    blocks["deepspeed"] = {"zero_optimization": zero}
    recipe = {"seed": SEED, **small_recipe(folder / case.model, data.path, ROW, **blocks)}
    output = folder / "runs" / name
    alive = prepared(recipe, output, resume=resume)
    train(alive, lambda: False)
    end, means = held(alive.engine), held(alive.engine, "exp_avg")
    close(alive)
    if dist.get_rank():
        return None
    return [json.loads(line) for line in (output / "metrics.jsonl").open()], end, means


def balanced(case: Case) -> bool:
    """Whether routers have a loss: not in stages, nor where rows are made inside the step."""
    of = MODELS[case.model][0] in OFFICIAL
    return of and not {"strategies", "tensors", "stages", "saved"} & set(case.beside)


def make_setting(folder: Path) -> tuple[Path, Documents]:
    """Make the models in a folder, and their documents."""
    for name, (kind, extra) in MODELS.items():
        make_model(folder / name, kind, kv_heads=2, initializer_range=0.1, **extra)
    quantise(folder / "quantised")
    file = folder / "forced" / "model.safetensors"
    weights = load_file(file)
    for name in [name for name in weights if name.endswith("router.bias")]:
        weights[name] = torch.tensor([30.0, 30.0, 0.0, 0.0])
    save_file(weights, file, {"format": "pt"})
    return folder, documents(folder / "d.jsonl")


def different(case: Case, got: Any, setting: tuple[Path, Documents]) -> list[str]:
    """What differs from one process."""
    records, end, means = got
    want = reference_of(case, setting)
    # Of a run that has gone on, the first step was under another layout.
    one_set = case.experts * case.tensor == 4 and "saved" not in case.beside
    found = problems((records, end), want, case.experts if one_set else None)
    for name, mean in want[0].moments.items():
        off = (means[name] - mean).norm() / mean.norm()
        # A trains by B, which Adam has moved as much where its gradient is next to nothing.
        if not off <= (1e-3 if ".lora_A." in name else 1e-4):
            found.append(f"{name}'s gradients are off by {off:.1e}")
    return found


def error(case: Case, got: Any, setting: tuple[Path, Documents]) -> float:
    """The largest relative error of a loss, a norm, or a parameter's gradients."""
    records, _, means = got
    want = reference_of(case, setting)[0]
    steps = [record for record in records if "loss" in record]
    told = [*zip((one["loss"] for one in steps), want.losses, strict=True)]
    told += zip((one["grad_norm"] for one in steps), want.grad_norms, strict=True)
    found = [abs(mine / one - 1) for mine, one in told]
    every = want.moments.items()
    found += [float((means[name] - mean).norm() / mean.norm()) for name, mean in every]
    return max(found)


def reference_of(case: Case, setting: tuple[Path, Documents]) -> Wanted:
    """What one process gives."""
    folder, data = setting
    return wanted(
        folder / case.model,
        case.rows,
        data,
        balanced=balanced(case),
        frozen=case.frozen,
        packed=case.packed,
        adapted=adapted(case.adapter) if case.adapter else None,
    )


def adapted(block: dict[str, Any]) -> Callable[[Any], dict[str, torch.nn.Parameter]]:
    """What plain peft makes of a recipe's adapter."""
    from uspft.model.adapter import AdapterStart

    def ours(name: str) -> str:
        """peft wraps the module of experts twice, first for gate_up_proj."""
        name = name.replace("experts.lora", "experts.down_proj.lora")
        return name.replace("experts.base_layer.lora", "experts.gate_up_proj.lora")

    no_base: Any = None
    return peft_adapter(
        AdapterStart(no_base, SEED).read,
        named=ours,
        r=RANK,
        lora_alpha=ALPHA,
        target_modules=block["target_modules"],
        target_parameters=block["target_parameters"],
    )


def exported(there: Path, end: Mapping[str, torch.Tensor], base: Path) -> list[str]:
    """What of an export transformers reads otherwise than it was trained or, if it does not train,
    than the base model has it."""
    net = transformers.AutoModelForCausalLM.from_pretrained(there, dtype=torch.float32)
    trained = trained_of(net)
    off = [name for name, p in trained.items() if not torch.equal(p, end[name])]
    mine, files = (load_file(folder / "model.safetensors") for folder in (there, base))
    kept = {name: one for name, one in files.items() if name.endswith(CORRECTION)}
    off += [name for name in end.keys() ^ trained.keys()]
    return off + [name for name, one in kept.items() if not torch.equal(one, mine[name])]


def evaluated(folder: Path, weights: dict[str, torch.Tensor], data: Documents) -> float:
    """The loss of weights on all documents, in one process."""
    net = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    net.load_state_dict(weights, strict=False)
    total = targets = 0.0
    for ids, labels in data.documents:
        with torch.no_grad():
            logits = net(input_ids=torch.tensor([ids])).logits[0, :-1]
        wanted = torch.tensor(labels[1:])
        total += float(F.cross_entropy(logits, wanted, reduction="sum"))
        targets += int((wanted != -100).sum())
    return total / targets


def broken(
    rank: int,
    folder: Path,
    data: Documents,
    controls: Controls,
    left_out: Callable[[str], AbstractContextManager[None]],
) -> list[Any]:
    """What runs give of which something is left out."""
    found = []
    for what, (case, _) in controls.items():
        with left_out(what):
            found.append(run(case, folder, data, what.replace(" ", "-")))
    return found


def unseen(
    setting: tuple[Path, Documents],
    controls: Controls,
    left_out: Callable[[str], AbstractContextManager[None]],
) -> dict[str, float]:
    """The controls whose error is not what it was when it was measured."""
    answers = spawn(4, broken, *setting, controls, left_out)[0]
    every = zip(controls.items(), answers, strict=True)
    found = {what: (error(case, got, setting), known) for (what, (case, known)), got in every}
    return {what: now for what, (now, known) in found.items() if not 0.5 < now / known < 2}
