"""What a rank sends and has alive for layers of experts, counted on meta tensors."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

from benchmarks.lab.results import ROOT
from benchmarks.memory.count import count
from benchmarks.memory.predicted import predicted
from uspft.comm import Books
from uspft.config.inputs import ModelBlock
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape, read_shape
from uspft.layout import Layout
from uspft.planner.expert_traffic import RoutedRows, RowSizes, exchanges
from uspft.planner.products import inner_matrices
from uspft.sequence import Traffic

MODELS = ("Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b")
TOKENS = tuple(1 << n for n in range(12, 18))
"""Of a rank in one forward: 4k to 128k."""
DEGREES = (1, 2, 4, 8)
RANKS, LAYERS, ELEMENT = 8, 2, 2
ZERO_BYTES = 2 * ELEMENT + 4
"""That ZeRO-3 moves of a parameter: gathered twice in bfloat16, its gradient summed in float32."""


@dataclass(frozen=True)
class Point:
    """A layer's experts under one degree, for so many tokens of a rank."""

    model: str
    tokens: int
    experts: int
    dispatch_bytes: int
    """Entered in the books, of one layer, forward twice and backward."""
    zero_bytes: float
    """That ZeRO-3 moves of the layer's experts, by arithmetic."""
    live_bytes: int
    """The most alive at once of activations of a model of LAYERS layers."""
    predicted_live_bytes: int
    gathered_bytes: int
    """Of the experts of a layer that are there whole while it runs."""

    @property
    def sent(self) -> float:
        return self.dispatch_bytes + self.zero_bytes


def shape_of(model: str) -> ModelShape:
    found = read_shape(ModelBlock.model_validate({"name_or_path": model}), ROOT / "configs")
    assert isinstance(found, ModelShape)
    return found


def point(model: str, tokens: int, degree: int) -> Point:
    """Count a model of LAYERS layers, whose RANKS ranks have a row of so many tokens each."""
    import torch
    from transformers import AutoConfig

    file = ROOT / "configs" / "models" / f"{model.replace('/', '--')}.json"
    config: Any = AutoConfig.from_pretrained(file, local_files_only=True)
    config.num_hidden_layers, config.dtype = LAYERS, torch.bfloat16
    if types := getattr(config, "layer_types", None):
        config.layer_types = types[:LAYERS]
    raw = {**shape_of(model).raw, "num_hidden_layers": LAYERS}
    raw |= {"layer_types": raw["layer_types"][:LAYERS]} if "layer_types" in raw else {}
    shape = replace(shape_of(model), raw=raw, layers=LAYERS)
    layout, memory = Layout(data=RANKS, experts=degree), MemoryBlock(loss_tile_tokens=1024)
    sent: Counter[str] = Counter()
    add = Books.add

    def entered(books: Books, kind: str, sent_bytes: int, messages: int = 1) -> None:
        sent[kind] += sent_bytes
        add(books, kind, sent_bytes, messages)

    with patch.object(Books, "add", entered):
        found = count(config, tokens, memory, layout, every_tile=False)
    said = predicted(shape, layout, tokens, memory, "ulysses_cp")
    matrices = expert_parameters(shape)
    copies = RANKS // degree
    zero = ZERO_BYTES * matrices / degree * (copies - 1) / copies
    return Point(
        model,
        tokens,
        degree,
        sent["experts"] // LAYERS,
        zero,
        found.most_bytes["all"],
        said.activation_bytes,
        ELEMENT * matrices // degree,
    )


def expert_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of one layer's experts."""
    return sum(one.parameters for one in inner_matrices(shape, experts=True))


def cost(rows: RoutedRows, sizes: RowSizes, ranks: int, forwards: int = 1) -> Traffic:
    """Return what one rank sends in one layer, forward and backward; arguments as in
    `exchanges`."""
    every = exchanges(rows, sizes, ranks, forwards)
    return Traffic(sum(one.bytes for one in every), sum(one.messages for one in every))


def crossover_tokens(shape: ModelShape, ranks: int, zero_bytes: float, token_bytes: float) -> float:
    """Return the number of tokens of a rank and forward below which expert parallelism sends less
    than it saves ZeRO.

    For experts that are replicated on Z ranks ZeRO moves (Z - 1) / Z of their bytes. If E of the
    ranks divide them, it moves (Z / E - 1) / (Z / E) of an E-th: 1 - 1 / E of the bytes less,
    whatever Z is. zero_bytes: the bytes that ZeRO moves per parameter in a forward and backward.
    token_bytes: the bytes of a token's dispatch in a layer (`token_cost`).
    """
    return zero_bytes * expert_parameters(shape) * (1 - 1 / ranks) / token_bytes


def token_cost(shape: ModelShape, element: int, ranks: int, forwards: int = 1) -> float:
    """Return the mean bytes that a token's dispatch sends in one layer, forward and backward;
    arguments as in `exchanges`."""
    one, none = (RoutedRows.likely(shape, tokens, ranks) for tokens in (1, 0))
    sizes = RowSizes.of(shape, element)
    return cost(one, sizes, ranks, forwards).bytes - cost(none, sizes, ranks, forwards).bytes


def formula(model: str, degree: int) -> float:
    """Return the tokens at which dispatch sends as much as it saves, by the planner's formula."""
    shape = shape_of(model)
    return crossover_tokens(shape, degree, ZERO_BYTES, token_cost(shape, ELEMENT, degree, 2))


def crossing(points: list[Point]) -> float:
    """Return the tokens at which what was counted under one degree is as much as local experts
    send, by the line through it. points: local ones and those of the degree, by tokens alike."""
    local = next(one.zero_bytes for one in points if one.experts == 1)
    own = max((one for one in points if one.experts > 1), key=lambda one: one.tokens)
    return (local - own.zero_bytes) / own.dispatch_bytes * own.tokens


def every(models: tuple[str, ...], tokens: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return all points of some models, as the JSON has them."""
    return [asdict(point(m, t, degree)) for m in models for t in tokens for degree in DEGREES]
