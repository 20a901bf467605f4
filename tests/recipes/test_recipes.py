"""Every recipe passes `check`, every fragment is used, every model's shape counts as published."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from accelerate import init_empty_weights
from transformers import AutoConfig

from tests.support.forked import Forked
from tests.support.hangs import HANG_SECONDS
from uspft.config import Recipe, load
from uspft.config.inputs import ModelBlock
from uspft.families import ModelShape, read_shape
from uspft.families.multimodal import loading_class
from uspft.prepare.host import CONFIGS

ROOT = Path(__file__).parents[2]
RECIPES = sorted(path.name for path in (ROOT / "recipes").iterdir())
FRAGMENTS = sorted(
    path.relative_to(ROOT / "configs").as_posix()
    for room in ("zero", "parallel")
    for path in (ROOT / "configs" / room).iterdir()
)
MODELS = sorted(path.name for path in (ROOT / "configs/models").iterdir())
BUILT_FOR = re.compile(r"(?P<model>.+)-(?P<task>[a-z]+)-(?P<layout>[a-z]+)-(?P<length>\d+[km])")
LAYOUTS = {
    "whole": 1,
    "ulysses": "ulysses_cp",
    "ring": "ring_cp",
    "hybrid": "hybrid_cp",
    "planned": "planned_cp",
    "tensor": "megatron",
    "mesh": "meshslice",
    "switching": "strategies",
    "pipeline": "stages",
}
QUICKSTART = "quickstart.yaml"


@dataclass(frozen=True)
class Wanted:
    """The processes a recipe is for, and what `check` prints of its layout."""

    ranks: int
    layout: str


# What each recipe is: written here a second time, by hand.
WANTED = {
    QUICKSTART: Wanted(4, "each row shared by 4 (Ulysses 2 × ring 2), 1 row at a time; ZeRO-3"),
    "llama3.1-8b-text-hybrid-128k.yaml": Wanted(
        8, "each row shared by 8 (Ulysses 4 × ring 2), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "llama3.1-8b-text-hybrid-128k-16gpu.yaml": Wanted(
        16, "each row shared by 16 (Ulysses 8 × ring 2), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "llama3.1-8b-text-ulysses-64k.yaml": Wanted(
        2, "each row shared by 2 (Ulysses), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "llama3.1-8b-text-whole-1m.yaml": Wanted(
        1, "each row whole on one process, 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "llama3.1-8b-text-ring-8m.yaml": Wanted(
        8, "each row shared by 8 (zigzag ring), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "llama3.1-8b-text-ring-32m-32gpu.yaml": Wanted(
        32,
        "each row shared by 32 (zigzag ring), 1 row at a time; ZeRO-3, bfloat16 on cuda",
    ),
    "llama3.1-70b-lora-tensor-32k.yaml": Wanted(
        8,
        "each matrix split over 8 (tensor 8), each row whole on each of them, 1 row at a time; "
        "ZeRO-1, bfloat16 on cuda",
    ),
    "llama3.1-70b-lora-mesh-32k.yaml": Wanted(
        8,
        "each matrix split over 8 (mesh 4 × 2), each row shared by 4 (exchange), 1 row at a time; "
        "ZeRO-1, bfloat16 on cuda",
    ),
    "llama3.1-70b-text-tensor-128k-64gpu.yaml": Wanted(
        64,
        "each matrix split over 8 (tensor 8), each row shared by 8 (zigzag ring), 1 row at a time; "
        "ZeRO-3, bfloat16 on cuda",
    ),
    "llama3.1-70b-text-pipeline-8k-64gpu.yaml": Wanted(
        64,
        "each matrix split over 8 (tensor 8), each row whole on each of them, layers in 8 stages, "
        "1 row at a time; ZeRO-1, bfloat16 on cuda",
    ),
    "qwen2.5-32b-lora-planned-32k.yaml": Wanted(
        8, "each row shared by 8 (exchange), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen2.5-7b-chat-switching-32k.yaml": Wanted(
        8, "each row shared by 4 (Ulysses), 2 rows at a time; ZeRO-2, bfloat16 on cuda"
    ),
    "qwen2.5-7b-chat-ulysses-32k.yaml": Wanted(
        8, "each row shared by 4 (Ulysses), 2 rows at a time; ZeRO-2, bfloat16 on cuda"
    ),
    "qwen3-8b-text-ring-64k.yaml": Wanted(
        8, "each row shared by 8 (zigzag ring), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen3.5-9b-text-planned-128k.yaml": Wanted(
        8, "each row shared by 8 (exchange), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen3.5-9b-lora-whole-32k.yaml": Wanted(
        1, "each row whole on one process, 1 row at a time; ZeRO-1, bfloat16 on cuda"
    ),
    "qwen3-next-80b-a3b-text-hybrid-128k-64gpu.yaml": Wanted(
        64, "each row shared by 8 (Ulysses 2 × ring 4), 8 rows at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen3-30b-a3b-lora-ulysses-32k.yaml": Wanted(
        8, "each row shared by 2 (Ulysses), 4 rows at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen3-30b-a3b-text-hybrid-128k-64gpu.yaml": Wanted(
        64, "each row shared by 8 (Ulysses 4 × ring 2), 8 rows at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "mixtral-8x7b-v0.1-text-ulysses-32k-16gpu.yaml": Wanted(
        16, "each row shared by 8 (Ulysses), 2 rows at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "gpt-oss-20b-text-ulysses-64k.yaml": Wanted(
        8, "each row shared by 4 (Ulysses), 2 rows at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "gemma3-12b-chat-ulysses-32k.yaml": Wanted(
        8, "each row shared by 8 (Ulysses), 1 row at a time; ZeRO-3, bfloat16 on cuda"
    ),
    "qwen3-0.6b-chat-whole-8k.yaml": Wanted(
        1, "each row whole on one process, 1 row at a time; ZeRO-1, bfloat16 on cuda"
    ),
}
FOR_GPUS = sorted(set(WANTED) - {QUICKSTART})

# As the models' publishers count them (safetensors on the hub, tied embeddings once), but for
# those of Qwen3.5, Qwen3-Next, GLM-4.5 and ERNIE 4.5, which are transformers' count of the config:
# without what predicts several tokens.
PARAMETERS = {
    "Qwen--Qwen3-30B-A3B.json": 30_532_122_624,
    "mistralai--Mixtral-8x7B-v0.1.json": 46_702_792_704,
    "openai--gpt-oss-20b.json": 20_914_757_184,
    "zai-org--GLM-4.5-Air.json": 106_852_245_504,
    "baidu--ERNIE-4.5-21B-A3B-PT.json": 21_825_437_888,
    "Qwen--Qwen3.5-9B.json": 9_409_813_744,
    "Qwen--Qwen3-Next-80B-A3B-Instruct.json": 79_674_391_296,
    "google--gemma-3-12b-it.json": 12_187_325_040,
    "Qwen--Qwen2.5-0.5B.json": 494_032_768,
    "Qwen--Qwen2.5-1.5B.json": 1_543_714_304,
    "Qwen--Qwen2.5-7B.json": 7_615_616_512,
    "Qwen--Qwen2.5-7B-Instruct.json": 7_615_616_512,
    "Qwen--Qwen2.5-32B.json": 32_763_876_352,
    "Qwen--Qwen2.5-72B.json": 72_706_203_648,
    "Qwen--Qwen3-0.6B.json": 596_049_920,
    "Qwen--Qwen3-1.7B.json": 1_720_574_976,
    "Qwen--Qwen3-4B.json": 4_022_468_096,
    "Qwen--Qwen3-8B.json": 8_190_735_360,
    "Qwen--Qwen3-14B.json": 14_768_307_200,
    "Qwen--Qwen3-32B.json": 32_762_123_264,
    "meta-llama--Llama-3.1-8B.json": 8_030_261_248,
    "meta-llama--Llama-3.1-8B-Instruct.json": 8_030_261_248,
    "meta-llama--Llama-3.1-70B.json": 70_553_706_496,
    "meta-llama--Llama-3.2-1B.json": 1_235_814_400,
}


def recipe(name: str) -> Recipe:
    return load(ROOT / "recipes" / name).recipe


def top(name: str) -> str:
    """The comment that a recipe begins with, as one line."""
    lines = []
    for line in (ROOT / "recipes" / name).read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def bases(path: Path) -> list[Path]:
    """What a recipe or fragment lists under `base:`, and what that lists in its turn."""
    listed = [path.parent / name for name in yaml.safe_load(path.read_text()).get("base", [])]
    return listed + [below for found in listed for below in bases(found)]


def test_the_files_are_found() -> None:
    assert set(RECIPES) == set(WANTED)
    assert set(MODELS) == {*PARAMETERS, "quickstart.json"}
    assert len(MODELS) == 25
    assert [name.split("/")[0] for name in FRAGMENTS] == ["parallel"] * 9 + ["zero"] * 4


OFFLINE = {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def words_of(name: str) -> list[str]:
    """What checks a recipe as it is started where it is meant to run."""
    hosts = re.search(r"-(\d+)gpu\.yaml$", name)
    return [f"recipes/{name}", *(["--ranks", hosts[1]] if hosts else [])]


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """`check` in a process with the imports made: its exit code, and what it says."""
    for hosts in ("NNODES", "SLURM_JOB_ID"):
        monkeypatch.delenv(hosts, raising=False)

    def run(*words: str) -> tuple[int, str, str]:
        command = Forked(["check", *words], tmp_path, **OFFLINE)
        said, err = command.communicate(timeout=HANG_SECONDS)
        return command.wait(0), said, err

    return run


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_check(quick: Callable[..., tuple[int, str, str]], name: str) -> None:
    code, said, err = quick(*words_of(name))
    assert (code, err) == (0, "")
    wanted = WANTED[name]
    processes = f"{wanted.ranks} process{'es' if wanted.ranks > 1 else ''}"
    assert f"layout: {processes}, {wanted.layout}" in said
    assert "no problem found" in said
    assert ("the language model of" in said) == name.startswith(("qwen3.5", "gemma3"))
    assert "\nmodel: " in said and "not checked: the sizes" not in said, "no shape for its model"
    assert ("\ntrains: " in said) == ("-lora-" in name)


def test_a_recipe_that_does_not_fit_is_seen(quick: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = quick("recipes/llama3.1-8b-text-hybrid-128k-16gpu.yaml")
    assert code == 2 and "does not divide the 8 processes" in err
    code, _, err = quick("recipes/qwen3-8b-text-ring-64k.yaml", "model.rope_scaling=null")
    assert code == 2 and "is 65536, and the model has 40960 positions" in err


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_says_what_it_is(name: str) -> None:
    said = top(name)
    assert "It has not been run at that size." in said
    assert f"./launch.sh recipes/{name}" in said
    assert re.search(rf"\b{WANTED[name].ranks} GPUs?\b", said)


def test_the_quickstart_says_how_to_start_it() -> None:
    assert f"./launch.sh recipes/{QUICKSTART}" in top(QUICKSTART)


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_is_named_after_what_it_holds(name: str) -> None:
    built = BUILT_FOR.match(name)
    assert built is not None
    found = recipe(name)
    model = (found.model.name_or_path or "").split("/")[1].lower().removesuffix("-instruct")
    assert (
        model.replace("llama-", "llama").replace("gemma-", "gemma").removesuffix("-it")
        == built["model"]
    )
    assert found.data.format == ("text" if built["task"] == "text" else "messages")
    assert (found.data.chat_template is not None) == (built["task"] in ("chat", "lora"))
    assert (found.model.adapter is not None) == (built["task"] == "lora")
    parallel = found.parallel_config
    split: int | str | None = parallel.context_parallel_algo
    if built["layout"] == "whole":
        split = parallel.context_parallel
    if parallel.model_parallel > 1:
        split = parallel.tensor_parallel_algo
    if parallel.strategies:
        split = "strategies"
    if parallel.pipeline_stage > 1:
        split = "stages"
    assert split == LAYOUTS[built["layout"]]
    unit = {"k": 1024, "m": 1024**2}[built["length"][-1]]
    assert found.data.sequence_length == int(built["length"][:-1]) * unit
    assert name in (f"{built[0]}.yaml", f"{built[0]}-{WANTED[name].ranks}gpu.yaml")


@pytest.mark.parametrize("name", FOR_GPUS)
def test_a_recipe_for_gpus_saves_their_memory(name: str) -> None:
    found = recipe(name)
    assert (found.model.dtype, found.launch.device) == ("bfloat16", "cuda")
    assert found.memory.gradient_checkpointing
    parallel = found.parallel_config
    shared = parallel.context_parallel * parallel.model_parallel * parallel.pipeline_stage
    replicas = WANTED[name].ranks // shared
    assert found.training.global_batch_size % replicas == 0, "a step would hold empty rows"


def test_the_sixteen_gpus_repeat_the_eight() -> None:
    eight, sixteen = (recipe(f"llama3.1-8b-text-hybrid-128k{end}.yaml") for end in ("", "-16gpu"))
    apart = {"output_dir": None, "parallel_config": None}
    assert eight.model_copy(update=apart) == sixteen.model_copy(update=apart)
    assert eight.parallel_config != sixteen.parallel_config


@pytest.mark.parametrize("name", RECIPES)
def test_every_base_of_a_recipe_exists(name: str) -> None:
    listed = bases(ROOT / "recipes" / name)
    assert [path for path in listed if not path.is_file()] == []
    assert name == QUICKSTART or listed


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_fragment_is_used(name: str) -> None:
    used = {path.resolve() for recipe in RECIPES for path in bases(ROOT / "recipes" / recipe)}
    fragment = ROOT / "configs" / name
    assert fragment.resolve() in used
    assert fragment.read_text().startswith("# ")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_models_shape_has_as_many_parameters_as_published(name: str) -> None:
    config = AutoConfig.from_pretrained(ROOT / "configs/models" / name, local_files_only=True)
    with init_empty_weights():
        model = getattr(transformers, loading_class(config.to_dict())).from_config(config)
    model.tie_weights()
    assert {p.device for p in model.parameters()} == {torch.device("meta")}
    assert sum(p.numel() for p in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_models_shape_is_read_as_transformers_reads_it(name: str) -> None:
    hub_id = name.removesuffix(".json").replace("--", "/")
    shape = read_shape(ModelBlock(name_or_path=hub_id), CONFIGS)
    assert isinstance(shape, ModelShape)
    whole = AutoConfig.from_pretrained(ROOT / "configs/models" / name, local_files_only=True)
    config = whole.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // shape.heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert shape.rope is not None and shape.rope.items() <= rope.items()
    assert (shape.heads, shape.kv_heads, shape.head_dim) == (
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
    )
    assert (shape.layers, shape.hidden_size, shape.max_positions, shape.tied) == (
        config.num_hidden_layers,
        config.hidden_size,
        config.max_position_embeddings,
        whole.tie_word_embeddings,
    )
