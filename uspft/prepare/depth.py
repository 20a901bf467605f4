"""An estimate, before anything is built, of how many layers one process can hold."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uspft.config import Fault
from uspft.layout import Layout
from uspft.model.build import empty_model
from uspft.model.hf_config import attention_of, layer_windows
from uspft.model.loss import tile_tokens
from uspft.planner.need import need_of
from uspft.planner.room import USABLE_SHARE

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.families import ModelShape

BYTES_PER_PARAMETER = 20
"""Bytes that training takes for each parameter.

They are those of the compute weight and gradient, the float32 gradient sum, the master weight and
the two moments of Adam.
"""
MAX_PLAIN_TOKENS = 4096
"""The longest row in tokens for which plain transformers runs: its float32 logits are whole."""
GIB = 1 << 30
_LAYER = re.compile(r"\.layers\.(\d+)\.(.+)")
_ASK_GPU = "import torch; print(min(torch.cuda.mem_get_info(i)[0] for i in range({count})))"


@dataclass(frozen=True)
class Sizes:
    """The numbers from which the memory of one process follows."""

    outside: int
    """Number of parameters outside the layers."""
    layers: tuple[int, ...]
    """Number of parameters of each layer, in order."""
    kinds: tuple[Hashable, ...]
    """What each layer is, as far as layers differ."""
    kept_bytes: int
    """Bytes of one layer's activations that wait for the backward."""
    working_bytes: int
    """Bytes that are needed once: for the layer at work, and for a tile of logits."""
    parameter_bytes: int = BYTES_PER_PARAMETER
    """Bytes for each parameter; an adapter's own few parameters are not counted."""

    def need_bytes(self, depth: int) -> int:
        """Return the bytes that one process needs for the first `depth` layers."""
        parameters = self.outside + sum(self.layers[:depth])
        return self.parameter_bytes * parameters + depth * self.kept_bytes + self.working_bytes

    @property
    def shallowest(self) -> int:
        """The smallest number of layers, from the first, among which every kind of layer is."""
        return max(self.kinds.index(kind) for kind in self.kinds) + 1


def sizes_of(
    recipe: Recipe, config: Any, shape: ModelShape | None = None, *, with_plain: bool
) -> Sizes:
    """Return the sizes of a recipe's model on one process that holds its rows whole.

    shape: the model's, for planner/activations.py, which says what activations take where it knows;
    else, and beside plain transformers, an estimate does. with_plain: whether plain transformers
    runs there too.
    """
    outside, layers = 0, [0] * config.num_hidden_layers
    kinds: list[list[Hashable]] = [[window] for window in layer_windows(config)]
    for kind, turned in zip(kinds, getattr(config, "no_rope_layers", None) or (), strict=False):
        kind.append(turned)
    for name, parameter in empty_model(config, config.dtype).named_parameters():
        place = _LAYER.search(name)
        if place is None:
            outside += parameter.numel()
        else:
            layers[int(place[1])] += parameter.numel()
            kinds[int(place[1])].append((place[2], parameter.shape))
    element = 4 if with_plain or recipe.model.dtype == "float32" else 2
    tokens = recipe.data.sequence_length * (1 if with_plain else recipe.training.micro_batch_size)
    working = tokens * element * _elements_per_token(config)
    working += score_bytes(config, tokens) if with_plain else 0
    kept = working
    if recipe.memory.gradient_checkpointing:
        kept, working = 2 * tokens * element * config.hidden_size, 2 * working
    tile = tile_tokens(recipe.memory.loss_tile_tokens, config.vocab_size)
    at_once = tokens if with_plain else min(tile or tokens, tokens)
    working += 3 * 4 * at_once * config.vocab_size
    if shape and not with_plain and (need := need_of(recipe, shape, Layout())):
        two, three = (need.activations.of_layers(n).peak_bytes for n in (2, 3))
        kept, working = int(three - two), int(two - 2 * (three - two))
    return Sizes(
        outside,
        tuple(layers),
        tuple(map(tuple, kinds)),
        kept,
        working,
        2 * element if recipe.model.adapter else BYTES_PER_PARAMETER,  # read, then cast
    )


def _elements_per_token(config: Any) -> int:
    """Return about how many activations a token has in one layer.

    They are those of norms and residuals, of q, k, v before and after rotation, and of the MLP.
    """
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    experts = getattr(config, "num_experts_per_tok", None) or 1
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    found: int = 8 * config.hidden_size + 3 * heads * dim + 4 * experts * inner
    return found


def score_bytes(config: Any, length_tokens: int) -> int:
    """Return about how many bytes of float32 scores one layer's attention keeps.

    Scores are kept as they are, capped, masked, as weights, and as their gradient; 0 where
    transformers does not write them out.
    """
    written_out = attention_of(config) == "eager"
    return 5 * 4 * config.num_attention_heads * length_tokens**2 if written_out else 0


def why_not_plain(recipe: Recipe, config: Any, memory: int) -> str | None:
    """Return why plain transformers is not run beside one process, or None where it is.

    memory: the bytes that one process has.
    """
    length = recipe.data.sequence_length
    if length > MAX_PLAIN_TOKENS:
        return f"rows have {length:,} tokens, and it takes {MAX_PLAIN_TOKENS:,} at most"
    if recipe.model.adapter and recipe.model.adapter.dropout:
        return "peft draws an adapter's dropout in another way"
    # Whole logits, their exponentials and gradients: a quarter of the memory at most.
    if 4 * 3 * 4 * length * config.vocab_size > memory:
        return f"the logits of {length:,} tokens take too much memory"
    if 4 * score_bytes(config, length) > memory:
        return f"transformers writes out every score of {length:,} tokens, and they take too much"
    return None


def fitting_depth(sizes: Sizes, memory: int) -> int:
    """Return how many layers at most one process with this memory in bytes holds.

    Raises Fault where the fewest layers among which every kind of layer is do not fit.
    """
    usable = USABLE_SHARE * memory
    for depth in range(len(sizes.layers), sizes.shallowest - 1, -1):
        if sizes.need_bytes(depth) <= usable:
            return depth
    needed = sizes.need_bytes(sizes.shallowest) / GIB
    what = (
        f"one process would need about {needed:.3g} GiB with {sizes.shallowest} of "
        f"{len(sizes.layers)} layers, and has {usable / GIB:.3g} GiB"
    )
    remedy = "verify shorter rows, fewer launch.processes, or on a machine with more memory"
    raise Fault([("data.sequence_length", what, remedy)])


def with_depth(recipe: Recipe, depth: int) -> Recipe:
    """Return the recipe with only the first `depth` layers of its model."""
    overrides = {**recipe.model.overrides, "num_hidden_layers": depth}
    for key in ("layer_types", "no_rope_layers"):
        if overrides.get(key):
            overrides[key] = list(overrides[key])[:depth]
    model = recipe.model.model_copy(update={"overrides": overrides})
    return recipe.model_copy(update={"model": model})


def memory_here(recipe: Recipe) -> int:
    """Return the bytes for one process: the fullest GPU's free memory, or the host's ÷ processes.

    GPUs are asked by another process, which gives them back when it ends. Raises RuntimeError where
    they cannot be asked.
    """
    processes = recipe.launch.processes
    assert isinstance(processes, int)
    if recipe.launch.device == "cuda":
        command = [sys.executable, "-c", _ASK_GPU.format(count=processes)]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        if asked.returncode:
            raise RuntimeError(f"the GPUs' free memory cannot be read: {asked.stderr.strip()}")
        return int(asked.stdout)
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) * 1024 // processes
