"""The first step in plain transformers: nothing of uspft's model, loss or engine is in it."""

from __future__ import annotations

import gc
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from uspft.assemble import weights_of
from uspft.data import Corpus, Row, RowStream
from uspft.model.config import model_config
from uspft.verify.gradients import See
from uspft.verify.result import Measured

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.job import Job


def plain(job: Job, device: torch.device, see: See) -> Measured:
    """Loss, gradient norm and every gradient (to `see`) of the first step's rows.

    Each document alone, whole logits, transformers' own attention, everything in float32 from
    weights rounded to the recipe's type.
    """
    recipe = job.recipe
    model = _model(recipe).to(device)
    rows = _rows(job)
    targets = sum(int((row.labels >= 0).sum()) for row in rows)
    loss = 0.0
    for row in rows:
        for first, stop in row.segments:
            loss += _backward(model, row, (first, stop), targets, device)
    squares = 0.0
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        squares += float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2
        see(name, gradient)
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Measured([loss], [math.sqrt(squares)], [targets])


def _backward(
    model: Any, row: Row, span: tuple[int, int], targets: int, device: torch.device
) -> float:
    """Gradients of one document's share of the loss; returns that share."""

    def mine(values: Any) -> Tensor:
        return torch.from_numpy(values[span[0] : span[1]]).to(device)

    labels = mine(row.labels)
    if not bool((labels >= 0).any()):
        return 0.0
    logits = model(input_ids=mine(row.input_ids)[None], use_cache=False).logits[0]
    total = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    loss = total / targets
    loss.backward()
    return float(loss.detach())


def _model(recipe: Recipe) -> Any:
    """Built and filled by transformers; random weights are those that uspft draws."""
    config, dtype = model_config(recipe.model), getattr(torch, recipe.model.dtype)
    how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    if recipe.model.config is None:
        name = recipe.model.name_or_path
        model = AutoModelForCausalLM.from_pretrained(name, config=config, **how)
    else:
        model = AutoModelForCausalLM.from_config(config, **how)
        source = weights_of(recipe, None, model, config)
        for name, parameter in model.named_parameters():
            parameter.data = source.read(name, parameter.shape)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    if recipe.memory.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _rows(job: Job) -> list[Row]:
    """The rows of the first step."""
    data, training = job.recipe.data, job.recipe.training
    stream = RowStream(
        Corpus.open(job.corpus), data.sequence_length, data.packing, data.shuffle, job.recipe.seed
    )
    count = training.global_batch_size
    if training.epochs:
        count = min(count, stream.rows_in(training.epochs))
    return [stream.row(index) for index in range(count)]
