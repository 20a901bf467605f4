"""A hub model becomes a local folder, once, before any rank starts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.config import Recipe

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "*.txt"]


def fetch(recipe: Recipe) -> Recipe:
    """The recipe with hub ids of model and tokenizer replaced by folders, downloaded where needed.

    Raises ValueError, naming the key, where the hub cannot be reached or does not know the model.
    """
    update = {}
    for field in ("name_or_path", "tokenizer"):
        name = getattr(recipe.model, field)
        if name and not Path(name).exists():
            update[field] = str(_download(name, f"model.{field}"))
    if not update:
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update=update)})


def _download(name: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:
        raise ValueError(
            f"{key}: cannot fetch `{name}` from the Hugging Face hub "
            f"({type(error).__name__}: {str(error).splitlines()[0]}); "
            "name a local folder, or run `hf download` where there is a network"
        ) from error
