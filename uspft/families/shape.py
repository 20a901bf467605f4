"""A model's sizes from its config.json, read without transformers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from uspft.config.problems import Finding
from uspft.config.recipe import ModelBlock
from uspft.families.multimodal import is_multimodal, language_model, media_tokens
from uspft.families.table import EXPERTS, FAMILIES, MET, rope_of, shared_features, unsupported

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model after model.overrides, and its config as it stands in `raw`.

    `rope` always has `rope_type`; `max_positions` is what the config itself says. Of a multimodal
    model they are those of its language model.
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
    """The model_type of the multimodal model whose language model it is; empty for another."""
    media: Mapping[str, int] = field(default_factory=dict)
    """Tokens at whose places that model has no text, by their fields of its config."""

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 1 where tokens do not choose among any."""
        return self._of_experts(EXPERTS)

    @property
    def met_experts(self) -> int:
        """The number of experts that a token meets; 1 where it does not choose."""
        return self._of_experts(MET)

    @property
    def shared_features(self) -> int:
        """The inner features of the experts that every token meets."""
        return shared_features(self.full) if FAMILIES[self.model_type].routed else 0

    @property
    def full(self) -> dict[str, Any]:
        """The config, with what transformers takes where the file has no such field."""
        return {**FAMILIES[self.model_type].defaults, **self.raw}

    def _of_experts(self, names: tuple[str, ...]) -> int:
        found = [self.full[name] for name in names if self.full.get(name)]
        return int(found[0]) if found and FAMILIES[self.model_type].routed else 1

    @property
    def window(self) -> int | None:
        """The sliding window of some layer, in keys; None where all see all."""
        family = FAMILIES[self.model_type]
        full = self.full
        asked = {"none": False, "switched": bool(full.get("use_sliding_window"))}
        return full.get("sliding_window") if asked.get(family.windows, True) else None


def read_shape(model: ModelBlock, repo_configs: Path) -> ModelShape | list[Finding] | None:
    """Return the model's shape, or what is wrong; None where nothing on this machine says it.

    `repo_configs` is the folder whose models/<org>--<name>.json describes a hub model.
    """
    key = "model.name_or_path" if model.config is None else "model.config"
    file = config_file(model, repo_configs)
    if not isinstance(file, Path | dict):
        return file
    raw = _json(file, key) if isinstance(file, Path) else dict(file)
    if isinstance(raw, list):
        return raw
    whole, media = raw["model_type"] if is_multimodal(raw) else "", media_tokens(raw)
    raw = {**language_model(raw), **model.overrides}

    def named(field: str) -> str:
        return f"model.overrides.{field}" if field in model.overrides else key

    findings = unsupported(raw, named, model.rope_scaling, model.attention)
    if findings:
        return findings
    family = FAMILIES[raw["model_type"]]
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
    )


def no_folder(key: str, name: str, near: str | None = None) -> Finding:
    """Return what is wrong with the name of a model or tokenizer that no hub id could be.

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
    """Return the model's config.json, its contents where the recipe has them, or what is wrong;
    None where it is not on this machine."""
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
    """Return a finding where this user may not look at a place, so that it may be there."""
    try:
        os.stat(place)
    except PermissionError as error:
        what = f"`{place}` cannot be read: {error.strerror}"
        return [(key, what, "let this user read it, or name another")]
    except OSError:  # it is not there, or nothing can have such a name
        pass
    return []


def _near(name: str, models: Path) -> str | None:
    """Return the hub model with a config in the folder `models` that a name without organisation
    is most like; None where it is like none."""
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
        filled["intermediate_size"] = raw.get("moe_intermediate_size")  # each layer has experts
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
            what = f"`{key}` of {file} is {value!r}, not a whole number of at least 1"
            findings.append((named(key), what, f"write model.overrides.{key}"))
    if findings:
        return sizes, findings
    if sizes["heads"] % sizes["kv_heads"]:
        heads, kv_heads = sizes["heads"], sizes["kv_heads"]
        what = f"{heads} attention heads are not a multiple of {kv_heads} key-value heads"
        findings.append((named("num_key_value_heads"), what, "write a divisor of the heads"))
    whole = FAMILIES[raw["model_type"]].whole_heads
    if whole and sizes["hidden_size"] % sizes["heads"]:
        what = f"hidden_size {sizes['hidden_size']} is not a multiple of {sizes['heads']} heads"
        findings.append((named("hidden_size"), what, "write a multiple of the heads"))
    elif sizes["head_dim"] % 2:
        what = f"head_dim {sizes['head_dim']} is odd, and rotary positions turn pairs"
        findings.append((named("head_dim"), what, "write an even number"))
    return sizes, findings
