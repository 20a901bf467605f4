"""Models with experts as transformers trains them in one process, routers' loss included."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
from transformers.models.ernie4_5_moe import modeling_ernie4_5_moe
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.granitemoe import modeling_granitemoe
from transformers.models.minimax_m2 import modeling_minimax_m2
from transformers.models.mixtral import modeling_mixtral
from transformers.models.olmoe import modeling_olmoe
from transformers.models.qwen2_moe import modeling_qwen2_moe
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_moe import modeling_qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.support.models import (
    Documents,
    Reference,
    make_documents,
    mismatch,
    reference,
    trained_of,
)

ROW, STEPS, RATE, CLIP, FACTOR = 48, 2, 1e-3, 0.5, 0.7
ROWS = [[31, 17], [20, 28], [40], [33, 15], [25, 23], [29, 19]]
"""Documents' lengths in each row of a step; the third row has padding."""
OFFICIAL: dict[str, tuple[str, Callable[..., Any]]] = {
    "mixtral": ("num_local_experts", modeling_mixtral.load_balancing_loss_func),
    "qwen2_moe": ("num_experts", modeling_qwen2_moe.load_balancing_loss_func),
    "olmoe": ("num_experts", modeling_olmoe.load_balancing_loss_func),
    "granitemoe": ("num_local_experts", modeling_granitemoe.load_balancing_loss_func),
    "qwen3_next": ("num_experts", modeling_qwen3_next.load_balancing_loss_func),
    "qwen3_5_moe_text": ("num_experts", modeling_qwen3_5_moe.load_balancing_loss_func),
    "qwen3_moe": ("num_experts", modeling_qwen3_moe.load_balancing_loss_func),
    "gpt_oss": ("num_local_experts", modeling_gpt_oss.load_balancing_loss_func),
    "ernie4_5_moe": ("moe_num_experts", modeling_ernie4_5_moe.load_balancing_loss_func),
    "minimax_m2": ("num_local_experts", modeling_minimax_m2.load_balancing_loss_func),
}
"""Of families whose routers have a loss."""

Wanted = tuple[Reference, list[float], list[torch.Tensor]]
"""What one process gives, the routers' loss of each step, and the choices [layers, experts]."""


def documents(path: Path) -> Documents:
    """The documents of all rows."""
    return make_documents(path, list(chain(*ROWS)), masked=[0.0, 0.9])


def wanted(
    folder: Path,
    rows: int,
    data: Documents,
    *,
    balanced: bool = True,
    frozen: Sequence[str] = (),
    packed: bool = True,
    adapted: Callable[[Any], dict[str, torch.nn.Parameter]] | None = None,
) -> Wanted:
    """What one process gives, the routers' loss of each step, and how often it chose each expert.

    rows: of a step. balanced: whether routers have a loss. frozen: expressions of what does not
    train. packed: whether rows have several documents. adapted: prepares the model with an adapter,
    and returns what trains.
    """
    ends = list(accumulate(map(len, ROWS)))
    every = [data.documents[end - len(row) : end] for row, end in zip(ROWS, ends, strict=True)]
    if not packed:
        every = [[one] for one in data.documents]
    steps = [[every[(i * rows + k) % len(every)] for k in range(rows)] for i in range(STEPS)]
    losses, loads_of_steps = list[float](), list[torch.Tensor]()

    def besides(net: Any, step: int) -> torch.Tensor:
        found = torch.zeros((), requires_grad=True)
        with choices(net) as chosen:
            for row in steps[step]:
                each = [
                    net(input_ids=torch.tensor([ids]), output_router_logits=True).router_logits
                    for ids, _ in row
                ]
                layers = tuple(map(torch.cat, zip(*each, strict=True)))
                if balanced:
                    count, official = OFFICIAL[net.config.model_type]
                    met = net.config.num_experts_per_tok
                    found = found + official(layers, getattr(net.config, count), met) / rows
        losses.append((FACTOR * found).item())
        every = [torch.cat([one.flatten() for one in each]) for each in chosen.values()]
        loads = torch.stack([one.bincount(minlength=layers[0].shape[1]) for one in every])
        loads_of_steps.append(loads.double())
        return FACTOR * found

    def prepare(net: Any) -> dict[str, torch.nn.Parameter]:
        trained = trained_of(net)
        for name, parameter in trained.items():
            parameter.requires_grad_(not any(re.search(one, name) for one in frozen))
        return {name: p for name, p in trained.items() if p.requires_grad}

    flat = [list(chain(*step)) for step in steps]
    found = reference(
        folder,
        flat,
        rate=RATE,
        clip=CLIP,
        besides=besides,
        prepare=adapted or prepare,
    )
    return found, losses if balanced else [], loads_of_steps


@contextmanager
def choices(net: Any) -> Iterator[dict[torch.nn.Module, list[torch.Tensor]]]:
    """The experts that tokens meet within the `with` block, by the module that has them."""
    found: dict[torch.nn.Module, list[torch.Tensor]] = {}
    every = [one for one in net.modules() if type(one).__name__.endswith("Experts")]
    hooks = [
        one.register_forward_pre_hook(lambda of, args: found.setdefault(of, []).append(args[1]))
        for one in every
    ]
    yield found
    for hook in hooks:
        hook.remove()


def problems(got: Any, want: Wanted, experts: int | None = None) -> list[str]:
    """What differs from one process, the routers' loss of each step included, and how evenly
    experts are chosen.

    experts: over how many ranks they are divided, where all of these share each set.
    """
    records, end = got
    expected, losses, loads = want
    steps = [record for record in records if "loss" in record]
    found = mismatch((steps, {name: end[name] for name in expected.end}), expected)
    for record, loss in zip(steps, losses, strict=False):
        if not abs(record["router_loss"] - loss) <= 1e-5 * loss:
            found.append(f"router_loss {record['router_loss']} != {loss}")
    for record, load in zip(steps, loads, strict=True):
        told = {"expert_load": load}
        if experts and experts > 1:
            told["expert_rank_load"] = load.unflatten(1, (experts, -1)).sum(2)
        for name, each in told.items():
            shares = each / each.mean(1, keepdim=True)
            most = float(shares.max())
            if not abs(record[name] - most) <= 1e-9:
                found.append(f"{name} {record[name]} != {most}")
            every = torch.tensor(record[f"{name}s"], dtype=torch.float64)
            every = every.unflatten(1, (each.shape[1], -1)).mean(2)  # tensor ranks are alike
            if not (every - shares).abs().max() <= 1e-4:
                found.append(f"{name} of each {every} != {shares}")
    return found
