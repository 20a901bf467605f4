"""Figures of pages that the program itself works out: nothing of them is measured.

What a layer sends is held to what runs send by tests/parity; predicted seconds and bytes are those
that `plan` and `check` print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.attention.documents import documents_of
from benchmarks.lab.results import ROOT
from benchmarks.lab.tables import as_tokens, listed, markdown
from benchmarks.linear.counted import crossing
from uspft.config import Recipe, load
from uspft.config.algorithms import row_of
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout, layout_of
from uspft.planner.machine import read_hardware
from uspft.planner.memory.formula import longest_row, memory_of
from uspft.planner.options import options_of
from uspft.planner.rank import Ranked, ranked
from uspft.prepare.examine import Examined
from uspft.prepare.host import CONFIGS
from uspft.prepare.known import settled_memory
from uspft.prepare.make_plan import examine_for_plan, hardware_of, own_way, ranking_of, step_of
from uspft.segments import Segments
from uspft.sequence import Heads, make_algorithm
from uspft.tensor.megatron import Megatron
from uspft.verify.report import FIXED, PLAIN

RECIPES, MIB = ROOT / "recipes", 2**20
LONGEST = {
    "1 card": "llama3.1-8b-text-whole-1m",
    "8 cards": "llama3.1-8b-text-ring-8m",
    "32 cards": "llama3.1-8b-text-ring-32m-32gpu",
}
"""The recipes of the longest rows, by cards."""
HYBRID_MODEL, SHARING = "Qwen3.5-9B", (2, 4, 8, 16)
"""A model with layers that have a state, and how many ranks share a row of it."""
CARD = read_hardware(CONFIGS / "hardware" / "h100.yaml").memory.bytes
WITHOUT = {key: f"memory.{key}=none" for key in ("mlp_tile_tokens", "offload_activations")}
INSIDE = (
    "parallel_config.ulysses_degree_in_cp=8",
    "parallel_config.context_parallel_algo=planned_cp",
)
"""Words for Ulysses on the 8 cards of a host, exchange between them; on one card left out."""
BEFORE = (*INSIDE, "memory.attention_heads=all")
OPTIONS = {
    "`recompute: nothing`": (*BEFORE, *WITHOUT.values(), "memory.recompute=nothing"),
    "`recompute: attention`": (*BEFORE, *WITHOUT.values()),
    "… and `mlp_tile_tokens: auto`": (*BEFORE, WITHOUT["offload_activations"]),
    "… and `offload_activations: cpu`": BEFORE,
    "… and `attention_heads: 1`": (*INSIDE, "memory.attention_heads=1"),
    "… with `attention_heads: 4` under `planned_cp` alone": (
        "parallel_config.context_parallel_algo=planned_cp",
    ),
    "… with `attention_heads: 4` under `ring_cp` alone": (),
    "… and the optimizer on the host": ("{zero}.offload_optimizer.device=cpu",),
    "… and weights too (`offload_param`)": (
        "{zero}.offload_optimizer.device=cpu",
        "{zero}.offload_param.device=cpu",
    ),
}
"""Words of the command line beside these recipes, which have all keys of `memory`."""
CARDS = {"l20": "8 × L20 on PCIe", "h100": "8 × H100 on NVLink"}
MESH, TENSOR = "llama3.1-70b-lora-mesh-32k", "llama3.1-70b-lora-tensor-32k"
LAYERS = {"Llama-3.1-8B": (4096, Heads(32, 8, 128)), "Llama-3.1-70B": (8192, Heads(64, 8, 128))}
ROW_TOKENS, RANKS = 32_768, (2, 8)
SPLITS = {
    "ulysses_cp": ((8, 1),),
    "ring_cp": ((1, 8),),
    "hybrid_cp": ((2, 4), (4, 2)),
    "allgather_cp": ((1, 8),),
    "planned_cp": ((1, 8), (2, 4), (4, 2)),
}
"""The algorithms, and the (Ulysses, ring) degrees in which 8 ranks share a row."""
HYBRID = "llama3.1-8b-text-hybrid-128k"


def figures(_: dict[str, Any]) -> dict[str, str]:
    """Return them by name, as Markdown."""
    return {
        "algorithms": algorithms(),
        "sent by a layer": sent_by_a_layer(),
        "states": states(),
        "mesh": mesh(),
        "longest rows": longest_rows(),
        "host memory": host_memory(),
        "tolerances": tolerances(),
    }


def algorithms() -> str:
    """This sets beside each other what the busiest of 8 ranks sends under each algorithm for one
    layer of Llama-3.1-8B, forward and backward, and the step that `plan` predicts."""
    rows, mixes = [], (documents_of("one", ROW_TOKENS), documents_of("code", ROW_TOKENS))
    _, heads = LAYERS["Llama-3.1-8B"]
    seconds = [_steps_of(card) for card in CARDS]
    for name, degrees in SPLITS.items():
        for ulysses, ring in degrees:
            split = make_algorithm(row_of(name, 8), ulysses, ring)
            cells = []
            for documents in mixes:
                cost = split.cost(documents, heads, 2)
                sent = cost.ring.bytes + cost.gather.bytes
                cells += [f"{cost.all_to_all.bytes / MIB:,.0f} + {sent / MIB:,.0f}"]
            cells += [f"{each[name, ulysses, ring]:.4g}" for each in seconds]
            rows.append([f"`{name}`" + f", Ulysses {ulysses}" * (1 < ulysses < 8), *cells])
    heads_of = ["8 ranks", "MiB of a layer, one document", "MiB, packed documents"]
    return markdown([*heads_of, *(f"s a step, {title}" for title in CARDS.values())], rows)


def states() -> str:
    """Return from how many tokens on states send less than heads, as a sentence."""
    each = listed([f"{round(crossing(HYBRID_MODEL, ranks), -2):,.0f}" for ranks in SHARING])
    return (
        f"Of one layer of {HYBRID_MODEL} and a row of one document, `ring_cp` sends less than "
        f"`ulysses_cp` above about {each} tokens on {listed([str(n) for n in SHARING])} ranks."
    )


def own_layout(found: Examined) -> Ranked:
    """This returns what a step takes and needs under the recipe's own layout and algorithm."""
    return ranked(step_of(found), own_way(found), hardware_of(found), own=True)


def _steps_of(card: str) -> dict[tuple[str, int, int], float]:
    """Return the predicted seconds of a step of HYBRID by algorithm, Ulysses and ring degree, where
    8 ranks share each row."""
    name = "parallel_config.context_parallel_algo="
    seconds: dict[tuple[str, int, int], float] = {}
    for algorithm, degrees in SPLITS.items():
        for ulysses, ring in degrees:
            words = (name + algorithm, f"parallel_config.ulysses_degree_in_cp={ulysses}")
            found = _examined(HYBRID, card, *words)
            own = own_layout(found)
            seconds[algorithm, ulysses, ring] = own.time.seconds
    return seconds


def sent_by_a_layer() -> str:
    """This tells the MiB that the busiest rank sends for one layer, forward and backward."""
    rows = []
    for name, (hidden, heads) in LAYERS.items():
        cells = []
        for ranks in RANKS:
            cells += [Megatron(ranks, splits_tokens=True).cost(2, ROW_TOKENS, hidden, 2)[0]]
            for algorithm, degrees in (("ulysses_cp", (ranks, 1)), ("ring_cp", (1, ranks))):
                split = make_algorithm(row_of(algorithm, ranks), *degrees)
                cost = split.cost(Segments.single(ROW_TOKENS), heads, 2)
                cells.append(cost.all_to_all.bytes + cost.ring.bytes)
        title = f"{name} ({heads.query} heads, {heads.kv} KV)"
        rows.append([title, *(f"{cell / 2**20:,.0f}" for cell in cells)])
    heads_of = [f"{what} {ranks}" for ranks in RANKS for what in ("tensor", "Ulysses", "ring")]
    return markdown([f"MiB, a row of {ROW_TOKENS >> 10}k in bfloat16", *heads_of], rows)


def mesh() -> str:
    """This sets the step of the mesh recipe beside that of the tensor recipe, predicted."""
    rows = []
    for card, title in CARDS.items():
        tuned, layout = _predicted(MESH, card)
        fixed = f"parallel_config.tensor_mesh=[{layout.mesh_rows}, {layout.mesh_columns}]"
        one, _ = _predicted(MESH, card, fixed, "parallel_config.tensor_slices=1")
        megatron, _ = _predicted(TENSOR, card)
        cells = [f"{tuned:.3g} ({layout.mesh_rows} × {layout.mesh_columns})", f"{one:.3g}"]
        cells += [f"{megatron:,.0f}" if megatron > 1000 else f"{megatron:.3g}"]
        rows.append([title, *cells, f"{megatron / tuned:.2f}", f"{_whole(card):.3g}"])
    heads = ["seconds a step, predicted", "mesh, tuned", "mesh, in one slice"]
    heads += ["Megatron, tensor 8, `use_seq_parallel`", "of the tuned mesh"]
    return markdown([*heads, "all weights on every GPU (does not fit)"], rows)


def _predicted(recipe: str, card: str, *words: str) -> tuple[float, Layout]:
    """Return the predicted seconds of a recipe's step, and its layout."""
    found = _examined(recipe, card, *words)
    own = own_layout(found)
    return own.time.seconds, own.layout


def _whole(card: str) -> float:
    """Return the predicted seconds of the recipe's step where nothing is split but the rows."""
    found = _examined(TENSOR, card)
    every = ranking_of(found, step_of(found)).layouts
    return next(one.seconds for one in every if one.layout.data == one.layout.ranks)


@cache
def _examined(recipe: str, card: str, *words: str) -> Examined:
    words = (*words, f"launch.hardware={card}")
    return examine_for_plan(RECIPES / f"{recipe}.yaml", words, 1, None)


def longest_rows() -> str:
    """This tells the longest rows of Llama-3.1-8B that fit, by cards and keys of memory."""
    rows = []
    for title, words in OPTIONS.items():
        found = [Rows.of(recipe, words) for recipe in LONGEST.values()]
        rows.append([title, *(as_tokens(one.longest) for one in found)])
    return markdown(["tokens of the longest row", *LONGEST], rows)


def host_memory() -> str:
    """This tells what of the host's memory the longest rows need, where layers' inputs wait."""
    said = []
    for cards, recipe in LONGEST.items():
        one = Rows.of(recipe, ())
        said.append(f"{one.host_bytes / 2**30:.0f} GiB on {cards} at {as_tokens(one.longest)}")
    return f"Layers' inputs wait in host memory, a rank: {listed(said)}."


@dataclass(frozen=True)
class Rows:
    """The longest rows of a recipe that fit a card."""

    recipe: Recipe
    shape: ModelShape
    layout: Layout

    @classmethod
    def of(cls, name: str, words: Sequence[str]) -> Rows:
        """Return those of a shipped recipe with words of the command line."""
        zero, alone = "deepspeed.zero_optimization", name == LONGEST["1 card"]
        words = [word.format(zero=zero) for word in words if not (alone and word in INSIDE)]
        recipe = load(RECIPES / f"{name}.yaml", words).recipe
        shape, layout = read_shape(recipe.model, CONFIGS), layout_of(recipe.parallel_config, None)
        assert isinstance(shape, ModelShape) and isinstance(layout, Layout)
        return cls(settled_memory(recipe, shape), shape, layout)

    @property
    def longest(self) -> int:
        """The tokens of the longest row."""
        options = options_of(self.recipe, self.layout)
        found = longest_row(self.shape, self.layout, CARD, options=options)
        assert found
        return found

    @property
    def host_bytes(self) -> float:
        """What a rank of the longest row has in the host's memory."""
        options = options_of(self.recipe, self.layout)
        return memory_of(self.shape, self.layout, self.longest, options=options).host_bytes


def tolerances() -> str:
    """This tells what `verify` takes for rounding, by type."""
    rows = {
        "float32": FIXED["float32"],
        "bfloat16, where transformers did not run": FIXED["bfloat16"],
        "bfloat16, at most": PLAIN["bfloat16"],
    }
    return markdown(
        ["type", "loss", "gradient norm", "each gradient"],
        [
            [title, *(f"{value:g}" for value in (one.loss, one.grad_norm, one.every))]
            for title, one in rows.items()
        ],
    )
