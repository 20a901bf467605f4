"""The settings and contents that a resumed run must share with the run whose checkpoint it
resumes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from uspft.config import as_tree
from uspft.config.algorithms import AUTO

if TYPE_CHECKING:
    from uspft.config import Recipe

LOOSE = {
    "model.attention",
    "data.workers",
    "data.cache_dir",
    "data.eval",
    "data.eval_fraction",
    "data.format",
    "data.fields",
    "data.on_bad_sample",
    "data.unused_fields",
    "data.train",
    "data.chat_template",
    "data.prompt_template",
}
"""Keys that are not compared: they do not change what is learned, or their effect shows in
`CONTENTS`."""

CONTENTS = "data.train (contents)"
"""The key for a hash of the data's tokens, which does not depend on the data's location."""
EVALUATION = "data.eval (contents)"
"""The key for the hashes of the evaluation sets' tokens. It is compared only where a run
chooses the best evaluation, so that the losses to choose from are of the same data."""
BASE = "the base model (contents)"
"""The key for the digest of the base model, which does not depend on its location."""
BATCH = "training.global_batch_size"
PLACES = {"model.name_or_path", "model.config", "model.tokenizer"}
"""Keys that the export needs but that are not compared: their contents show in `BASE` and
`CONTENTS`."""
SHOWN = 80


def identity_of(recipe: Recipe) -> dict[str, Any]:
    """Return by key what determines a run's result: model, data, seed, batch and optimizer.

    Values have the types of JSON. The contents of the data, `CONTENTS`, and of the model, `BASE`,
    are added once they are known.
    """
    tree = json.loads(json.dumps(as_tree(recipe)))
    found = {"seed": tree["seed"]}
    for block in ("model", "data", "optimizer"):
        found |= {f"{block}.{key}": value for key, value in tree[block].items()}
    # With strategies the batch size counts samples, so that the data would continue elsewhere.
    strategies = tree["parallel_config"].get("strategies")
    batch = tree["training"]["global_batch_size"]
    if strategies != AUTO:  # otherwise it is not chosen yet
        found[BATCH] = batch if strategies is None else f"{batch} samples"
    if not tree["model"]["add_tokens"]:  # as in checkpoints from before this key existed
        del found["model.add_tokens"]
    found["training.max_grad_norm"] = tree["training"]["max_grad_norm"]
    return {key: value for key, value in found.items() if key not in LOOSE}


def counts_samples(identity: dict[str, Any]) -> bool:
    """Return whether a step of the run counts samples, because it has several layouts."""
    return isinstance(identity[BATCH], str)


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return (key, what is wrong, remedy) for each value of `new` that differs from `old`'s."""
    anew = "or checkpoint.resume=never, which trains anew"  # another folder may resume this one
    found = []
    for key, value in new.items():
        if key == CONTENTS and old.get(key) != value:
            what = "gives other tokens than the checkpoint was trained on"
            back = "put files, keys of `data`, tokenizer and versions (uspft's too) back"
            found.append(("data.train", what, f"{back}, {anew}"))
        elif key == EVALUATION and old.get(key, value) != value:
            what = "gives other tokens than earlier evaluations, whose losses choose the best one"
            remedy = f"checkpoint.keep_best false and training.patience null, {anew}"
            found.append(
                ("data.eval", what, f"put files and keys of `data` back, or write {remedy}")
            )
        elif key == BASE and old.get(key, value) != value:
            place = "model.config" if new.get("model.config") else "model.name_or_path"
            what = "is another model than the checkpoint was trained on"
            found.append((place, what, f"put its files back, {anew}"))
        elif key == BATCH and counts_samples(old) != counts_samples(new):
            kinds = ("rows", "samples, as with parallel_config.strategies")
            one, other = (kinds[counts_samples(identity)] for identity in (new, old))
            remedy = "write strategies" if counts_samples(old) else "leave strategies out"
            what = f"counts {one}, and in the checkpoint's run it counts {other}"
            found.append((key, what, f"{remedy}, {anew}"))
        elif key not in {BASE, EVALUATION, *PLACES} and old.get(key) != value:
            what = f"is {_shown(value)}, and the checkpoint was trained with {_shown(old.get(key))}"
            found.append((key, what, f"write that value, {anew}"))
    return found


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
