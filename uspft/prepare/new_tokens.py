"""Tokens that the recipe adds: a tokenizer that has them, and a vocabulary that holds them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from uspft.config import Fault, Finding, ModelBlock, Recipe
from uspft.data.corpus.tokenise import read_tokenizer
from uspft.families import ModelShape, read_shape
from uspft.model.fetch import fetch_model
from uspft.prepare.invocation import CONFIGS

KEY = "model.add_tokens"


def fetched(model: ModelBlock, cache: Path) -> dict[str, str]:
    """Return the folder on this host for each key of `model` that does not name it itself.

    A hub model is downloaded. With `add_tokens`, the tokenizer is a copy in the cache that has
    them. Raises Fault.
    """
    places = fetch_model(model)
    if model.add_tokens:
        place = places.get("tokenizer") or _tokenizer(model, places.get("name_or_path"))
        if not place:
            what = "there is no tokenizer that tokens could be added to"
            raise Fault([(KEY, what, "name one in model.tokenizer")])
        places["tokenizer"] = str(with_tokens(place, model.add_tokens, cache))
    return places


def _tokenizer(model: ModelBlock, place: str | None = None) -> str | None:
    """Return where the tokenizer is; place: the model's folder on this host, if another."""
    return str(model.tokenizer or place or model.name_or_path or "") or None


def with_tokens(place: str, tokens: Sequence[str], cache: Path) -> Path:
    """Return a folder in the cache with this tokenizer and these special tokens; make it once.

    Raises Fault where the tokenizer has one of them already or cannot be written, and DataError
    where it cannot be read.
    """
    from tokenizers import AddedToken

    tokenizer = read_tokenizer(place)
    own = tokenizer.get_vocab()
    if known := [(n, token) for n, token in enumerate(tokens) if token in own]:
        raise Fault([_known(number, token) for number, token in known])
    words = [AddedToken(token, special=True, normalized=False) for token in tokens]
    tokenizer.add_tokens(words, special_tokens=True)
    parts = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), place, *tokens)
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    folder = cache / "tokenizers" / digest
    try:
        _save(tokenizer, folder)
    except OSError as error:
        what = f"the tokenizer that has them cannot be written to {folder}: {error.strerror}"
        raise Fault([(KEY, what, "give XDG_CACHE_HOME a folder with room")]) from error
    return folder


def _known(number: int, token: str) -> Finding:
    return f"{KEY}[{number}]", f"`{token}` is a token of the tokenizer already", "leave it out"


def _save(tokenizer: object, folder: Path) -> None:
    """Write a tokenizer aside, and give it its name; another process may do the same."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    try:
        tokenizer.save_pretrained(aside)  # type: ignore[attr-defined]
        aside.chmod(0o755)
        aside.rename(folder)
    except OSError:
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def shape_of(model: ModelBlock) -> ModelShape | list[Finding] | None:
    """Return what `read_shape` does, with as many tokens as the model has with `add_tokens`.

    They are counted where the tokenizer is on this machine.
    """
    shape, place = read_shape(model, CONFIGS), _tokenizer(model)
    file = Path(place or "") / "tokenizer.json"
    if not (model.add_tokens and isinstance(shape, ModelShape) and os.path.isfile(file)):
        return shape
    from tokenizers import Tokenizer

    try:
        own = Tokenizer.from_file(str(file)).get_vocab()
    except Exception:  # tokenizers has no kind of its own; whoever loads it says what is wrong
        return shape
    missing = sum(token not in own for token in model.add_tokens)
    size = max(shape.vocab_size, max(own.values()) + 1 + missing)
    return replace(shape, vocab_size=size, raw={**shape.raw, "vocab_size": size})


def with_vocabulary(recipe: Recipe, shape: ModelShape | None) -> Recipe:
    """Return the recipe whose model has room for the tokens that it adds, once that is known."""
    if not recipe.model.add_tokens or shape is None:
        return recipe
    overrides = {**recipe.model.overrides, "vocab_size": shape.vocab_size}
    model = recipe.model.model_copy(update={"overrides": overrides})
    return recipe.model_copy(update={"model": model})
