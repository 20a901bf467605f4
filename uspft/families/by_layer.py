"""Gemma 4's attention heads of two sizes (layers with and without a sliding window), and the
conversion of its config to one form.

transformers writes the sizes as `per_layer_config`, older files as `global_head_dim` and
`num_global_key_value_heads`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from uspft.config.problems import Finding

PER_LAYER = "per_layer_config"
FIELDS = (
    *("num_hidden_layers", "layer_types", "head_dim", "global_head_dim", PER_LAYER),
    *("num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v"),
)
"""The fields that transformers reads only when it creates a config."""
_FULL, _WINDOWED = "full_attention", "sliding_attention"
_EVERY = 6
"""In a config without layer types, every sixth layer has full attention."""


def one_form(
    raw: Mapping[str, Any], overrides: Mapping[str, Any], usual: Mapping[str, Any]
) -> dict[str, Any] | str:
    """Return a config that gives the sizes of layers by their types only, or a phrase on what in it
    does not fit that form.

    raw: as in the file. overrides: these take precedence. usual: transformers' defaults.
    """
    file = {**usual, **raw}
    given = overrides.get(PER_LAYER, raw.get(PER_LAYER))
    found = {**raw, **overrides}
    found.pop(PER_LAYER, None)
    if given is not None and _counts(file):
        try:
            of_full = _sizes_of_full(given, file)
        except (AttributeError, TypeError, ValueError) as error:
            return str(error)
        kv_heads = of_full.get("num_key_value_heads")
        sizes = {"global_head_dim": of_full.get("head_dim", file["head_dim"])}
        found = {**sizes, "num_global_key_value_heads": kv_heads} | found
    if _counts({**usual, **found}):
        found["layer_types"] = layer_types({**usual, **found})
    return found


def _counts(full: Mapping[str, Any]) -> bool:
    """Tell whether the number of layers is valid; other values are refused elsewhere."""
    return isinstance(full["num_hidden_layers"], int) and full["num_hidden_layers"] >= 1


def _sizes_of_full(given: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a `per_layer_config` gives to layers with full attention. Raises
    ValueError for other content."""
    types = layer_types(full)
    said = {int(key): dict(value) for key, value in given.items()}
    if more := {key for one in said.values() for key in one} - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"has {', '.join(sorted(more))}")
    of_full = [said.get(number, {}) for number, one in enumerate(types) if one == _FULL]
    others = said.keys() - {number for number, one in enumerate(types) if one == _FULL}
    if any(said[number] for number in others) or any(one != of_full[-1] for one in of_full):
        raise ValueError("has other sizes than one for all layers that see all")
    usual = full["num_key_value_heads"]
    if not full.get("attention_k_eq_v") and of_full[-1].get("num_key_value_heads", usual) != usual:
        raise ValueError("has other KV heads beside attention_k_eq_v: false")
    return of_full[-1]


def layer_types(full: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer; the last always has full attention."""
    layers = int(full["num_hidden_layers"])
    every = [_FULL if (n + 1) % _EVERY == 0 else _WINDOWED for n in range(layers)]
    given = list(full.get("layer_types") or every)[:layers]
    given += given[-1:] * (layers - len(given))
    return [*given[:-1], _FULL]


def wrong_sizes(full: Mapping[str, Any], named: Callable[[str], str]) -> list[Finding]:
    """Return what is wrong with the sizes of layers with full attention, and with shared keys and
    values.

    full: the config in one form, with transformers' defaults.
    """
    findings = list[Finding]()

    def wrong(key: str, what: str, remedy: str = "") -> None:
        findings.append((named(key), what, remedy or f"write model.overrides.{key}"))

    heads = full.get("num_attention_heads")
    for key in ("global_head_dim", "num_global_key_value_heads"):
        value = full.get(key)
        if value is None and key != "global_head_dim":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            wrong(key, f"{key} is {value!r}, not a whole number of at least 1")
        elif key == "global_head_dim" and value % 2:
            wrong(key, f"{key} {value} is odd, and rotary positions turn pairs")
        elif key != "global_head_dim" and isinstance(heads, int) and heads % value:
            wrong(key, f"{heads} attention heads are not a multiple of {value} key-value heads")
    words, every = full["vocab_size_per_layer_input"], full.get("vocab_size")
    shared, own = full.get("num_kv_shared_layers"), full["hidden_size_per_layer_input"]
    if own and isinstance(every, int) and words < every:
        key = "vocab_size_per_layer_input"
        wrong(key, f"{key} is {words}, less than vocab_size {every}", f"write at least {every}")
    if shared and not own:
        what = f"num_kv_shared_layers is {shared}, and hidden_size_per_layer_input 0, with which "
        what += "transformers runs no layers that use the keys of others"
        remedy = "write model.overrides.num_kv_shared_layers: 0"
        wrong("num_kv_shared_layers", what, remedy)
    return findings
