"""What a resumed run must share with the run it goes on from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uspft.config import Recipe

LOOSE = {
    "model.attention",
    "data.workers",
    "data.cache_dir",
    "data.eval",
    "data.format",
}
"""Keys inside the compared blocks that do not change what is learned."""


def identity_of(recipe: Recipe, corpus: str) -> dict[str, Any]:
    """Key → value of what decides the course of a run: model, data, seed, batch, optimizer.

    corpus: the name of the prepared data, which changes with its contents.
    """
    tree = recipe.model_dump(mode="json")
    found = {"seed": tree["seed"], "data.train (contents)": corpus}
    for block in ("model", "data", "optimizer"):
        found |= {f"{block}.{key}": value for key, value in tree[block].items()}
    found["training.global_batch_size"] = tree["training"]["global_batch_size"]
    found["training.max_grad_norm"] = tree["training"]["max_grad_norm"]
    return {key: value for key, value in found.items() if key not in LOOSE}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(key, what is wrong, remedy) for each value that has changed."""
    return [
        (
            key.removesuffix(" (contents)"),
            f"`{new.get(key)}` differs from `{old.get(key)}` of the checkpoint to go on from"
            + (" (the data's contents)" if key.endswith(")") else ""),
            "write that value, another output_dir, or checkpoint.resume=never",
        )
        for key in {**old, **new}
        if old.get(key) != new.get(key)
    ]
