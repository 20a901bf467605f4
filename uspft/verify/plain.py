"""The first step in plain transformers, with its own config, model, positions, attention and loss.

Only the rows, the random initial weights, and the choice of what trains come from uspft.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from uspft.checkpoint.weights import weights_of
from uspft.config.strategies import row_lengths
from uspft.data.rows.stream import Row, training_rows
from uspft.model.adapter import adapters, form_weights
from uspft.model.build import choose_trained, trained_parameters
from uspft.model.experts import expert_modules
from uspft.model.hf_config import attention_of
from uspft.parameters.experts import CORRECTION
from uspft.parameters.fill import generator
from uspft.parameters.names import is_adapter, places
from uspft.switching.deal.micro_steps import rows_of_samples
from uspft.tensor.parts import Part
from uspft.verify.gradients import See
from uspft.verify.work import Measured

if TYPE_CHECKING:
    from uspft.checkpoint.folder import Checkpoint
    from uspft.config import ModelBlock, Recipe
    from uspft.job import Job
    from uspft.parameters.source import Weights


def weights_under_way(
    block: ModelBlock, seed: int, model: Any, checkpoint: Checkpoint | None = None
) -> Weights:
    """Return the weights of `weights_of`, but with random values for an adapter's B, as in a run in
    progress.

    With the initial B = 0 the adapter's A has no gradient, and a wrong one would go unnoticed.
    """
    found = weights_of(block, seed, model, checkpoint)
    return AdapterUnderWay(found, seed) if block.adapter else found


class AdapterUnderWay:
    """A model's weights in which an adapter's B is uniform(±0.1 ÷ √rank), a function of seed and
    name."""

    def __init__(self, start: Weights, seed: int) -> None:
        self._start, self._seed = start, seed

    def draws(self, name: str) -> bool:
        return self._start.draws(name)

    def read(self, name: str, part: Part) -> Tensor:
        if ".lora_B." not in name:
            return self._start.read(name, part)
        bound = 0.1 * part.shape[1] ** -0.5
        draw = torch.empty(part.shape).uniform_(
            -bound, bound, generator=generator(self._seed, name)
        )
        return part.cut(draw)


def plain(job: Job, device: torch.device, see: See) -> Measured:
    """Return loss and gradient norm of the first step's rows, and pass every gradient to `see`.

    Each document runs alone, with whole logits and transformers' own attention and router loss, all
    in float32 from weights rounded to the recipe's dtype.
    """
    recipe = job.here
    model = _model(recipe).to(device)
    rows = _rows(job)
    targets = sum(int((row.labels >= 0).sum()) for row in rows)
    loss = sum(_backward(model, row, targets, len(rows)) for row in rows)
    squares = 0.0
    for name, parameter in trained_parameters(model).items():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        see(name, gradient)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Measured([loss], [math.sqrt(squares)], [targets])


def _backward(model: Any, row: Row, targets: int, rows: int) -> float:
    """Add the gradients of one row's share of the loss, and return its share of the
    cross-entropy."""
    losses, routed = [], []
    for first, stop in row.segments:
        ids, labels = (
            torch.from_numpy(values[first:stop]).to(model.device)
            for values in (row.input_ids, row.labels)
        )
        found = model(input_ids=ids[None], use_cache=False)
        total = torch.nn.functional.cross_entropy(found.logits[0], labels, reduction="sum")
        losses.append(total / targets)
        routed.append(getattr(found, "router_logits", None))
    if not losses:
        return 0.0  # a row of padding
    loss = torch.stack(losses).sum()
    (loss + _router_loss(model, routed) / rows).backward()
    return float(loss.detach())


def _router_loss(model: Any, routed: Sequence[Sequence[Tensor] | None]) -> Tensor | float:
    """Return transformers' own router loss of a row's documents together, or 0 if the config does
    not ask for it."""
    each = [layers for layers in routed if layers is not None]
    if not each or not getattr(model.config, "output_router_logits", False):
        return 0.0
    layers = tuple(torch.cat(parts) for parts in zip(*each, strict=True))
    balance = sys.modules[type(model).__module__].load_balancing_loss_func
    config = model.config
    value = balance(layers, layers[0].shape[-1], config.num_experts_per_tok)
    loss: Tensor = value * config.router_aux_loss_coef
    return loss


def _model(recipe: Recipe) -> Any:
    """Return the model, built and loaded by transformers and peft; random weights are those that
    uspft draws."""
    dtype = getattr(torch, recipe.model.dtype)
    config = plain_config(recipe.model)
    if quantised := getattr(config, "quantization_config", None):
        config.quantization_config = {**quantised, "dequantize": True}
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention_of(config)}
    if recipe.model.config is None:
        model = _loaded(recipe, config, how)
    else:
        model = AutoModelForCausalLM.from_config(config, **how)
        source = weights_under_way(recipe.model, recipe.seed, model)
        for name, parameter in model.named_parameters():
            parameter.data = source.read(name, Part.whole(parameter.shape))
    for name, parameter in model.named_parameters():
        if name.endswith(CORRECTION):  # it has no gradient, and is always float32
            parameter.requires_grad_(False)
    pin_frequencies(model, recipe.data.sequence_length)
    choose_trained(model, recipe.model, recipe.seed)
    _start_adapter(model, recipe)
    for _, module in expert_modules(model):
        if any(adapters(module)):
            # as peft does; uspft never merges adapters of experts into weights
            form_weights(module)
    for name, parameter in model.named_parameters():
        if not name.endswith(CORRECTION):
            parameter.data = parameter.data.to(dtype).float()
    if recipe.memory.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _loaded(recipe: Recipe, config: Any, how: dict[str, Any]) -> Any:
    """Return the model of a folder; transformers itself enlarges it if the recipe adds tokens."""
    name, wanted = recipe.model.name_or_path, config.vocab_size
    if recipe.model.add_tokens:
        config.vocab_size = AutoConfig.from_pretrained(name).get_text_config().vocab_size
    stored = config.vocab_size
    if "text_config" in AutoConfig.from_pretrained(name).to_dict():
        model = _language_model(name, config, how)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, config=config, **how)
    if wanted > stored:
        # transformers would add noise otherwise
        model.resize_token_embeddings(wanted, mean_resizing=False)
        with torch.no_grad():
            for module in (model.get_input_embeddings(), model.get_output_embeddings()):
                module.weight[stored:] = module.weight[:stored].double().mean(0)
    return model


def _language_model(name: str | None, config: Any, how: dict[str, Any]) -> Any:
    """Return the language model of a multimodal checkpoint, which transformers loads whole."""
    whole = AutoModelForImageTextToText.from_pretrained(name, dtype=how["dtype"])
    model = AutoModelForCausalLM.from_config(config, **how)
    for part, of in ((model.model, whole.model.language_model), (model.lm_head, whole.lm_head)):
        held = of.state_dict()
        # it may have fewer layers
        part.load_state_dict({key: held[key] for key in part.state_dict()})
    return model


def _start_adapter(model: Any, recipe: Recipe) -> None:
    """Initialise the parameters that peft has added."""
    source = weights_under_way(recipe.model, recipe.seed, model)
    for name, (parameter, owners) in places(model).items():
        if is_adapter(name):
            value = torch.nn.Parameter(source.read(name, Part.whole(parameter.shape)))
            for module, attribute in owners:
                setattr(module, attribute, value.requires_grad_(parameter.requires_grad))


def _rows(job: Job) -> list[Row]:
    """Return the rows of the first step."""
    training = job.recipe.training
    recipe, lengths = job.recipe, row_lengths(job.recipe)
    stream = training_rows(recipe.data, job.corpus, recipe.seed, one_document=bool(lengths))
    count = training.global_batch_size
    if training.epochs:
        count = min(count, stream.rows_in(training.epochs))
    if not lengths:
        return [stream.row(index) for index in range(count)]
    samples = {index: stream.tokens_of(index) for index in range(count)}
    rows = rows_of_samples(samples, lengths, recipe.data.packing)
    return [stream.row_of(row.samples, lengths[row.bucket]) for row in rows]


KINDS_OF_LAYERS = {"use_sliding_window", "sliding_window", "max_window_layers"}
STARTS_FROM = "original_max_position_embeddings"


def plain_config(block: ModelBlock) -> Any:
    """Return the config as if model.overrides and model.rope_scaling were in its file."""
    source = block.config or block.name_or_path or ""
    raw = _raw(source if isinstance(source, dict) else Path(source))
    types, overrides = raw.get("layer_types"), block.overrides
    if sizes := raw.pop("per_layer_config", None):  # of layers with full attention
        alike = {"head_dim": raw.get("head_dim"), **next(iter(sizes.values()))}
        raw["global_head_dim"] = alike["head_dim"]
        raw["num_global_key_value_heads"] = alike.get("num_key_value_heads")
    raw |= overrides
    if types and "layer_types" not in overrides:
        layers = raw["num_hidden_layers"]
        raw["layer_types"] = types[:layers] + types[-1:] * (layers - len(types))
        if KINDS_OF_LAYERS & overrides.keys() and "use_sliding_window" in raw:
            del raw["layer_types"]  # the overrides set it for all layers
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    if block.rope_scaling:
        old = config.rope_parameters
        new = {k: list(v) if isinstance(v, tuple) else v for k, v in block.rope_scaling.items()}
        if new["rope_type"] in ("yarn", "longrope", "llama3"):
            new.setdefault(STARTS_FROM, old.get(STARTS_FROM, config.max_position_embeddings))
            if hasattr(config, STARTS_FROM):
                setattr(config, STARTS_FROM, new[STARTS_FROM])
        own = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
        kept = {key: old[key] for key in own if key in old}
        config.rope_parameters = kept | new
    return config


def _raw(source: Path | dict[str, Any]) -> dict[str, Any]:
    """Return the config in a file or mapping; for a multimodal model, that of its language
    model."""
    if isinstance(source, dict):
        raw = source
    else:
        raw, _ = PreTrainedConfig.get_config_dict(source, local_files_only=True)
    if "text_config" not in raw:
        return dict(raw)
    whole = AutoConfig.for_model(**raw)
    text: dict[str, Any] = whole.get_text_config().to_dict()
    # its positions for text are Qwen3's, which has a language model head
    if text["model_type"] == "qwen3_vl_text":
        text["model_type"] = "qwen3"
        for axes in ("mrope_section", "mrope_interleaved"):
            text["rope_parameters"].pop(axes, None)
    return text | {"tie_word_embeddings": whole.tie_word_embeddings}


def pin_frequencies(model: Any, length_tokens: int) -> None:
    """Set the rotary frequencies that transformers computes for this length, for every call of the
    model."""
    rotary = model.get_decoder().rotary_emb
    by_kind = rotary.rope_type if isinstance(rotary.rope_type, dict) else {None: rotary.rope_type}
    for kind, name in by_kind.items():
        if name != "default":
            prefix, like = f"{kind}_" if kind else "", model.device
            find = ROPE_INIT_FUNCTIONS[name]
            found = find(model.config, like, seq_len=length_tokens, layer_type=kind)
            setattr(rotary, f"{prefix}inv_freq", found[0])
            setattr(rotary, f"{prefix}attention_scaling", found[1])
    plain = dict.fromkeys(by_kind, "default")
    rotary.rope_type = plain if isinstance(rotary.rope_type, dict) else "default"
