"""What a run's export has beside weights, config and tokenizer, found out before ranks start."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from uspft.config import Fault, Recipe
from uspft.config.problems import said
from uspft.data import turn_ends, without_marks
from uspft.data.corpus.tokenise import load_tokeniser
from uspft.job import Serving
from uspft.prepare.data import tokenizer_of

GENERATION = "generation_config.json"
EOS, PAD = "eos_token_id", "pad_token_id"


def serving_of(
    recipe: Recipe, formats: Collection[str], config: Any, tokenizer: str | None
) -> Serving:
    """Return what lies beside the trained weights.

    recipe: as this host reads it. formats: of the training data. config: the model's. tokenizer:
    the one that is exported, which need not be there where samples hold tokens; their generation
    config is the base model's own. Raises Fault where that cannot be read.
    """
    base, tokens = _generation(recipe), not set(formats) - {"tokenized"}
    if tokens and tokenizer is None:
        return Serving(None, (), base)
    tokeniser = load_tokeniser(tokenizer or tokenizer_of(recipe), recipe.data)
    template = tokeniser.template or None
    if tokens:
        return Serving(without_marks(template.source) if template else None, (), base)
    ends = turn_ends(template) if template and "messages" in formats else []
    if recipe.model.name_or_path:
        base = {EOS: config.eos_token_id, "bos_token_id": config.bos_token_id} | base
    numbers = [tokeniser.backend.token_to_id(token) for token in ends]
    stops = _once([*numbers, tokeniser.eos, *_listed(base.get(EOS))])
    generation = {key: value for key, value in base.items() if value is not None}
    if stops:
        generation[EOS] = stops if len(stops) > 1 else stops[0]
        generation.setdefault(PAD, tokeniser.eos if tokeniser.eos is not None else stops[0])
    source = without_marks(template.source) if template else None
    return Serving(source, tuple(ends), generation)


def _generation(recipe: Recipe) -> dict[str, Any]:
    """Return the base model's generation config, empty where it has none. Raises Fault."""
    place = Path(recipe.model.name_or_path or "") / GENERATION
    if not (recipe.model.name_or_path and place.is_file()):
        return {}
    try:
        return dict(json.loads(place.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        what = f"{place} cannot be read: {said(error)}"
        raise Fault([("model.name_or_path", what, "mend that file, or delete it")]) from error


def _listed(value: Any) -> list[int]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _once(numbers: Sequence[int | None]) -> list[int]:
    return [number for number in dict.fromkeys(numbers) if number is not None]
