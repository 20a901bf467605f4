"""A model's sizes from its config.json, read without transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from uspft.config.inputs import ModelBlock
from uspft.config.problems import Finding
from uspft.families.by_layer import PER_LAYER, one_form
from uspft.families.multimodal import is_multimodal, language_model, media_tokens
from uspft.families.table import (
    FAMILIES,
    Family,
    chosen_experts,
    rope_of,
    shared_features,
    unsupported,
)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model after model.overrides, and its config as `raw`.

    `rope` always has `rope_type`; `max_positions` is the config's own value. For a multimodal model
    they are those of its language model.
    """

    model_type: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rope: dict[str, Any] | None
    tied: bool
    attention_bias: bool
    raw: dict[str, Any]
    whole_type: str = ""
    """The model_type of the multimodal model, if this is a language model of one; else empty."""
    media: Mapping[str, int] = field(default_factory=dict)
    """The multimodal model's tokens that stand for images, by their config field."""
    seeing_all: tuple[int, int] | None = None
    """(KV heads, head dim) of layers with full attention, if layers with a window have others."""
    keys_are_values: bool = False
    """Whether layers have one projection for both keys and values."""
    borrows_keys: bool = False
    """Whether layers have no key and value projections, and use those of other layers."""

    def of_window(self, window: int | None) -> ModelShape:
        """Return the shape with the heads of layers with this window; None: of full attention."""
        return self.of_each_size[-1] if window is None else self

    @cached_property
    def of_each_size(self) -> tuple[ModelShape, ...]:
        """The shape with each size of heads: one, or two if layers have heads of two sizes."""
        if self.seeing_all is None:
            return (self,)
        kv_heads, dim = self.seeing_all
        alike = bool(self.full.get("attention_k_eq_v"))
        sizes = replace(self, kv_heads=kv_heads, head_dim=dim, seeing_all=None)
        return self, replace(sizes, keys_are_values=alike)

    @cached_property
    def known_blocks(self) -> list[Any]:
        """The result of `layer_blocks` as the only item, or nothing before its first call."""
        return []

    @cached_property
    def borrowing(self) -> ModelShape:
        """The shape with the sizes of layers that use the keys and values of others."""
        wider = 2 if self.full.get("use_double_wide_mlp") else 1
        inner = wider * self.intermediate_size
        return replace(self, borrows_keys=True, intermediate_size=inner)

    @property
    def borrowers(self) -> int:
        """How many of the last layers use the keys and values of others."""
        two_sizes = FAMILIES[self.model_type].two_sizes
        return int(self.full.get("num_kv_shared_layers") or 0) if two_sizes else 0

    @property
    def beside_mlp(self) -> bool:
        """Whether layers have experts in addition to an MLP."""
        return self.routed and "enable_moe_block" in self.full

    @property
    def joined_layers(self) -> str:
        """A phrase on what connects layers so that they cannot be pipeline stages; empty if nothing
        does."""
        if self.borrowers:
            return "layers that use the keys of others"
        return "layers with embeddings of their own" if self.layer_features else ""

    @property
    def layer_features(self) -> int:
        """The features per token of the embedding that each layer has; 0 without one."""
        two_sizes = FAMILIES[self.model_type].two_sizes
        return int(self.full.get("hidden_size_per_layer_input") or 0) if two_sizes else 0

    @property
    def experts(self) -> int:
        """The number of experts in a layer; 1 without routing."""
        return chosen_experts(self.full)[1] if self.routed else 1

    @property
    def met_experts(self) -> int:
        """The number of experts that a token uses; 1 without routing."""
        return chosen_experts(self.full)[0] if self.routed else 1

    @property
    def shared_features(self) -> int:
        """The inner features of the experts that every token uses."""
        return shared_features(self.full) if self.routed else 0

    @property
    def full(self) -> dict[str, Any]:
        """The config with transformers' defaults."""
        return {**FAMILIES[self.model_type].defaults, **self.raw}

    @property
    def routed(self) -> bool:
        """Whether routers choose experts for tokens."""
        return FAMILIES[self.model_type].routed and bool(self.full.get("enable_moe_block", True))

    @property
    def window(self) -> int | None:
        """The sliding window of some layer, in keys; None if all have full attention."""
        family = FAMILIES[self.model_type]
        full = self.full
        asked = {"none": False, "switched": bool(full.get("use_sliding_window"))}
        return full.get("sliding_window") if asked.get(family.windows, True) else None


def read_shape(model: ModelBlock, repo_configs: Path) -> ModelShape | list[Finding] | None:
    """Return the model's shape, or what is wrong; None if its config is not on this machine.

    `repo_configs` is the folder whose models/<org>--<name>.json describes a hub model.
    """
    key = key_of_field(model)
    file = config_file(model, repo_configs)
    if not isinstance(file, Path | dict):
        return file
    raw = _json(file, key) if isinstance(file, Path) else dict(file)
    if isinstance(raw, list):
        return raw
    whole, media = raw["model_type"] if is_multimodal(raw) else "", media_tokens(raw)

    named = partial(key_of_field, model)
    text = language_model(raw)
    family = FAMILIES.get(str(text.get("model_type")), Family())
    raw = {**text, **model.overrides}
    if family.two_sizes:
        settled = one_form(text, model.overrides, family.defaults)
        if isinstance(settled, str):
            what = f"{PER_LAYER} {settled}, which is not available yet"
            remedy = f"write model.overrides.{PER_LAYER}: null, and global_head_dim"
            return [(named(PER_LAYER), what, remedy)]
        raw = settled
    findings = unsupported(raw, named, model.rope_scaling, model.attention)
    if findings:
        return findings
    full = {**family.defaults, **raw}
    said = str(file) if isinstance(file, Path) else key
    sizes, findings = _sizes(full, named, said)
    if findings:
        return findings
    return ModelShape(
        model_type=raw["model_type"],
        **sizes,
        rope=rope_of(raw),
        tied=bool(full.get("tie_word_embeddings", False)),
        attention_bias=family.qkv_bias or bool(full.get("attention_bias", False)),
        raw=raw,
        whole_type=whole,
        media=media,
        seeing_all=_seeing_all(full) if family.two_sizes else None,
        keys_are_values=False,
        borrows_keys=False,
    )


def key_of_field(model: ModelBlock, *fields: str) -> str:
    """Return the recipe key that sets the first of these config fields, or else the key that names
    the model."""
    places = {"model.overrides": model.overrides}
    if isinstance(model.config, dict):
        text = model.config.get("text_config")
        places["model.config"] = model.config
        places["model.config.text_config"] = text if isinstance(text, dict) else {}
    for at, written in places.items():
        for name in fields:
            if name in written:
                return f"{at}.{name}"
    return "model.name_or_path" if model.config is None else "model.config"


def _seeing_all(full: Mapping[str, Any]) -> tuple[int, int]:
    """Return (KV heads, head dim) of layers with full attention."""
    kv_heads = full.get("num_global_key_value_heads") if full.get("attention_k_eq_v") else None
    return int(kv_heads or full["num_key_value_heads"]), int(full["global_head_dim"])


def no_folder(key: str, name: str, near: str | None = None) -> Finding:
    """Return the finding for the name of a model or tokenizer that cannot be a hub id.

    near: the hub model that may be meant.
    """
    what = f"the folder `{name}` does not exist"
    if os.sep not in name:
        what = f"`{name}` is neither a folder here nor org/name of the hub"
    meant = f"; did you mean `{near}`?" if near else ""
    return key, what, f"name a folder, or org/name of the hub{meant}"


def config_file(
    model: ModelBlock, repo_configs: Path
) -> Path | dict[str, Any] | list[Finding] | None:
    """Return the path of the model's config.json, its contents if the recipe has them, or what is
    wrong; None where it is not on this machine."""
    if isinstance(model.config, dict):
        return model.config
    if model.config is not None:
        file = model.config / "config.json" if os.path.isdir(model.config) else model.config
        if os.path.isfile(file):
            return file
        missing = ("model.config", f"`{file}` does not exist", "name a config.json or its folder")
        return _barred(file, "model.config") or [missing]
    name = model.name_or_path or ""
    key = "model.name_or_path"
    folder = Path(name)
    if os.path.isdir(folder):  # Path.is_dir raises where a name is too long
        if os.path.isfile(folder / "config.json"):
            return folder / "config.json"
        what = f"the folder `{name}` has no config.json"
        missing = (key, what, "name a Hugging Face folder")
        return _barred(folder / "config.json", key) or [missing]
    if os.path.isfile(folder):
        return [(key, f"`{name}` is a file", "name its folder, or write it as model.config")]
    models = repo_configs / "models"
    if not HUB_ID.fullmatch(name):
        return _barred(folder, key) or [no_folder(key, name, _near(name, models))]
    known = models / f"{name.replace('/', '--')}.json"
    return known if known.is_file() else None


def _barred(place: Path, key: str) -> list[Finding]:
    """Return a finding where this user has no permission to look at a path, so that it may
    exist."""
    try:
        os.stat(place)
    except PermissionError as error:
        what = f"`{place}` cannot be read: {error.strerror}"
        return [(key, what, "let this user read it, or name another")]
    except OSError:  # it does not exist, or the name is invalid
        pass
    return []


def _near(name: str, models: Path) -> str | None:
    """Return the hub model with a config in the folder `models` whose name is closest to one
    without organisation; None if none is close."""
    known = {}
    for file in sorted(models.glob("*--*.json")):
        organisation, _, own = file.stem.partition("--")
        known[own.lower()] = f"{organisation}/{own}"
    near = get_close_matches(name.lower(), known, 1, 0.75)
    return known[near[0]] if near else None


def _json(file: Path, key: str) -> dict[str, Any] | list[Finding]:
    try:
        raw = json.loads(file.read_text("utf-8"))
    except json.JSONDecodeError as error:
        what = f"{file}:{error.lineno}: is not JSON: {error.msg}"
        return [(key, what, "mend the file, or name another")]
    except (OSError, ValueError, RecursionError) as error:
        return [(key, f"{file}:1: cannot be read: {error}", "mend the file, or name another")]
    if not isinstance(raw, dict):
        return [(key, f"{file}:1: is not a JSON object", "name a model's config.json")]
    return raw


def _sizes(raw: dict[str, Any], named: Any, file: str) -> tuple[dict[str, int], list[Finding]]:
    fields = {
        "hidden_size": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "intermediate_size": "intermediate_size",
        "vocab_size": "vocab_size",
        "max_positions": "max_position_embeddings",
    }
    filled = dict(raw)
    heads, hidden = raw.get("num_attention_heads"), raw.get("hidden_size")
    if filled.get("num_key_value_heads") is None:
        filled["num_key_value_heads"] = heads
    if "intermediate_size" not in raw and FAMILIES[raw["model_type"]].routed:
        filled["intermediate_size"] = raw.get("moe_intermediate_size")  # every layer has experts
    derived = filled.get("head_dim") is None
    if derived and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        usual = FAMILIES[raw["model_type"]].defaults.get("head_dim")
        filled["head_dim"] = usual or max(hidden // heads, 1)
    sizes: dict[str, int] = {}
    findings: list[Finding] = []
    for name, key in fields.items():
        value = filled.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            sizes[name] = value
        elif not (name in ("kv_heads", "head_dim") and raw.get(key) is None):
            what, at = f"is {value!r}, not a whole number of at least 1", named(key)
            if at.endswith(f".{key}"):
                findings.append((at, what, "write another"))
            else:
                remedy = f"write model.overrides.{key}"
                findings.append((at, f"`{key}` of {file} {what}", remedy))
    if findings:
        return sizes, findings
    if sizes["heads"] % sizes["kv_heads"]:
        heads, kv_heads = sizes["heads"], sizes["kv_heads"]
        what = f"{heads} attention heads are not a multiple of {kv_heads} key-value heads"
        findings.append(
            (
                named("num_key_value_heads", "num_attention_heads"),
                what,
                "write a divisor of the heads",
            )
        )
    whole = FAMILIES[raw["model_type"]].whole_heads
    if whole and sizes["hidden_size"] % sizes["heads"]:
        what = f"hidden_size {sizes['hidden_size']} is not a multiple of {sizes['heads']} heads"
        findings.append(
            (named("hidden_size", "num_attention_heads"), what, "write a multiple of the heads")
        )
    elif sizes["head_dim"] % 2:
        what = f"head_dim {sizes['head_dim']} is odd, and rotary positions turn pairs"
        findings.append((named("head_dim"), what, "write an even number"))
    return sizes, findings
