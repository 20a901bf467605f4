"""What uspft counts on in transformers, at both ends of the supported range; fails when it changes.

`bash tests/run.sh` runs this with the installed version and with the newest that is supported.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, masking_utils
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.models import make_model
from uspft.commands.arguments import require_versions
from uspft.config import InputError
from uspft.families.mixers import MIXERS
from uspft.families.multimodal import MULTIMODAL
from uspft.families.table import FAMILIES, REFUSED
from uspft.model.attention import NAME
from uspft.model.linear import bind_linear_layers
from uspft.sequence import Rule
from uspft.sequence.states import Mixed

ROOT = Path(__file__).parents[3]


def branches(module: Any) -> Iterator[str]:
    """Every place in a module that reads the attention's name, as source, less the look-up of the
    attention function by that name."""
    tree = ast.parse(inspect.getsource(module))
    looked_up = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "get_interface" in ast.unparse(node.func)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "_attn_implementation":
            if id(node) not in looked_up:
                yield ast.unparse(node)
        elif isinstance(node, ast.Name) and "flash" in node.id.lower():
            yield node.id
        elif isinstance(node, ast.Constant) and str(node.value).startswith("flash"):
            yield str(node.value)


def modeling(kind: str) -> Any:
    name = kind.removesuffix("_text")
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


@pytest.mark.parametrize("kind", FAMILIES)
def test_no_family_branches_on_the_name_of_its_attention(kind: str) -> None:
    """Padding-free arguments and float32 casts belong to transformers' own flash functions."""
    harmless = {"FlashAttentionKwargs", "_supports_flash_attn"}  # a type and a flag, not read here
    # Of which flash kernels gpt-oss may be asked for; uspft asks for none.
    harmless |= {"_compatible_flash_implementations", "flash_attention_4"}
    if kind.startswith("qwen3_5"):  # its vision tower asks
        harmless |= {"is_flash_attention_requested"}
    if kind == "gemma4_text":  # whether queries that nobody generates from may be left out
        harmless |= {"is_flash_attention_requested", "self.config._attn_implementation"}
    assert set(branches(modeling(kind))) <= harmless


def test_a_branch_would_be_found() -> None:
    found = set(branches(importlib.import_module("transformers.masking_utils")))
    assert "config._attn_implementation" in found and "flash_attention_2" in found


def test_no_mask_is_made_for_a_name_without_a_mask_function() -> None:
    assert NAME not in masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert NAME in transformers.AttentionInterface.valid_keys(transformers.AttentionInterface())


class Seen:
    """Stands for what a forward call binds; remembers the types it was asked for."""

    def __init__(self, softcap: float | None) -> None:
        self.softcap, self.types = softcap, list[set[torch.dtype]]()

    def attend(self, layer: int, qkv: tuple[torch.Tensor, ...], rule: Rule) -> torch.Tensor:
        self.types.append({x.dtype for x in qkv})
        return torch.zeros_like(qkv[0])

    def of_layer(self, layer: int) -> Seen:
        return self

    def convolve(self, x: torch.Tensor, taps: int, convolution: Any) -> torch.Tensor:
        found: torch.Tensor = convolution(x)
        return found

    def mix(self, x: Mixed, rule: Any) -> torch.Tensor:
        self.types.append({x.q.dtype, x.k.dtype, x.v.dtype})
        return torch.zeros_like(x.v)


SIGNS = {
    "state-space layers": r"A_log|selective_scan",
    "linear attention": r"delta_rule|kda|LightningAttention",
    "short convolutions": r"conv_state|nn\.Conv1d",
    "recurrent layers": r"recurrent_gate|wkv|mlstm",
    "attention in chunks": r"create_chunked_causal_mask",
    "attention to keys that an indexer picks": r"Indexer\b",
}
"""How the source of a model that has it shows it."""
STATE = r"(conv|recurrent|ssm)_state|selective_scan|wkv|mlstm|LightningAttention"


def sources() -> dict[str, str]:
    """By model_type what the modeling files of its folder say."""
    found = {}
    for folder in (Path(transformers.__file__).parent / "models").iterdir():
        configs, models = (
            "".join(f.read_text("utf-8") for f in folder.glob(f"{part}_*.py"))
            for part in ("configuration", "modeling")
        )
        for kind in re.findall(r'^    model_type = "(\w+)"', configs, re.MULTILINE):
            found[kind] = models
    return found


def test_what_is_said_of_models_without_plain_attention_is_true_of_them() -> None:
    said = {kind: what for what, mixer in MIXERS.items() for kind in mixer.models}
    source = sources()
    here = said.keys() & source.keys()
    assert len(here) > 30
    assert SIGNS.keys() == set(said.values())
    for kind in here:
        assert re.search(SIGNS[said[kind]], source[kind]), (kind, said[kind])
    signs = "|".join([STATE, *(SIGNS[what] for what in list(SIGNS)[-2:])])
    shows = {
        kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if re.search(signs, source.get(kind, ""))
    }
    known = said.keys() | REFUSED.keys() | FAMILIES.keys() | MULTIMODAL.keys()
    assert len(shows) > 30 and shows <= known, "name those without a reason"
    assert {kind for kind in FAMILIES if re.search(signs, source[kind])} == {
        kind for kind, family in FAMILIES.items() if family.states
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_attention_is_asked_in_the_models_own_type(kind: str, tmp_path: Path) -> None:
    """Norms and rotary positions work in float32; what reaches attention is cast back."""
    net = AutoModelForCausalLM.from_pretrained(
        make_model(tmp_path, kind, kv_heads=2), dtype=torch.bfloat16, attn_implementation=NAME
    )
    bind_linear_layers(net)
    seen = Seen(getattr(net.config, "attn_logit_softcapping", None))
    ids = torch.arange(6)[None]
    net.train().base_model(input_ids=ids, position_ids=ids, use_cache=False, uspft=seen)
    assert seen.types == [{torch.bfloat16}] * net.config.num_hidden_layers


def stated(_: str = "uspft") -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: list[str] = project["dependencies"]
    return [*found, "flash-attn>=99 ; extra == 'flash'"]


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        ("5.23.0", True),
        ("5.24.9", True),
        ("5.22.9", False),
        ("5.25.0", False),
        ("4.57.6", False),
        (None, False),
    ],
)
def test_another_version_is_refused_by_name(found: str | None, fits: bool) -> None:
    def installed(name: str) -> str:
        if name != "transformers":
            return version(name)
        if found is None:
            raise PackageNotFoundError
        return found

    if fits:
        require_versions(stated, installed)
        return
    with pytest.raises(InputError) as caught:
        require_versions(stated, installed)
    (line,) = str(caught.value).splitlines()
    assert line.startswith("transformers: is ") and (found or "not installed") in line
    assert "pip install 'transformers<5.25,>=5.23'" in line


def test_both_ends_are_those_that_the_readme_names() -> None:
    ends = [text for text in stated() if text.startswith("transformers")]
    assert ends == ["transformers>=5.23,<5.25"]
    assert "5.23 and 5.24" in (ROOT / "uspft/model/README.md").read_text()
    require_versions(stated)


def test_where_uspft_is_not_installed_the_file_beside_it_counts() -> None:
    def nowhere(name: str) -> list[str]:
        raise PackageNotFoundError

    require_versions(nowhere)
    with pytest.raises(InputError, match=r"transformers: is 5\.19"):
        require_versions(nowhere, lambda name: "5.19" if name == "transformers" else version(name))
