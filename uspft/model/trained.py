"""The choice of the parameters of a model that train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from uspft.config.problems import Fault
from uspft.families.multimodal import module_name
from uspft.model.adapter import add_lora
from uspft.model.build import parameter_count
from uspft.parameters.names import plain_name

if TYPE_CHECKING:
    from torch import nn

    from uspft.config.inputs import ModelBlock


def choose_trained(model: Any, block: ModelBlock, seed: int) -> None:
    """Add the recipe's adapter to a model on meta, and freeze what the recipe says.

    Raises Fault where a name or an expression finds nothing, or nothing is left to train.
    """
    if block.adapter:
        add_lora(model, block.adapter, seed)
    trained = trained_parameters(model)
    findings = []
    for number, expression in enumerate(block.freeze):
        found = [parameter for name, parameter in trained.items() if re.search(expression, name)]
        for parameter in found:
            parameter.requires_grad_(False)
        if not found:
            findings.append((f"model.freeze[{number}]", *_not_found(expression, model, trained)))
    if not findings and not trained_parameters(model):
        findings.append(("model.freeze", "leaves nothing to train", "freeze less"))
    if findings:
        raise Fault(findings)


def _not_found(
    expression: str, model: nn.Module, trained: Mapping[str, nn.Parameter]
) -> tuple[str, str]:
    """Return what is wrong with an expression that is found in no name, and the remedy.

    A tied weight goes by only one of its names.
    """
    known = {id(parameter): name for name, parameter in trained.items()}
    for other, parameter in model.named_parameters(remove_duplicate=False):
        name = known.get(id(parameter))
        if name and re.search(expression, other):
            what = f"`{expression}` is found in {other} alone, which is {name} (tied embeddings)"
            return what, f"write {name.split('.')[-2]}, which freezes both"
    what = f"`{expression}` is found in no name of a parameter that would train"
    for name in trained:
        if re.search(expression, inside := module_name(name)):
            what += f" ({inside} of a multimodal checkpoint is {name} here)"
            return what, "write names of the language model, which alone trains"
    return what, f"their names are like {next(iter(trained))}"


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter that trains, once, by its name in files."""
    named = model.named_parameters()
    return {plain_name(name): value for name, value in named if value.requires_grad}


def what_trains(model: nn.Module, block: ModelBlock) -> str | None:
    """Tell a person how many parameters train and how many are frozen; None where all train."""
    if not block.adapter and not block.freeze:
        return None
    trained = parameter_count(model, trained_only=True)
    line = f"{trained:,} parameters, beside {parameter_count(model) - trained:,} frozen ones"
    if block.adapter:
        # ….q_proj.lora_A.weight
        adapted = {name.split(".")[-3] for name in trained_parameters(model)}
        line += f" (LoRA of rank {block.adapter.rank} on {', '.join(sorted(adapted))})"
        if narrow := _narrower(model, block.adapter.rank):
            line += f"; the rank is more than the smaller side of {', '.join(narrow)}"
            line += ", where it adds parameters and no freedom"
    return line


def _narrower(model: nn.Module, rank: int) -> list[str]:
    """Return the last words of the adapted projections that have a side smaller than the rank."""
    shapes = {plain_name(name): value.shape for name, value in model.named_parameters()}
    owners = [name.partition(".lora_A.")[0] for name in shapes if ".lora_A." in name]
    sides = {one: shapes.get(f"{one}.weight") or shapes[one][1:] for one in owners}
    narrow = [owner for owner in owners if min(sides[owner]) < rank]
    return sorted({owner.rpartition(".")[2] for owner in narrow})
