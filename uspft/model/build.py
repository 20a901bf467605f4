"""Building a causal language model from its config, on the meta device and with uspft's attention,
and choosing the parameters that train."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.initialization import no_init_weights

from uspft.config.problems import Fault, said
from uspft.families.multimodal import module_name
from uspft.families.shape import key_of_field
from uspft.families.table import chosen_experts
from uspft.model.adapter import add_lora
from uspft.model.attention import NAME
from uspft.model.hf_config import FITTING, model_config, source_of
from uspft.model.linear import bind_linear_layers
from uspft.parameters.experts import CORRECTION, corrections, is_experts, is_router
from uspft.parameters.names import plain_name
from uspft.parameters.source import FolderWeights, WeightsError, table_names

if TYPE_CHECKING:
    from uspft.config.inputs import ModelBlock
    from uspft.config.problems import Finding

CPU = torch.device("cpu")


def empty_model(config: Any, dtype: torch.dtype, device: torch.device = CPU) -> Any:
    """Return a config's model with parameters on the meta device, tied ones tied, and uspft's
    attention.

    device: of its buffers, such as rotary frequencies. DeepSpeed does not move them in stage 3, and
    each forward pass would copy them.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    hold_corrections(model)
    bind_linear_layers(model)
    model.tie_weights()  # after the move, which replaces parameters by new objects
    for buffer in model.buffers():
        # in float32 too: Gemma's embedding scale, computed and used in dtype
        wide = torch.float32 if buffer.is_floating_point() else buffer.dtype
        buffer.data = buffer.data.to(device, wide)
    return model


def hold_corrections(model: nn.Module) -> None:
    """Turn the untrained bias of routers from parameters into buffers, since parameters would be
    rounded to the model's dtype, and partitioned."""
    for module in model.modules():
        if (held := module._parameters.pop(CORRECTION, None)) is not None:
            module.register_buffer(CORRECTION, torch.zeros(held.shape))


def parameter_count(
    model: nn.Module,
    *,
    embedding: bool = True,
    active_only: bool = False,
    trained_only: bool = False,
    sizes: Mapping[int, int] | None = None,
) -> int:
    """Return the number of a model's parameters, tied ones once.

    embedding: False leaves out an embedding that is not tied. active_only: count only as many
    experts as a token uses. trained_only: count only parameters that train. sizes: of whole
    parameters by identity, if ranks have parts.
    """
    counts = {
        id(p): sizes[id(p)] if sizes else getattr(p, "ds_numel", p.numel())
        for p in model.parameters()
        if p.requires_grad or not trained_only
    }
    for name, parameter in model.named_parameters() if active_only else ():
        if is_experts(name) and id(parameter) in counts:
            met, experts = chosen_experts(vars(model.config))
            counts[id(parameter)] = counts[id(parameter)] * met // experts
    if not embedding:
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        for table in model.modules():
            if isinstance(table, nn.Embedding) and table.weight is not head.weight:
                counts.pop(id(table.weight), None)
    return sum(counts.values())


def require_model(block: ModelBlock, length_tokens: int, file: Path | None) -> tuple[Any, Any]:
    """Return the config of a recipe's model, and the model on the meta device.

    length_tokens, file: as of `model_config`. Raises Fault, naming the field if it is known, where
    transformers cannot read the config or build the model, for overrides that do not fit, and where
    a router loss is requested for a model without routers.
    """

    def read(block: ModelBlock) -> Any:
        return model_config(block, length_tokens, file)

    def make(block: ModelBlock) -> Any:
        return empty_model(read(block), getattr(torch, block.dtype))

    key = key_of_field(block)
    try:
        config = read(block)
    except Fault:
        raise
    except Exception as error:  # transformers raises no type of its own
        source = source_of(block, file)
        named = key if isinstance(source, dict) else source
        what = f"transformers cannot read the config of `{named}`: {said(error)}"
        whole = (key, what, "mend its config.json, or name another")
        raise Fault([_refused_field(block, read, said(error)) or whole]) from error
    try:
        model = empty_model(config, config.dtype)
    except Exception as error:  # transformers raises no type of its own for a bad field
        why = f"{type(error).__name__}: {said(error)}"
        what = f"transformers cannot make a model of this config: {why}"
        whole = (key, what, "mend its config.json or model.overrides")
        one = _refused_field(block, make, f"transformers cannot make a model of it: {why}")
        raise Fault([one or whole]) from error
    if getattr(config, "output_router_logits", False) and not any(map(is_router, model.modules())):
        what = "output_router_logits is true, and no layer of this config has experts"
        raise Fault([(key, what, "write model.overrides.output_router_logits: false")])
    return config, model


def _refused_field(
    block: ModelBlock, make: Callable[[ModelBlock], object], why: str
) -> Finding | None:
    """Return the finding for the single field, in overrides or in model.config, without which
    `make` succeeds; None if there is none.

    why: the error of `make`.
    """
    for place in ("overrides", "config"):
        written = getattr(block, place)
        for field in written if isinstance(written, dict) else ():
            others = {key: value for key, value in written.items() if key != field}
            try:
                make(block.model_copy(update={place: others}))
            except Fault:  # it was read, and an override does not fit
                pass
            except Exception:  # transformers raises no type of its own
                continue
            what = f"cannot be `{written[field]}`: {why}"
            return key_of_field(block, field), what, FITTING
    return None


def require_fit(model: Any, folder: Path, *, grows: bool = False) -> None:
    """Check that names and shapes in the folder's safetensors files are the model's.

    A tensor for a bias or norm that the model was built without is refused too: it would be dropped
    silently. Tensors of layers beyond the model's are allowed, since model.overrides can shorten
    it, and so are buffers. grows: whether embedding and head may have more rows than the folder's,
    for new tokens. Raises WeightsError.
    """
    held = FolderWeights(folder).shapes()
    named = {**dict(model.named_parameters()), **corrections(model)}
    wanted = {name: tuple(value.shape) for name, value in named.items()}
    for name in table_names(model) & held.keys() & wanted.keys() if grows else ():
        if held[name][0] < wanted[name][0]:
            held[name] = (wanted[name][0], *held[name][1:])
    modules = dict(model.named_modules())
    missing = [name for name in wanted if name not in held]
    other = [
        f"{name} {held[name]}, config {shape}"
        for name, shape in wanted.items()
        if held.get(name, shape) != shape
    ]
    unused = []
    for name in held:
        owner, _, attribute = name.rpartition(".")
        if owner in modules and getattr(modules[owner], attribute, None) is None:
            unused.append(name)
    for names, what in (
        (missing, "lacks parameters of the model"),
        (other, "holds other shapes than its config.json says"),
        (unused, "holds parameters that its config.json leaves out"),
    ):
        if names:
            remedy = "save weights and config.json together, or correct model.overrides"
            more = f", and {len(names) - 1} more" if len(names) > 1 else ""
            raise WeightsError(f"{folder} {what}: {names[0]}{more}", remedy)


def choose_trained(model: Any, block: ModelBlock, seed: int) -> None:
    """Add the recipe's adapter to a model on the meta device, and freeze parameters as the recipe
    says.

    Raises Fault where a name or an expression matches nothing, or nothing is left to train.
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
    if not findings and not any(one.requires_grad for one in trained.values()):
        findings.append(("model.freeze", "leaves nothing to train", "freeze less"))
    if findings:
        raise Fault(findings)


def _not_found(
    expression: str, model: nn.Module, trained: Mapping[str, nn.Parameter]
) -> tuple[str, str]:
    """Return what is wrong with an expression that matches no name, and the remedy.

    A tied weight has only one of its names.
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
    """Return a sentence on how many parameters train and are frozen; None where all train."""
    if not block.adapter and not block.freeze:
        return None
    trained = parameter_count(model, trained_only=True)
    line = f"{trained:,} parameters, besides {parameter_count(model) - trained:,} frozen ones"
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
