"""DeepSpeed's own Ulysses in DeepSpeed's own engine, around transformers' model and its loss.

A row is packed as ours: `position_ids` begin anew with each document. DeepSpeed gets no groups of
its own for sequence parallelism, with which its gradient scale depends on the stage: it averages
over all ranks, and the loss is scaled for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from benchmarks.attention.engines.deepspeed_ulysses import by_document
from benchmarks.switching.setting import BETAS, CLIP, DECAY, EPS, RATE, Setting
from uspft.data.rows.stream import Row
from uspft.data.samples import NOT_TRAINED

NAME = "deepspeed_ulysses"
"""The attention, as transformers knows it."""


class DeepSpeedUlysses:
    """One rank's engine, all ranks sharing each row."""

    def __init__(self, setting: Setting) -> None:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        model = AutoModelForCausalLM.from_pretrained(
            Path(setting.folder) / "model", dtype=torch.float32, attn_implementation="sdpa"
        )
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        sizes = (1, heads, model.config.head_dim, kv_heads, model.config.num_hidden_layers)
        attend = UlyssesSPAttentionHF(
            by_document(sdpa_attention_forward),
            *sizes,
            dist.group.WORLD,
            seq_length_is_variable=True,
        )
        AttentionInterface.register(NAME, attend)
        model.set_attn_implementation(NAME)
        plain = [p for p in model.parameters() if p.dim() == 1]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": plain, "weight_decay": 0}]
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPS),
            config=_config(setting),
        )

    def step(self, rows: Sequence[Row]) -> tuple[float, float]:
        """It takes an optimizer step, and returns the mean loss and the gradient's norm."""
        batches = [_batch(row) for row in rows]
        targets = sum(int((labels >= 0).sum()) for _, labels, _ in batches)
        rank, ranks = dist.get_rank(), dist.get_world_size()
        whole = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(batches, 1):
            ids, labels, positions = (each.chunk(ranks)[rank] for each in batch)
            made = self.engine(input_ids=ids[None], position_ids=positions[None], use_cache=False)
            loss = cross_entropy(
                made.logits[0], labels, ignore_index=NOT_TRAINED, reduction="sum"
            ) * (ranks / targets)
            whole += loss.detach()
            self.engine.set_gradient_accumulation_boundary(number == len(batches))
            self.engine.backward(loss, scale_wrt_gas=False)
            self.engine.step()
        dist.all_reduce(whole)
        return float(whole) / ranks, float(self.engine.get_global_grad_norm())


def _config(setting: Setting) -> Mapping[str, Any]:
    return {
        "train_batch_size": setting.ranks,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # where a step ends is set in each
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": setting.stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _batch(row: Row) -> tuple[Tensor, Tensor, Tensor]:
    """This returns a row's ids and labels, and positions that begin anew with each document and
    with the padding."""
    bounds = dict.fromkeys([*row.segments.bounds, len(row.input_ids)])
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds)])
    return torch.from_numpy(row.input_ids), torch.from_numpy(row.labels), positions
