"""LoRA: of projections through peft, and of the matrices of experts and routers by this file, which
computes and names them as peft does for its `target_parameters`.

W becomes W + alpha ÷ rank · B A (arXiv 2106.09685), and so does the matrix of each expert.

Shapes, as suffixes: E experts, r rank, i and o input and output features of a matrix. In A
[E·r, i] the rank varies fastest, in B [o, r·E] the expert.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from uspft.config.messages import closest
from uspft.config.problems import Fault
from uspft.families.table import FAMILIES
from uspft.model.dropout import TokenDropout, token_words
from uspft.model.halves import StandIn, standing_in
from uspft.model.recompute import before_each_run
from uspft.model.tiles import own_tokens
from uspft.parameters.experts import INPUTS_FIRST, SPELLINGS, is_experts, is_router
from uspft.parameters.fill import generator
from uspft.parameters.names import ADAPTER, BESIDE, is_adapter, plain_name
from uspft.parameters.source import Weights
from uspft.tensor.parts import Part

if TYPE_CHECKING:
    from uspft.config.inputs import AdapterBlock
    from uspft.config.problems import Finding
    from uspft.model.attention import Bound


class ParameterAdapter(nn.Module):
    """The LoRA matrices A and B for every expert of a parameter, or for a router's one matrix."""

    def __init__(self, parameter: Tensor, rank: int, scale: float, *, inputs_first: bool) -> None:
        """Make A and B on meta.

        inputs_first: whether the parameter is [E, i, o] instead of [E, o, i].
        """
        super().__init__()
        experts, *sizes = parameter.shape if parameter.ndim == 3 else (1, *parameter.shape)
        takes, gives = sizes if inputs_first else sizes[::-1]
        how: dict[str, Any] = {"bias": False, "device": "meta", "dtype": parameter.dtype}
        self.rank, self.scale, self.inputs_first = rank, scale, inputs_first
        self.lora_A = nn.Linear(takes, rank * experts, **how)
        self.lora_B = nn.Linear(rank * experts, gives, **how)

    def added(self, parameter: Tensor) -> Tensor:
        """Return the parameter with the adapter merged into it, as peft merges."""
        sides, first = (self.lora_A.weight, self.lora_B.weight), self.inputs_first
        return with_products(parameter, sides, self.rank, self.scale, inputs_first=first)


def with_products(
    value: Tensor, sides: tuple[Tensor, Tensor], rank: int, scale: float, *, inputs_first: bool
) -> Tensor:
    """Return W + scale · B A of every expert of a parameter [E, o, i], or [E, i, o].

    sides: A and B. A parameter of two dimensions is one W.
    """
    a, b = sides
    if value.ndim == 2:
        return value + (b @ a) * scale
    a_Eri, b_Eor = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    made = b_Eor @ a_Eri
    return value + (made.transpose(1, 2) if inputs_first else made) * scale


def adapt_parameter(module: Any, name: str, rank: int, scale: float) -> None:
    """Add an adapter for a parameter to a module. A router then computes with the merged weight;
    the forward of experts (model/experts.py) uses the adapter itself."""
    parameter = getattr(module, name)
    inputs_first = parameter.ndim == 3 and module.is_transposed
    beside = ParameterAdapter(parameter, rank, scale, inputs_first=inputs_first)
    setattr(module, f"{name}{BESIDE}", beside)
    if parameter.ndim == 2:
        form_weights(module)


def adapters(module: nn.Module) -> Iterator[tuple[str, ParameterAdapter]]:
    """Yield (the parameter's name in the module, its adapter) for each adapted parameter."""
    for name, child in module.named_children():
        if isinstance(child, ParameterAdapter):
            yield name.removesuffix(BESIDE), child


def form_weights(module: nn.Module) -> None:
    """Make a module's forward compute with its adapters merged into the adapted parameters."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        table: dict[str, Any] = module._parameters
        adapted = adapters(module)
        with standing_in([StandIn(table, name, one.added(table[name])) for name, one in adapted]):
            return plain(*args, **kwargs)

    module.forward = forward


def weight_of(weight: Tensor, side: str, rank: int) -> Tensor:
    """Return A or B of an adapter as one matrix per expert: A [E, r, i], B [E, r, o]."""
    if side == "A":
        return weight.unflatten(0, (-1, rank))
    return weight.unflatten(1, (rank, -1)).permute(2, 1, 0).contiguous()


def as_side(value: Tensor, side: str) -> Tensor:
    """Return one matrix per expert as A or B of an adapter: the inverse of `weight_of`."""
    return value.flatten(0, 1) if side == "A" else value.permute(2, 1, 0).flatten(1)


KEY = "model.adapter.target_modules"
PARAMETERS = "model.adapter.target_parameters"


def add_lora(model: Any, block: AdapterBlock, seed: int) -> None:
    """Add LoRA adapters to a model on meta, and freeze its other parameters. Raises Fault."""
    from peft import inject_adapter_in_model  # takes seconds, needed only with an adapter
    from peft.tuners.lora import LoraLayer

    words = _expert_words(model)
    parameters, names = parameter_targets(model, block, words), targets(model, block, words)
    for parameter in model.parameters():
        parameter.requires_grad_(False)

    def inject(names: list[str], into: nn.Module) -> None:
        config = lora_config(block, names)
        inject_adapter_in_model(config, into, adapter_name=ADAPTER, low_cpu_mem_usage=True)

    if names:
        inject(names, model)
    for target in parameters:
        owner, _, last = target.rpartition(".")
        module = model.get_submodule(owner)
        if isinstance(module, nn.Linear):
            path, _, word = owner.rpartition(".")
            alone = nn.Module()  # a temporary module: peft would use the experts' real module path
            alone.linear = module
            inject(["linear"], alone)
            setattr(model.get_submodule(path), word, alone.linear)
        else:
            adapt_parameter(module, last, block.rank, block.alpha / block.rank)
    if not block.dropout:
        return
    base, table = model.base_model, FAMILIES[model.config.model_type].projections
    told: dict[Any, list[tuple[TokenDropout, bool]]] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            own = TokenDropout(block.dropout, seed, plain_name(name))
            module.lora_dropout[ADAPTER] = own
            number, _, inside = name.partition(".layers.")[2].partition(".")
            runs = base.layers[int(number)] if number else base
            divided = inside in table and bool(table[inside].blocks)
            told.setdefault(runs, []).append((own, divided))
    for runs, dropouts in told.items():
        before_each_run(runs, partial(_tell_tokens, dropouts))


def _tell_tokens(
    dropouts: list[tuple[TokenDropout, bool]], _: Any, args: Any, kwargs: dict[str, Any]
) -> None:
    """Tell dropouts which tokens they see, before their layer or model runs.

    dropouts: each with whether tensor ranks divide its projection. Such a projection sees the
    tokens of all tensor ranks; with use_seq_parallel the others see only this rank's.
    """
    bound: Bound = kwargs["uspft"]
    words = token_words(bound.tokens)
    own = own_tokens(words, bound.world.mesh.columns) if bound.ranks > 1 else words
    for dropout, divided in dropouts:
        dropout.words = words if divided else own


def _expert_words(model: Any) -> set[str]:
    """Return the names of a model's expert matrices, fused or in files; empty without experts."""
    if not any(is_experts(name) for name, _ in model.named_parameters()):
        return set()
    spelling = SPELLINGS.get(model.config.model_type)
    return {"experts", "gate_up_proj", "down_proj"} | set(spelling[1:] if spelling else ())


def targets(model: Any, block: AdapterBlock, words: Collection[str]) -> list[str]:
    """Return the names of the modules to adapt, whole or their last words, as peft matches them.

    If the recipe names none, every linear projection is adapted. words: the names of experts'
    matrices, which do not count. Raises Fault for each name that no linear projection of the layers
    has, and if the recipe's lists are both empty.
    """
    head, wanted = model.get_output_embeddings(), block.target_modules
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    found = [name for name in linear if name.rpartition(".")[2] not in words]
    last = sorted({name.rpartition(".")[2] for name in found})
    if wanted is None:
        return last
    findings = [
        _refusal(model, (f"{KEY}[{number}]", name), last, words)
        for number, name in enumerate(wanted)
        if not _matches(name, found)
    ]
    if findings or not (wanted or block.target_parameters):
        empty = (KEY, "is empty, and nothing would train", f"write some of {', '.join(last)}")
        raise Fault(findings or [empty])
    return sorted(wanted)


def parameter_targets(model: Any, block: AdapterBlock, words: Collection[str]) -> list[str]:
    """Return the whole names of the parameters to adapt by `target_parameters`: matrices of experts
    and routers, and of projections that peft would take for experts by their names.

    words: as in `targets`. Raises Fault for every other name, and if there is dropout, which peft
    lacks for `target_parameters`.
    """
    able = [name for name, _ in model.named_parameters() if _is_parameter(model, name, words)]
    short = sorted({".".join(name.split(".layers.")[-1].split(".")[1:]) for name in able})
    usual = f"write some of {', '.join(short)}" if short else "leave it out: it has no experts"
    findings: list[Finding] = []
    for number, name in enumerate(block.target_parameters):
        if not _matches(name, able):
            what = f"the model has no matrices of experts or routers `{name}`"
            findings.append((f"{PARAMETERS}[{number}]", what, _meant(name, short) or usual))
    if block.target_parameters and block.dropout:
        what = f"is {block.dropout}, with {PARAMETERS}: their adapters have no dropout in peft"
        findings.append(("model.adapter.dropout", what, f"write 0.0, or leave {PARAMETERS} out"))
    if findings:
        raise Fault(findings)
    return [one for one in able if any(_matches(name, [one]) for name in block.target_parameters)]


def _matches(name: str, found: Collection[str]) -> bool:
    """Tell whether a name is one of the whole names or of their last words, as peft compares."""
    return any(f".{one}".endswith(f".{name}") for one in found)


def _meant(name: str, known: list[str]) -> str:
    near = closest(name, known)
    return f"did you mean `{near}`?" if near else ""


def _is_parameter(model: Any, name: str, words: Collection[str]) -> bool:
    """Tell whether a parameter is adapted through `target_parameters`, not `target_modules`."""
    owner, _, own = name.rpartition(".")
    if is_experts(name):
        return not own.endswith("_bias")
    module = model.get_submodule(owner)
    if isinstance(module, nn.Linear):
        return own == "weight" and owner.rpartition(".")[2] in words
    return own == "weight" and is_router(module)


def _refusal(
    model: Any, asked: tuple[str, str], known: list[str], words: Collection[str]
) -> Finding:
    """Return the finding for a name that cannot be adapted. asked: the key and the name. known: the
    names that can be."""
    key, name = asked
    word, remedy = name.rpartition(".")[2], f"write some of {', '.join(known)}"
    if word in words:
        what = f"`{name}` names experts, whose matrices transformers holds in one parameter"
        names = (name for name, _ in model.named_parameters() if is_experts(name))
        of_layer = (name.split(".layers.")[1].partition(".")[2] for name in names)
        able = dict.fromkeys(name for name in of_layer if not name.endswith("_bias"))
        return key, what, f"write {PARAMETERS}: [{', '.join(able)}], or {remedy[6:]}"
    if word in ("lm_head", "embed_tokens"):
        return key, f"`{name}`: adapting embeddings and the head is not available yet", remedy
    if name == "all-linear":
        return key, "`all-linear` is what no target_modules means", "leave target_modules out"
    return key, f"the model has no projection `{name}`", _meant(name, known) or remedy


def lora_config(block: AdapterBlock, names: list[str], base: str | None = None) -> Any:
    """Return the LoraConfig of the adapter.

    names: the modules to adapt. base: the path or hub id of the base model, if known.
    """
    from peft import LoraConfig

    whole = block.alpha.is_integer()
    return LoraConfig(
        base_model_name_or_path=base,
        task_type="CAUSAL_LM",
        r=block.rank,
        lora_alpha=int(block.alpha) if whole else block.alpha,
        lora_dropout=block.dropout,
        target_modules=names,
    )


class AdapterStart:
    """A model's weights, and an adapter's initial values as in peft: A is uniform(±1 ÷ √in), B 0.

    A depends only on the seed and its name.
    """

    def __init__(self, base: Weights, seed: int) -> None:
        self._base, self._seed = base, seed

    def draws(self, name: str) -> bool:
        return is_adapter(name) or self._base.draws(name)

    def read(self, name: str, part: Part) -> Tensor:
        if not is_adapter(name):
            return self._base.read(name, part)
        if ".lora_B." in name:
            return torch.zeros(part.size)
        bound = part.shape[1] ** -0.5
        draw = torch.empty(part.shape).uniform_(
            -bound, bound, generator=generator(self._seed, name)
        )
        return part.cut(draw)


def adapter_of(
    names: Collection[str], read: Callable[[str], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield an adapter's parameters in order, including those that `model.freeze` freezes.

    names and read: as for `merged`.
    """
    return ((name, read(name)) for name in names if is_adapter(name))


def merged(
    names: Collection[str],
    read: Callable[[str], Tensor],
    block: AdapterBlock | None,
    model_type: str,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base model's parameters in order, with an adapter merged into them as peft does.

    names: of all parameters. read: returns a parameter's whole value, float32; it is called once
    for each. model_type: decides how experts' matrices are stored.
    """
    for name, *sides in merge_order(names):
        value = read(name)
        if block and sides:
            first, scale = model_type in INPUTS_FIRST, block.alpha / block.rank
            a, b = map(read, sides)
            value = with_products(value, (a, b), block.rank, scale, inputs_first=first)
        yield name, value


def touched(names: Collection[str], trained: Collection[str]) -> list[str]:
    """Return the parameters whose merged values a run may change, and their adapters, in the order
    of `merge_order`.

    trained: the names of the parameters that train.
    """
    every = merge_order(names)
    return [name for group in every if group[1:] or group[0] in trained for name in group]


def merge_order(names: Collection[str]) -> Iterator[list[str]]:
    """Yield the names that `merged` reads, in its order.

    Each list has a parameter of the base model and, if it is adapted, its A and B.
    """
    for name in names:
        if not is_adapter(name):
            owner = name.removesuffix(".weight")
            sides = [f"{owner}.lora_{side}.weight" for side in "AB"]
            yield [name, *sides] if sides[0] in names else [name]
