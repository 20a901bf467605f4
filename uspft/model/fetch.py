"""Download of a hub model to a local folder, once, before any rank starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from uspft.config.problems import Fault, said
from uspft.families.shape import HUB_ID, no_folder

if TYPE_CHECKING:
    from uspft.config import ModelBlock

PATTERNS = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.jinja", "*.txt"]


def fetch_model(block: ModelBlock) -> dict[str, str]:
    """Return the local folder for each key of the block that is a hub id, downloaded if needed.

    Raises Fault for a missing folder, and where the hub cannot be reached or does not know the
    model.
    """
    places = {}
    for field in ("name_or_path", "tokenizer"):
        name = getattr(block, field)
        if name and not os.path.exists(name):
            places[field] = str(_download(name, f"model.{field}"))
    return places


def _download(name: str, key: str) -> Path:
    if not HUB_ID.fullmatch(name):
        raise Fault([no_folder(key, name)])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # hub, network and disk raise their own types
        why = said(error)
        what = f"`{name}` is no folder here, and cannot be had from the Hugging Face hub ({why})"
        remedy = f"name a folder, or run `hf download {name}` where there is a network"
        raise Fault([(key, what, remedy)]) from error
