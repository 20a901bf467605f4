"""What pages show of the measurements on one GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.lab.tables import as_tokens, markdown

GIB = 2.0**30
ATTENTION = ("flash", "sdpa")
"""Words in the names of attention's kernels."""
MATRICES = ("nvjet", "gemm", "cutlass")
"""Words in those of matrix products, where they are not attention's."""


def steps(result: Mapping[str, Any]) -> str:
    """Return seconds and bytes of each step beside what is predicted of them."""
    rows = []
    for name, one in result["steps"].items():
        ours, alone = "predicted_bytes" in one, one.get("alone", True)
        seconds = f"{min(one['seconds'][1:]):.2f}" if alone else "–"
        rows.append(
            [
                name,
                one["device"].split()[1],
                as_tokens(one["case"]["tokens"]),
                seconds,
                f"{one['predicted_seconds']:.2f}" if ours and alone else "–",
                f"{one['peak_bytes'] / GIB:.2f}",
                f"{one['predicted_bytes'] / GIB:.2f}" if ours else "–",
                f"{one['predicted_bytes'] / one['peak_bytes']:.3f}" if ours else "–",
            ]
        )
    heads = ["step", "GPU", "tokens", "seconds", "priced", "peak GiB", "predicted", "of measured"]
    return markdown(heads, rows)


def rates(result: Mapping[str, Any]) -> str:
    """Return TFLOP/s of attention's kernels, forward and backward, by length."""
    lengths = sorted({int(n) for one in result["kernels"]["rates"].values() for n in one})
    rows = [
        [f"`{name}`", *(_pair(one.get(str(n))) for n in lengths)]
        for name, one in result["kernels"]["rates"].items()
    ]
    return markdown(["TFLOP/s, forward / backward", *map(as_tokens, lengths)], rows)


def inside(result: Mapping[str, Any]) -> str:
    """Return the bytes a token that kernels allocate in a backward beside what they return."""
    every = result["kernels"]["inside"]
    cases = list(next(iter(every.values())))
    rows = [
        [f"`{name}`", *(f"{one[c]['backward']:,.0f}" for c in cases)] for name, one in every.items()
    ]
    return markdown(["bytes a token; heads / KV heads / features", *cases], rows)


def products(result: Mapping[str, Any]) -> str:
    """Return TFLOP/s of matrix products in bfloat16."""
    rows = [[name, _pair(one)] for name, one in result["kernels"]["products"].items()]
    return markdown(["tokens x inputs x outputs", "TFLOP/s, forward / both gradients"], rows)


def where(result: Mapping[str, Any]) -> str:
    """Return where a step's time goes on the GPU, in milliseconds by kind of kernel."""
    rows = []
    for name, one in result["steps"].items():
        if "kernels" in one:
            sums = {"attention": 0.0, "products": 0.0, "others": 0.0}
            for kernel, (milliseconds, _) in one["kernels"].items():
                sums[_kind(kernel)] += milliseconds
            rows.append([name, *(f"{each:.0f}" for each in sums.values())])
    return markdown(["ms of a step in", "attention", "products", "others"], rows)


def _kind(kernel: str) -> str:
    if any(word in kernel for word in ATTENTION):
        return "attention"
    return "products" if any(word in kernel for word in MATRICES) else "others"


def _pair(one: Mapping[str, float] | None) -> str:
    return f"{one['forward'] / 1e12:.0f} / {one['backward'] / 1e12:.0f}" if one else "–"


def measured(result: Mapping[str, Any]) -> str:
    """Return when and on what it was measured, the kernels beside steps on one GPU."""
    one = result["circumstances"]
    packages = ", ".join(
        f"{p} {one['versions'][p]}" for p in ("torch", "transformers", "deepspeed")
    )
    return f"Measured {one['date'][:10]} on one {one['device']}, CUDA {one['cuda']}, {packages}."


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of card.json, by name, as Markdown."""
    makers = {
        "steps": steps,
        "rates": rates,
        "inside": inside,
        "products": products,
        "where": where,
    }
    return {**{n: make(result) for n, make in makers.items()}, "measured": measured(result)}
