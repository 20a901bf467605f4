"""All engines of a case in turn: made, checked, timed, counted."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention.check import LARGEST_ERROR, dense, errors, run_once
from benchmarks.attention.counting import SentBytes, interface_bytes, written_bytes
from benchmarks.attention.engines import ENGINES, Attention, Cannot
from benchmarks.attention.layer import TENSORS
from benchmarks.attention.setting import CHECK_TOKENS, Setting

HOST_LINK = "eth0"
Tell = Callable[[str], None]


def measure(setting: Setting, tell: Tell) -> list[dict[str, Any]]:
    """This returns one record per engine, the same on every rank; tell takes lines of progress."""
    truth = dense(setting.layer(CHECK_TOKENS))
    records, ready = [], {}
    for name in setting.engines:
        record, attention = _prepare(name, setting, truth)
        if attention:
            ready[name] = attention, _tensors(attention, setting)
            record |= _counted_round(*ready[name], setting)
        records.append(record)
        tell(f"{name}: {record['status']} {record['reason']}".rstrip())
    gc.collect()
    gc.freeze()  # a collection before every round need not walk through all packages again
    timed: dict[str, list[dict[str, list[float]]]] = {name: [] for name in ready}
    names = list(ready)
    for number in range(setting.rounds):
        turn = number % max(1, len(names))
        for name in names[turn:] + names[:turn]:  # nobody always comes after the same one
            timed[name].append(_timed_round(*ready[name]))
        tell(f"round {number + 1} of {setting.rounds} done")
    for record in records:
        record["rounds"] = timed.get(record["name"], [])
    return records


def _prepare(
    name: str, setting: Setting, truth: dict[str, Tensor]
) -> tuple[dict[str, Any], Attention | None]:
    """Whether an engine runs this setting and is right; collective."""
    status, reason, off, attention = "ok", "", {}, None
    try:
        layer = setting.layer(CHECK_TOKENS)
        off = errors(ENGINES[name].make(layer), layer, truth)
        attention = ENGINES[name].make(setting.layer())
    except Cannot as refusal:
        status, reason = "cannot", str(refusal)
    except ModuleNotFoundError as missing:
        status, reason = "not installed", missing.name or str(missing)
    except Exception as failure:  # an engine's own; the table says it
        status, reason = "failed", f"{type(failure).__name__}: {failure}".splitlines()[0]
    said = _everyone((status, reason, off))
    for each in said:
        if each[0] != "ok":
            status, reason = each[:2]
    worst = {key: max(each[2].get(key, 0.0) for each in said) for key in said[0][2]}
    if status == "ok" and not max(worst.values()) < LARGEST_ERROR:
        status, reason = "wrong", "not dense attention's result"
    note = attention.note if attention else ""
    record = {"name": name, "kind": ENGINES[name].kind, "status": status, "reason": reason}
    return {**record, "note": note, "errors": worst}, attention if status == "ok" else None


def _tensors(attention: Attention, setting: Setting) -> dict[str, Tensor]:
    """Numbers for this rank's share; which ones does not matter for the time."""
    tokens, layer = len(attention.positions), setting.layer()
    return {name: layer.draw(name, tokens, seed=1 + dist.get_rank()) for name in TENSORS}


def _timed_round(attention: Attention, tensors: dict[str, Tensor]) -> dict[str, list[float]]:
    gc.collect()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    run_once(attention, tensors)
    wall = time.perf_counter() - wall
    dist.barrier()  # what others still fetch from here is this rank's work too
    cpu = time.process_time() - cpu
    both = torch.tensor([wall, cpu], dtype=torch.float64)
    gathered = [torch.empty_like(both) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, both)
    walls, cpus = torch.stack(gathered).T.tolist()
    return {"wall_seconds_by_rank": walls, "cpu_seconds_by_rank": cpus}


def _counted_round(
    attention: Attention, tensors: dict[str, Tensor], setting: Setting
) -> dict[str, Any]:
    """Bytes of one forward and backward, by rank: asked of torch and of Linux; the warm-up, too."""

    def links() -> int:
        return interface_bytes(HOST_LINK) if setting.host_mbit else 0

    dist.barrier()
    before = written_bytes(), links()
    with SentBytes() as sent:
        run_once(attention, tensors)
    dist.barrier()
    after = written_bytes(), links()
    dist.barrier()
    ours = sum(sent.bytes.values()), after[0] - before[0], after[1] - before[1], dict(sent.bytes)
    everyone = _everyone(ours)
    found = {
        "sent_bytes_by_rank": [each[0] for each in everyone],
        "written_bytes_by_rank": [each[1] for each in everyone],
        "sent_bytes_by_operation_of_rank_0": everyone[0][3],
    }
    if setting.host_mbit:
        first_ranks = range(0, setting.processes, setting.processes // 2)
        found["between_hosts_bytes_by_host"] = [everyone[rank][2] for rank in first_ranks]
    return found


def _everyone(mine: Any) -> list[Any]:
    """What each rank has to say, by rank."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, mine)
    return said
