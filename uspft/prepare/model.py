"""The `model` block of a recipe: fetching model and tokenizer, checking them, also by building the
model on the meta device, and the settings that an export needs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.config import Fault, Finding, ModelBlock, Recipe
from uspft.config.problems import said
from uspft.config.strategies import KEY as STRATEGIES
from uspft.config.strategies import strategies_of
from uspft.data.chat.template import turn_ends, without_marks
from uspft.data.corpus.tokenise import holds_tokenizer, load_tokeniser, read_tokenizer
from uspft.families import ModelShape, read_shape
from uspft.families.shape import config_file
from uspft.job import Serving
from uspft.layout import Layout
from uspft.model.fetch import fetch_model
from uspft.prepare.host import CONFIGS

if TYPE_CHECKING:
    from uspft.config.recipe import Strategy
    from uspft.parameters.shards import Shards

KEY = "model.add_tokens"


def tokenizer_of(model: ModelBlock, place: str | None = None) -> str | None:
    """Return the location of the tokenizer: the recipe's, or else the model's own.

    place: the model's folder on this host, if that is not what the recipe names.
    """
    return str(model.tokenizer or place or model.name_or_path or "") or None


@contextmanager
def tokenizer_here(recipe: Recipe) -> Iterator[str | None]:
    """Yield the tokenizer's folder, or None where it is a hub id.

    With model.add_tokens it is a temporary copy with these tokens.
    """
    folder = tokenizer_of(recipe.model)
    if not (folder and os.path.isdir(folder)):
        yield None
    elif not recipe.model.add_tokens:
        yield folder
    else:
        with tempfile.TemporaryDirectory(prefix="uspft-") as aside:
            yield str(with_tokens(folder, recipe.model.add_tokens, Path(aside)))


def fetched(model: ModelBlock, cache: Path) -> dict[str, str]:
    """Return the local folder for each key of `model` that names something else.

    A hub model is downloaded. With `add_tokens`, the tokenizer is a copy in the cache that has
    them. Raises Fault.
    """
    places = fetch_model(model)
    if model.add_tokens:
        place = places.get("tokenizer") or tokenizer_of(model, places.get("name_or_path"))
        if not place:
            what = "there is no tokenizer that tokens could be added to"
            raise Fault([(KEY, what, "name one in model.tokenizer")])
        places["tokenizer"] = str(with_tokens(place, model.add_tokens, cache))
    return places


def with_tokens(place: str, tokens: Sequence[str], cache: Path) -> Path:
    """Return a folder in the cache with this tokenizer plus these special tokens; create it once.

    Raises Fault where the tokenizer has one of them already or cannot be written, and DataError
    where it cannot be read.
    """
    from tokenizers import AddedToken

    tokenizer = read_tokenizer(place)
    own = tokenizer.get_vocab()
    if known := [(n, token) for n, token in enumerate(tokens) if token in own]:
        what = "`{}` is a token of the tokenizer already"
        raise Fault([(f"{KEY}[{n}]", what.format(token), "leave it out") for n, token in known])
    words = [AddedToken(token, special=True, normalized=False) for token in tokens]
    tokenizer.add_tokens(words, special_tokens=True)
    parts = (tokenizer.backend_tokenizer.to_str(), str(tokenizer.chat_template), place, *tokens)
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
    folder = cache / "tokenizers" / digest
    if folder.exists():
        return folder
    try:  # written under a temporary name and renamed: another process may do the same
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as aside:
            made = Path(aside, "made")
            tokenizer.save_pretrained(made)
            made.rename(folder)
    except OSError as error:
        if not folder.exists():
            what = f"the tokenizer that has them cannot be written to {folder}: {error.strerror}"
            raise Fault([(KEY, what, "give XDG_CACHE_HOME a folder with room")]) from error
    return folder


def shape_of(model: ModelBlock) -> ModelShape | list[Finding] | None:
    """Return what `read_shape` returns, with the vocabulary enlarged by `add_tokens`.

    The tokens are counted only where the tokenizer is on this machine.
    """
    shape, place = read_shape(model, CONFIGS), tokenizer_of(model)
    file = Path(place or "") / "tokenizer.json"
    if not (model.add_tokens and isinstance(shape, ModelShape) and os.path.isfile(file)):
        return shape
    from tokenizers import Tokenizer

    try:
        own = Tokenizer.from_file(str(file)).get_vocab()
    except Exception:  # tokenizers raises no type of its own; loading it later reports the error
        return shape
    missing = sum(token not in own for token in model.add_tokens)
    size = max(shape.vocab_size, max(own.values()) + 1 + missing)
    if size > shape.vocab_size and shape.layer_features:
        what = "asks for more tokens than there are embeddings of each layer, which do not grow yet"
        return [(KEY, what, "leave it out, or name tokens that the tokenizer has")]
    return replace(shape, vocab_size=size, raw={**shape.raw, "vocab_size": size})


def with_vocabulary(recipe: Recipe, shape: ModelShape | None) -> Recipe:
    """Return the recipe with the vocabulary enlarged by its added tokens; unchanged if it adds
    none, or if the model's sizes are not known yet."""
    if not recipe.model.add_tokens or shape is None:
        return recipe
    overrides = {**recipe.model.overrides, "vocab_size": shape.vocab_size}
    return recipe.changed(model={"overrides": overrides})


class ExaminedModel(NamedTuple):
    """Facts about a recipe's model, found by building it on the meta device."""

    config: Any
    """The model's config, as transformers reads it."""
    trains: str | None
    """A sentence on what trains; None where the whole model trains."""
    trained: int
    """How many parameters train."""
    parameters: int
    """How many parameters there are in all."""
    active: int
    """How many parameters a token uses: fewer than all in a mixture of experts."""


def must_be_built(recipe: Recipe) -> bool:
    """Tell whether a recipe can only be checked by building the model: it names parts of the model,
    or weights on this machine."""
    model = recipe.model
    names = model.adapter or model.freeze or model.overrides or model.add_tokens
    folder = model.name_or_path if model.config is None else None
    return bool(names or strategies_of(recipe) or (folder and os.path.isdir(folder)))


def examine_model(recipe: Recipe) -> ExaminedModel:
    """Build the model on the meta device, compare it with local weights, and choose what trains.

    Its config must be on this machine. If tensor degrees switch in place, it also checks that ranks
    store the part of each parameter that rows use. Raises Fault or WeightsError.
    """
    # These imports take seconds, which a refused recipe saves.
    from uspft.model.build import (
        choose_trained,
        parameter_count,
        require_fit,
        require_model,
        what_trains,
    )

    file = config_file(recipe.model, CONFIGS)
    assert isinstance(file, Path | dict)  # others were refused before
    place, length = file if isinstance(file, Path) else None, recipe.data.sequence_length
    config, model = require_model(recipe.model, length, place)
    folder = Path(recipe.model.name_or_path or "")
    if recipe.model.config is None and os.path.isdir(folder):
        require_fit(model, folder, grows=bool(recipe.model.add_tokens))
    choose_trained(model, recipe.model, recipe.seed)
    _require_inside(recipe, model)
    return ExaminedModel(
        config,
        what_trains(model, recipe.model),
        trained=parameter_count(model, trained_only=True),
        parameters=parameter_count(model),
        active=parameter_count(model, active_only=True),
    )


def _require_inside(recipe: Recipe, model: Any) -> None:
    """Check that the shards of every strategy are parts of those that ranks store, which are the
    shards of the least tensor degree. Raises Fault.

    Where weights move there is nothing to check, because ranks then store them at each degree;
    strategies on a mesh all have the same mesh.
    """
    every = strategies_of(recipe)
    degrees = {one.model_parallel for one in every}
    if len(degrees) < 2 or recipe.parallel_config.switching == "move":
        return
    from uspft.model.parallel import shards_of
    from uspft.parameters.names import places

    layout, most = Layout(min(degrees)), max(degrees)
    shards = shards_of(model, places(model), layout, splits_tokens=False, tensor_of_rows=most)
    if findings := inside_findings(every, shards):
        raise Fault(findings)


def inside_findings(strategies: Sequence[Strategy], stored: Shards) -> list[Finding]:
    """Return findings on the strategies that use more of a parameter than ranks store.

    stored: the shards of the strategy with the least tensor degree, which divides all others. On a
    mesh only the degree over mesh columns is checked.
    """
    from uspft.parameters.shards import outside

    degrees = [one.model_parallel for one in strategies]
    least, found = degrees.index(stored.layout.tensor), []
    for number, one in enumerate(strategies):
        if name := outside(stored, one.model_parallel // one.mesh_rows):
            what = f"is {one.model_parallel}, and its parts of {name} are not contained in those of"
            there = f"{STRATEGIES}[{least}], {stored.layout.tensor} ways"
            remedy = "write switching: move, or degrees that divide the model's heads"
            key = f"{STRATEGIES}[{number}].model_parallel"
            found.append((key, f"{what} {there}", remedy))
    return found


GENERATION = "generation_config.json"
EOS, PAD = "eos_token_id", "pad_token_id"


def exported_tokenizer(recipe: Recipe) -> str | None:
    """Return the tokenizer's folder, or None where it has no tokenizer to export."""
    folder = tokenizer_of(recipe.model)
    has_one = folder and holds_tokenizer(Path(folder))
    return str(Path(folder).resolve()) if folder and has_one else None


def serving_of(
    recipe: Recipe, formats: Collection[str], config: Any, tokenizer: str | None
) -> Serving:
    """Return the files to export with the trained weights.

    recipe: as this host reads it. formats: of the training data. config: the model's. tokenizer:
    the exported one, which may be missing if samples are token ids; the generation config is then
    the base model's. Raises Fault where that cannot be read.
    """
    place, base = Path(recipe.model.name_or_path or "") / GENERATION, dict[str, Any]()
    try:
        if recipe.model.name_or_path and place.is_file():
            base = dict(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        what = f"{place} cannot be read: {said(error)}"
        raise Fault([("model.name_or_path", what, "mend that file, or delete it")]) from error
    tokens = not set(formats) - {"tokenized"}
    if tokens and tokenizer is None:
        return Serving(None, (), base)
    tokeniser = load_tokeniser(tokenizer or tokenizer_of(recipe.model), recipe.data)
    template = tokeniser.template or None
    source = without_marks(template.source) if template else None
    if tokens:
        return Serving(source, (), base)
    ends = turn_ends(template) if template and "messages" in formats else []
    if recipe.model.name_or_path:
        base = {EOS: config.eos_token_id, "bos_token_id": config.bos_token_id} | base
    own = base.get(EOS)
    numbers = [tokeniser.backend.token_to_id(token) for token in ends]
    numbers += [tokeniser.eos, *(own if isinstance(own, list | tuple) else [own])]
    stops = [number for number in dict.fromkeys(numbers) if number is not None]
    generation = {key: value for key, value in base.items() if value is not None}
    if stops:
        generation[EOS] = stops if len(stops) > 1 else stops[0]
        generation.setdefault(PAD, tokeniser.eos if tokeniser.eos is not None else stops[0])
    return Serving(source, tuple(ends), generation)
