"""Tiny models, their data, and plain transformers in one process to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from uspft.parameters.experts import CORRECTION, UNTRAINED
from uspft.verify.plain import pin_frequencies

VOCABULARY = 97
_STATES: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "full_attention_interval": 2,
}
_EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
BESIDE_MLP: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
"""Of a Gemma 4 whose layers have experts too."""
_TURNED = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"moe_intermediate_size": 24, "num_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen2_moe": ("Qwen2Moe", _EXPERTS),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 2, "clip_qkv": 0.7}),
    "granitemoe": (
        "GraniteMoe",
        {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "phi3": ("Phi3", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "granite": (
        "Granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.25,
        },
    ),
    "gemma2": (
        "Gemma2",
        {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 0.7,
            "query_pre_attn_scalar": 24,
            "head_dim": 24,
            "sliding_window": 9,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        {
            "head_dim": 12,
            "query_pre_attn_scalar": 20,
            "sliding_window": 7,
            "sliding_window_pattern": 2,
        },
    ),
    "gemma4_text": (
        "Gemma4Text",
        {
            "head_dim": 12,
            "global_head_dim": 20,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": 0.7,
            "use_bidirectional_attention": "vision",
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 9,
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "moe_intermediate_size": 24,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_layer_start_index": 0,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 16,
            "rotary_dim": 8,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_5_text": ("Qwen3_5Text", _STATES | {"head_dim": 16, "rope_parameters": MROPE}),
    "olmo_hybrid": (
        "OlmoHybrid",
        {key: value for key, value in _STATES.items() if key != "full_attention_interval"}
        | {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": _TURNED},
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        _STATES | _EXPERTS | {"head_dim": 16, "rope_parameters": MROPE},
    ),
    "qwen3_next": (
        "Qwen3Next",
        _STATES | _EXPERTS | {"head_dim": 16},
    ),
}
"""By model_type: transformers' name, and what of its config is not LLaMA's. A further family is a
line here and one in uspft/families/table.py."""

KINDS: dict[str, dict[str, Any]] = {
    "llama-8-2": {"kind": "llama", "heads": 8, "kv_heads": 2},
    "qwen2-4-1": {"kind": "qwen2", "heads": 4, "kv_heads": 1},
    "qwen3-9-3": {"kind": "qwen3", "heads": 9, "kv_heads": 3},
    "qwen3-28-4-window": {
        "kind": "qwen3",
        "heads": 28,
        "kv_heads": 4,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 13,
        "max_window_layers": 0,
    },
    "qwen2-6-2-mixed": {
        "kind": "qwen2",
        "heads": 6,
        "kv_heads": 2,
        "head_dim": 8,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    },
}
"""Models of the training matrix: every kind of heads, with windows in all layers or in some."""


def make_model(folder: Path, kind: str, *, heads: int = 4, kv_heads: int = 4, **extra: Any) -> Path:
    """A two-layer model with random biases and norms, so that a dropped gradient shows."""
    name, own = ARCHITECTURES[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **{"max_position_embeddings": 512, "num_hidden_layers": 2, **own, **extra},
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    settle(model)
    model.save_pretrained(folder)
    return folder


def settle(model: Any) -> None:
    """Give a model random biases and norms, and states that last."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # with transformers' own a state is forgotten at once
                parameter.copy_((0.02 + 0.5 * torch.rand_like(parameter)).log())
            elif parameter.dim() == 1 and not name.endswith(CORRECTION):
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, value in model.state_dict().items():
            if name.endswith(UNTRAINED):
                value.add_(0.1 * torch.randn_like(value))


def trained_of(net: Any) -> dict[str, torch.nn.Parameter]:
    """What trains of a model as transformers loads it, which has given some corrections of routers
    a gradient that never comes."""
    return {name: p for name, p in net.named_parameters() if not name.endswith(CORRECTION)}


@dataclass(frozen=True)
class Documents:
    """Token ids and unshifted labels of each document, as a tokenized JSON Lines file."""

    path: Path
    documents: list[tuple[list[int], list[int]]]


def make_documents(path: Path, lengths: list[int], *, masked: list[float]) -> Documents:
    """Documents whose first `masked` share has no target: some ranks may have none at all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        cut = int(masked[i % len(masked)] * length)
        found.append((ids, [-100] * cut + ids[cut:]))
    lines = [json.dumps({"input_ids": ids, "labels": labels}) for ids, labels in found]
    path.write_text("\n".join(lines) + "\n")
    return Documents(path, found)


@dataclass(frozen=True)
class Reference:
    """What one process of plain transformers gives; start and end of what trains, and the mean of
    its clipped gradients that Adam keeps."""

    losses: list[float]
    grad_norms: list[float]
    targets: list[int]
    rates: Sequence[float]
    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    moments: dict[str, torch.Tensor]
    first: dict[str, torch.Tensor]
    """The same after the first step."""


def reference(
    model: Path,
    steps: list[list[tuple[list[int], list[int]]]],
    *,
    rate: float | Sequence[float],
    clip: float,
    eps: float = 1e-8,
    rope: dict[str, Any] | None = None,
    row: int | None = None,
    besides: Callable[[Any, int], torch.Tensor] | None = None,
    prepare: Callable[[Any], dict[str, torch.nn.Parameter]] | None = None,
    loads: Any = transformers.AutoModelForCausalLM,
) -> Reference:
    """Each document alone; loss = sum over a step's targets ÷ their number; AdamW, decay 1.0.

    rate: of every step, or of each; rope: rotary parameters; row: the length that their frequencies
    are for, where it matters; besides: of the model and a step's index (from 0), a loss that takes
    part in the gradient alone; prepare: changes the model, and returns what trains by name; loads:
    the class that loads it.
    """
    config = transformers.AutoConfig.from_pretrained(model)
    if rope:
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **rope}
    net = loads.from_pretrained(
        model, config=config, attn_implementation="eager", dtype=torch.float32
    ).train()
    if row:
        pin_frequencies(net, row)
    trained = prepare(net) if prepare else trained_of(net)
    start = {name: p.detach().clone() for name, p in trained.items()}
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": 1.0},
        {"params": [p for p in trained.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    rates = [rate] * len(steps) if isinstance(rate, float) else rate
    adam = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=rates[0], betas=(0.9, 0.95), eps=eps
    )
    losses, norms, counts = [], [], []
    moments: list[dict[str, torch.Tensor]] = []
    for documents, now in zip(steps, rates, strict=True):
        for group in adam.param_groups:
            group["lr"] = now
        targets = sum(label != -100 for _, labels in documents for label in labels[1:])
        adam.zero_grad()
        loss = 0.0
        for ids, labels in documents:
            logits = net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
            part = F.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum") / targets
            part.backward()
            loss += part.item()
        if besides:
            besides(net, len(losses)).backward()  # type: ignore[no-untyped-call]
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), clip)))
        losses.append(loss)
        counts.append(targets)
        adam.step()
        held = {name: adam.state[p]["exp_avg"] for name, p in trained.items() if p in adam.state}
        moments = [*moments[:1], {name: one.clone() for name, one in held.items()}]
    end = {name: p.detach().clone() for name, p in trained.items()}
    return Reference(losses, norms, counts, rates, start, end, moments[-1], moments[0])


def mismatch(got: Any, want: Reference) -> list[str]:
    """What of a run's records and final weights differs from one process by more than rounding."""
    records, end = got
    found = []
    for record, loss, norm, targets, rate in zip(
        records, want.losses, want.grad_norms, want.targets, want.rates, strict=True
    ):
        if not abs(record["learning_rate"] - rate) <= 1e-12:
            found.append(f"learning rate {record['learning_rate']} != {rate}")
        if record["target_tokens"] != targets:
            found.append(f"targets {record['target_tokens']} != {targets}")
        if not abs(record["loss"] - loss) <= 1e-5 * loss:
            found.append(f"loss {record['loss']} != {loss}")
        if not abs(record["grad_norm"] - norm) <= 1e-4 * norm:
            found.append(f"grad_norm {record['grad_norm']} != {norm}")
    assert end.keys() == want.end.keys()
    for name, value in end.items():
        moved = (want.end[name] - want.start[name]).norm()
        off = (value - want.end[name]).norm() / moved
        if not off <= 2e-3:  # a NaN is off too
            found.append(f"{name} is off by {off:.1e} of its change")
    return found


def gradients_off(moments: Mapping[str, torch.Tensor], want: Reference) -> list[str]:
    """What differs of Adam's mean of gradients."""
    found = []
    for name, value in want.moments.items():
        off = (moments[name] - value).norm() / value.norm()
        if not off <= 1e-3:
            found.append(f"the gradient of {name} is off by {off:.1e}")
    return found
