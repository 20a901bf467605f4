"""The command `check`: it tells all that is known before a process starts, and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from uspft.config import Fault
from uspft.data import first_look
from uspft.launcher import planned_hosts
from uspft.metrics import as_size
from uspft.prepare.data import tokenizer_here
from uspft.prepare.examine import examine
from uspft.prepare.files import not_writable
from uspft.prepare.invocation import Invocation
from uspft.prepare.model import examine_model
from uspft.prepare.output import output_of
from uspft.prepare.space import space_free, space_needed
from uspft.prepare.waste import wasted
from uspft.prepare.weigh_strategies import weighed_here

CACHE = "data.cache_dir"
SHOWN_FILES = 10
"""How many files of data are told."""


def check(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Print what the recipe means here, and what could not be looked at. Raises RecipeError."""
    environment = place.environment
    found = examine(
        target, overrides, planned_hosts(environment), place.ranks, environment=environment
    )
    recipe, shape = found.recipe, found.shape
    with found.placed():
        if recipe.data.cache_dir is None and (wrong := not_writable(CACHE, place.cache)):
            raise Fault([wrong])
    examined, model = None, recipe.model
    asks = [f"model.{key}" for key in ("adapter", "freeze", "overrides") if getattr(model, key)]
    here = model.config or os.path.isdir(model.name_or_path or "")
    if shape and (here or asks):
        with found.placed():
            examined = examine_model(recipe)
    elif asks:
        found.not_checked.append(f"the names in {', '.join(asks)} (no config of the model here)")
    vocabulary = shape.vocab_size if shape else None
    with found.placed(), tokenizer_here(recipe) as tokenizer:
        look = first_look(recipe.data, tokenizer, vocabulary)
        found.not_checked.extend(look.left_out)
        if shape and found.is_open:
            found = weighed_here(found, place, look.lengths)
            recipe = found.recipe
    print(f"{target}: no problem found")
    for line in look.shapes[:SHOWN_FILES]:
        print(f"data: {line}")
    if len(look.shapes) > SHOWN_FILES:
        print(f"data: ... and {len(look.shapes) - SHOWN_FILES:,} more files")
    print("\n".join(found.settled))
    for line in wasted(found):
        print(f"warning: {line}")
    if shape:
        print(
            f"model: {shape.model_type}, {shape.layers} layers × {shape.hidden_size}, "
            f"{shape.heads} query and {shape.kv_heads} KV heads, vocabulary {shape.vocab_size}"
        )
    if found.memory:
        print(f"memory: {found.memory}")
    if examined and examined.trains:
        print(f"trains: {examined.trains}")
    if examined:
        steps = recipe.training.steps
        needed = space_needed(recipe, examined.trained, examined.parameters, steps)
        output = output_of(recipe)
        print(f"disk: writes {as_size(needed)}; {as_size(space_free(output))} free in {output}")
    sets = [source.title for source in recipe.data.eval or ()]
    if recipe.data.eval_fraction:
        sets = [f"{recipe.data.eval_fraction:.2%} of data.train, held out"]
    if sets:
        every = recipe.training.eval_every_steps
        often = f"after every {every} step{'s' * (every != 1)} and " if every else ""
        print(f"evaluation: {', '.join(sets)}, {often}at the end")
    if found.is_open:
        found.not_checked.append("strategies (lengths are known after preprocess, or to a run)")
    for thing in found.not_checked:
        print(f"not checked: {thing}")
    return 0
