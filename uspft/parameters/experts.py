"""Parameters whose form in transformers differs from that in Hugging Face files: experts, which are
fused 3-D parameters in transformers and in files one matrix per expert, or MXFP4; and OLMo Hybrid's
convolution and norms.

In MXFP4, the format of gpt-oss on the hub, 32 inputs of an output share one exponent and have four
bits each (OCP Microscaling Formats 1.0): a parameter [E, i, o] is `_blocks` [E, o, i ÷ 32, 16], two
values in a byte, the low half first, and `_scales` [E, o, i ÷ 32]. Every value is one of float32
and of bfloat16.

Shapes: E experts, d hidden size, f an expert's width; gate_up_proj [E, 2f, d] with gate's rows
first, down_proj [E, d, f]. A convolution [C, 1, taps] has the channels of q, k and v in this order.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from uspft.tensor.parts import Part, as_slices

CORRECTION = "e_score_correction_bias"
"""The name of the bias that routers of some families add to scores before they choose, [E] or
[1, E]: a float32 buffer without a gradient."""
UNTRAINED = (CORRECTION, "layer_scalar")
"""The endings of the names of buffers that are not trained: that bias, and the factor of a layer's
hidden states in Gemma 4."""
_FUSED = re.compile(r"(?P<block>.*)\.mlp\.experts\.(?P<kind>gate_up_proj|down_proj)")
_STACKED = re.compile(r".*\.experts\.(gate_up_proj|down_proj)(_bias)?")
_CONVOLUTION = re.compile(r"(?P<block>.*\.linear_attn)\.conv1d\.weight")
_RENAMED = {
    "olmo_hybrid": {
        ".input_layernorm.": ".attention_layer_norm.",
        ".post_attention_layernorm.": ".feedforward_layer_norm.",
    },
    "granitemoe": {
        ".block_sparse_moe.experts.gate_up_proj": ".block_sparse_moe.input_linear.weight",
        ".block_sparse_moe.experts.down_proj": ".block_sparse_moe.output_linear.weight",
        ".block_sparse_moe.router.weight": ".block_sparse_moe.router.layer.weight",
    },
    "ernie4_5_moe": {".mlp.gate.moe_statics.": ".mlp.moe_statics."},
    "minimax_m2": {f".mlp.{CORRECTION}": f".block_sparse_moe.{CORRECTION}"},
}
"""Parts of names in transformers → in files, by model_type: OLMo Hybrid's norms, Granite's experts,
the bias of routers."""
_ROUTER = re.compile(r"(?P<block>.*)\.mlp\.gate\.weight")
BLOCKS, SCALES = "_blocks", "_scales"
MXFP4_GROUP = 32
"""The number of inputs that share an exponent."""
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = torch.tensor(_POSITIVE + [-value for value in _POSITIVE])
"""The value of each four-bit code."""
_BIAS = 127


class Spelling(NamedTuple):
    """The names that files use for a block of experts: the module, and an expert's matrices."""

    module: str
    gate: str
    up: str
    down: str

    def matrices(self, block: str, kind: str, expert: int) -> list[str]:
        """Return the file names of the matrices that make up one expert's part of a parameter."""
        names = (self.gate, self.up) if kind == "gate_up_proj" else (self.down,)
        return [f"{block}.{self.module}.experts.{expert}.{name}.weight" for name in names]


SPELLINGS = {
    **dict.fromkeys(("mixtral", "minimax_m2"), Spelling("block_sparse_moe", "w1", "w3", "w2")),
    **dict.fromkeys(
        (
            *("qwen2_moe", "qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe_text"),
            *("glm4_moe", "ernie4_5_moe"),
        ),
        Spelling("mlp", "gate_proj", "up_proj", "down_proj"),
    ),
}
"""The spelling in files of each model_type."""
INPUTS_FIRST = frozenset({"gpt_oss"})
"""The model types whose experts' matrices are [E, inputs, outputs], not [E, outputs, inputs]."""


class Stored(NamedTuple):
    """The tensors in files that make up one parameter, concatenated along their first dimension:
    those of each expert, or of the whole parameter.

    width: how many of them make up one expert; 0: the parameter has no experts. quantised: whether
    they are its blocks and scales in MXFP4.
    """

    parts: list[str]
    width: int
    quantised: bool = False

    def split(self, value: Tensor) -> Iterator[Tensor]:
        """Yield the tensors that make a parameter, in the order of `parts`."""
        if not self.width:
            yield value
            return
        for expert in value:
            yield from expert.chunk(self.width)


def is_experts(name: str) -> bool:
    """Tell whether a parameter holds weights or biases of all experts of a layer."""
    return bool(_STACKED.fullmatch(name))


def is_router(module: nn.Module) -> bool:
    """Tell whether a module is the projection that chooses experts."""
    return type(module).__name__.lower().endswith("topkrouter")


def corrections(model: nn.Module) -> dict[str, Tensor]:
    """Return the untrained buffers that files contain by name, such as the bias of routers."""
    return {name: one for name, one in model.named_buffers() if name.endswith(UNTRAINED)}


def stored_in(files: Collection[str]) -> dict[str, Stored]:
    """Return, by transformers' name of each parameter, the tensors in the files that make it up, in
    any spelling.

    files: the names of all tensors in the files.
    """
    found = {name: Stored([name], 0) for name in files}

    def joined(name: str, stored: Stored) -> None:
        for part in stored.parts:
            del found[part]
        found[name] = stored

    for blocks in [name for name in found if name.endswith(BLOCKS)]:
        name = blocks.removesuffix(BLOCKS)
        if name + SCALES in found:
            joined(name, Stored([blocks, name + SCALES], 0, True))
    for spelling in dict.fromkeys(SPELLINGS.values()):
        router = f".{spelling.module}.gate.weight"
        for name in [name for name in found if name.endswith(router)]:
            found[name.removesuffix(router) + ".mlp.gate.weight"] = found.pop(name)
        first = f".{spelling.module}.experts.0.{spelling.down}.weight"
        for block in [name.removesuffix(first) for name in found if name.endswith(first)]:
            for kind in ("gate_up_proj", "down_proj"):
                parts: list[str] = []
                expert = 0
                while (own := spelling.matrices(block, kind, expert))[0] in found:
                    parts += own
                    expert += 1
                if parts and all(part in found for part in parts):
                    joined(f"{block}.mlp.experts.{kind}", Stored(parts, len(own)))
    for name in [name for name in found if name.endswith(".q_conv1d.weight")]:
        block = name.removesuffix(".q_conv1d.weight")
        if all(part in found for part in _three(block)):
            joined(f"{block}.conv1d.weight", Stored(_three(block), 0))
    for own_words, words in chain.from_iterable(names.items() for names in _RENAMED.values()):
        for name in [name for name in found if words in name]:
            found[name.replace(words, own_words)] = found.pop(name)
    return found


def _three(block: str) -> list[str]:
    """Return the file names of a convolution's parts."""
    return [f"{block}.{part}_conv1d.weight" for part in "qkv"]


def _renamed(name: str, kind: str) -> str:
    for own, stored in _RENAMED.get(kind, {}).items():
        name = name.replace(own, stored)
    return name


def shape_of(stored: Stored, held: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape of a parameter.

    held: the shapes of tensors in files, by name.
    """
    first, *rest = held[stored.parts[0]]
    if stored.quantised:
        return whole_shape((first, *rest))
    width = stored.width or len(stored.parts)
    shape = sum(held[part][0] for part in stored.parts[:width]), *rest
    return (len(stored.parts) // width, *shape) if stored.width else shape


def as_files(name: str, value: Tensor, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and tensors of a parameter in a model's files. config: the model's."""
    kind = config["model_type"]
    spelling = SPELLINGS.get(kind)
    if kind == "olmo_hybrid" and (match := _CONVOLUTION.fullmatch(name)):
        keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        yield from zip(_three(match["block"]), value.split([keys, keys, values]), strict=True)
    elif spelling and (match := _FUSED.fullmatch(name)):
        every = [spelling.matrices(match["block"], match["kind"], n) for n in range(len(value))]
        stored = Stored(list(chain.from_iterable(every)), len(every[0]))
        yield from zip(stored.parts, stored.split(value), strict=True)
    elif spelling and (match := _ROUTER.fullmatch(name)):
        yield f"{match['block']}.{spelling.module}.gate.weight", value
    else:
        yield _renamed(name, kind), value


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values [..., 32 g] of uint8 blocks [..., g, 16] and scales [..., g]."""
    low, high = _VALUES[(blocks & 15).long()], _VALUES[(blocks >> 4).long()]
    values = torch.stack([low, high], -1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2)


def whole_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the parameter of blocks of this shape."""
    experts, gives, groups, _ = blocks
    return experts, groups * MXFP4_GROUP, gives


def read_quantised(blocks: Any, scales: Any, part: Part) -> Tensor:
    """Read a part of a parameter from slices of safetensors files, as float32. Only its bytes are
    read, rounded up to whole groups of inputs."""
    out = torch.empty(part.size)
    for ((e, e_end), (i, i_end), (o, o_end)), there in part.boxes():
        first, last = i // MXFP4_GROUP, -(-i_end // MXFP4_GROUP)
        held = [one[e:e_end, o:o_end, first:last] for one in (blocks, scales)]
        values = dequantised(*held)[..., i - first * MXFP4_GROUP : i_end - first * MXFP4_GROUP]
        out[as_slices(there)] = values.transpose(1, 2)
    return out
