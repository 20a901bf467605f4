"""The keys of `memory`: what their `auto` means, what is wrong with them, and what a card needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import AUTO
from uspft.config.strategies import strategies_of, under
from uspft.families import FAMILIES
from uspft.layout import Layout, layout_of
from uspft.metrics import as_size
from uspft.model.tile_sizes import mlp_tile_tokens, tile_tokens
from uspft.planner.memory import fits, longest_row, memory_of
from uspft.planner.options import RECOMPUTES, Options, options_of
from uspft.planner.products import layer_projections

if TYPE_CHECKING:
    from uspft.config import Finding, Recipe
    from uspft.config.recipe import MemoryBlock
    from uspft.families import ModelShape
    from uspft.planner.machine import Hardware


def settled_memory(recipe: Recipe, shape: ModelShape) -> Recipe:
    """Return the recipe with the tiles settled that are `auto`."""
    block = recipe.memory
    found: dict[str, Any] = {}
    if block.loss_tile_tokens == AUTO:
        found["loss_tile_tokens"] = tile_tokens(AUTO, shape.vocab_size)
    if block.mlp_tile_tokens == AUTO:
        last = layer_projections(shape)[-1]
        found["mlp_tile_tokens"] = mlp_tile_tokens(AUTO, last.per_token * last.inputs)
    return recipe.model_copy(update={"memory": block.model_copy(update=found)})


def fitting_heads(
    recipe: Recipe, shape: ModelShape, layout: Layout, hardware: Hardware
) -> int | str:
    """Return what `memory.attention_heads: auto` stands for: the least on the wire that fits.

    All heads send least; then all query heads of a KV head, and the fewer the more. On a CPU, and
    where attention cannot work in groups, it is all.
    """
    options = options_of(recipe, layout)
    able = bool(hardware.device) and _has_groups(shape, layout)
    if not able or recipe.memory.recompute == "exchange":
        return "all"
    at_once: int | None = None
    for at_once in (None, *range(shape.heads // shape.kv_heads, 0, -1)):
        groups = replace(options, at_once=at_once)
        predicted = memory_of(shape, layout, recipe.data.sequence_length, options=groups)
        if predicted.unpredicted or fits(predicted, hardware.memory.bytes):
            break
    return at_once or "all"


def saving_most(asked: MemoryBlock, shape: ModelShape, layout: Layout, options: Options) -> Options:
    """Return options under which rows are the longest: of what a recipe leaves open, the most of
    attention is made again, in the smallest groups of heads."""
    if asked.recompute == AUTO and options.checkpointing:
        options = replace(options, recompute=RECOMPUTES[-1])
    grouped = asked.attention_heads == AUTO and options.recompute != "exchange"
    if grouped and _has_groups(shape, layout):
        options = replace(options, at_once=1)
    return options


def _has_groups(shape: ModelShape, layout: Layout) -> bool:
    """Return whether `auto` may have attention of a model in groups of heads under a layout."""
    alike = not shape.seeing_all and not layout.is_mesh
    return alike and not _shares_rows(shape, layout.mesh_columns)


def memory_sentence(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    hardware: Hardware,
    asked: MemoryBlock,
) -> str | None:
    """Return what a rank needs beside what its card has, for a person; None where the formula
    does not know. asked: what the recipe leaves open, which longer rows may have otherwise."""
    options = options_of(recipe, layout)
    predicted = memory_of(shape, layout, recipe.data.sequence_length, options=options)
    if predicted.unpredicted:
        return None
    parts = (
        f"activations {_gib(predicted.activation_bytes)}, "
        f"weights, gradients and optimizer {_gib(predicted.state_bytes)}"
    )
    if predicted.host_bytes:
        parts += f"; on the host {_gib(predicted.host_bytes)}"
    if FAMILIES[shape.model_type].states and hardware.device:
        parts += "; states with fla's kernels, without which they take more"
    if not hardware.device:
        return f"about {_gib(predicted.peak_bytes)} GiB a rank ({parts})"
    card = hardware.memory.bytes
    lacking = "" if fits(predicted, card) else ", which is too much"
    said = [f"about {_gib(predicted.peak_bytes)} of {_gib(card)} GiB a rank{lacking} ({parts})"]
    options = saving_most(asked, shape, layout, options)
    longest = longest_row(shape, layout, card, options=options)
    said.append(f"the longest row that fits is {_tokens(longest)}")
    if options.checkpointing and not options.offload_activations and options.schedule.chunks == 1:
        away = replace(options, offload_activations=True)
        more = longest_row(shape, layout, card, options=away)
        if more != longest:
            said.append(f"with offload_activations: cpu {_tokens(more)}")
    return "; ".join(said)


def memory_unknown(recipe: Recipe, shape: ModelShape, layout: Layout, hardware: Hardware) -> str:
    """Return why the formula does not know what a rank needs, and what is known all the same."""
    options, row = options_of(recipe, layout), recipe.data.sequence_length
    predicted = memory_of(shape, layout, row, options=options)
    why = f"nothing predicts it with {' or with '.join(predicted.unpredicted)}"
    of_card = f" of {as_size(hardware.memory.bytes)}" if hardware.device else ""
    return f"{why}; weights alone take {as_size(predicted.weight_bytes)}{of_card}"


def exchange_findings(recipe: Recipe, layout: Layout) -> list[Finding]:
    """Return what is wrong with making the exchange of heads again where there is none."""
    strategies = [under(recipe, n) for n in range(len(strategies_of(recipe)))]
    found = [layout_of(one.parallel_config, layout.ranks) for one in strategies] or [layout]
    exchanges = any(isinstance(one, Layout) and one.ulysses > 1 for one in found)
    if recipe.memory.recompute != "exchange" or exchanges:
        return []
    what = "is exchange, and no heads are exchanged: the Ulysses degree is 1"
    return [("memory.recompute", what, f"write {AUTO}, nothing or attention")]


def tile_findings(recipe: Recipe) -> list[Finding]:
    """Return why MLPs whose matrices lie on a mesh cannot work in tiles, nor attention in groups of
    heads."""
    algorithm = recipe.parallel_config.tensor_parallel_algo
    memory = recipe.memory
    found: list[Finding] = []
    ways = (
        ("mlp_tile_tokens", memory.mlp_tile_tokens, "none", "tile"),
        ("attention_heads", memory.heads_at_once or "all", "all", "group of heads"),
    )
    for key, asked, off, part in ways if recipe.parallel_config.on_a_mesh else ():
        if asked != off:
            what = f"is {asked}, and {algorithm} would move its matrices again for every {part}"
            found.append((f"memory.{key}", what, f"write {off}, or tensor_parallel_algo: megatron"))
    return found


def group_findings(recipe: Recipe, shape: ModelShape | None, tensor: int = 1) -> list[Finding]:
    """Return why a model's attention cannot work in groups of heads. tensor: over how many ranks
    its heads are divided."""
    asked, key = recipe.memory.heads_at_once, "memory.attention_heads"
    if asked is None or shape is None:
        return []
    if shape.seeing_all:
        what = f"is {asked}, and layers of `{shape.model_type}` have heads of two sizes"
        return [(key, what, "write all")]
    if _shares_rows(shape, tensor):
        what = f"is {asked}, and {tensor} tensor ranks share the rows that make a KV head"
        return [(key, what, f"write all, or model_parallel: {shape.kv_heads}")]
    per_kv = shape.heads // shape.kv_heads
    if asked <= per_kv:
        return []
    what = f"is {asked}, and {per_kv} query heads of the model share a KV head"
    return [(key, what, f"write {per_kv} or fewer, or all")]


def _shares_rows(shape: ModelShape, tensor: int) -> bool:
    """Return whether ranks hold parts of KV heads, as where these stand in one matrix with others
    (Phi-3) and are fewer."""
    fused = "self_attn.qkv_proj" in FAMILIES[shape.model_type].projections
    return fused and tensor > shape.kv_heads


def _gib(byte_count: float) -> str:
    return f"{byte_count / (1 << 30):.3g}"


def _tokens(count: int) -> str:
    """Return a number of tokens with a recipe's suffix."""
    if not count:
        return "none"
    return f"{count / (1 << 20):.3g}m" if count >= 1 << 20 else f"{count >> 10}k"
