"""What `check` refuses, warns of, counts, and says that it does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from tests.support.models import BESIDE_MLP, make_model
from tests.support.shapes import TINY
from tests.unit.checkpoint.test_folder import PART, flip, made
from uspft.__main__ import main
from uspft.called import VARIABLE
from uspft.checkpoint.folder import folder_of
from uspft.families import FAMILIES
from uspft.prepare import examine, files

GIB = 1 << 30
PARALLEL = "parallel_config"


class Said(NamedTuple):
    """An exit code, and the lines of stdout and stderr."""

    code: int
    out: list[str]
    err: list[str]

    def about(self, word: str) -> list[str]:
        return [line for line in self.out if line.startswith(f"{word}: ")]

    def unknown(self, what: str) -> list[str]:
        return [line for line in self.about("not checked") if line.split()[2] == what]


@pytest.fixture
def check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Said]:
    """`check` of a recipe for one GPU with words behind it; by default a small LLaMA in bfloat16.

    model: fields of its config, or the block of the recipe itself.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "d.jsonl").write_text('{"input_ids": [1, 2]}\n')

    def run(*words: str, model: dict[str, Any] | None = None, **config: Any) -> Said:
        (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "llama", **config}))
        tree = {
            "output_dir": str(tmp_path / "out"),
            "model": model or {"config": str(tmp_path / "config.json")},
            "data": {"train": str(tmp_path / "d.jsonl"), "sequence_length": 32},
            "training": {"steps": 1, "global_batch_size": 1},
            "launch": {"device": "cuda", "processes": 1},
        }
        (tmp_path / "r.yaml").write_text(yaml.safe_dump(tree))
        capsys.readouterr()
        code = main(["check", str(tmp_path / "r.yaml"), *words])
        return Said(code, *(text.splitlines() for text in capsys.readouterr()))

    return run


OPEN = (
    "data_parallel",
    "model_parallel",
    "use_seq_parallel",
    "pipeline_stage",
    "pp_interleave_num",
    "context_parallel",
    "context_parallel_algo",
    "ulysses_degree_in_cp",
    "expert_parallel",
)
ALL_OPEN = ("parallel_config=auto", "deepspeed.zero_optimization.stage=auto")
ALL_OPEN += ("training.micro_batch_size=auto",)
CHOSEN = [f"{PARALLEL}.{key}" for key in OPEN]
CHOSEN += ["deepspeed.zero_optimization.stage", "training.micro_batch_size"]


def test_a_recipe_for_gpus_that_are_not_here_says_what_it_was_decided_on(
    check: Callable[..., Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examine, "gpu_count", lambda: 0)
    (line,) = check("launch.processes=2").unknown("GPUs")
    assert "there is none here; what is said is for 2 processes" in line
    assert check("launch.device=cpu").unknown("GPUs") == []


def test_every_auto_is_told_with_its_reason(check: Callable[..., Said]) -> None:
    """And on what it was decided, where the model is not here too."""
    four = check(*ALL_OPEN, "launch.processes=4", "training.global_batch_size=4")
    assert four.code == 0
    whole, *each = four.about("auto")
    assert whole.startswith("auto: by the model's sizes, for rows of one document (the ")
    assert (
        "not known yet, may change this), " in whole and "is the fastest layout that fits" in whole
    )
    keys = [line.split(": ")[1] for line in each]
    assert keys == [*CHOSEN, "memory.recompute"]
    assert all(", since " in line for line in each)
    fixed = check(*ALL_OPEN, f"{PARALLEL}.context_parallel=2", "launch.processes=4")
    told = [line.split(": ")[1] for line in fixed.about("auto")[1:]]
    assert f"{PARALLEL}.context_parallel" not in told and len(told) == len(keys) - 1
    assert "each row shared by 2" in fixed.about("layout")[0]
    unknown = check(*ALL_OPEN, "launch.processes=4", model={"name_or_path": "org/name"})
    whole, *each = unknown.about("auto")
    assert whole.startswith("auto: by the recipe and the machine, ") and unknown.code == 0
    assert "the model's sizes, not known yet, may change this" in whole
    assert [line.split(": ")[1] for line in each] == CHOSEN
    plain = check().about("auto")
    assert [line.split(": ")[1] for line in plain[1:]] == ["memory.recompute"]
    assert check("launch.device=cpu").about("auto") == []


def test_degrees_that_do_not_fit_this_machine_are_told_how_another_is_planned(
    check: Callable[..., Said],
) -> None:
    words = [f"{PARALLEL}.context_parallel=8", f"{PARALLEL}.context_parallel_algo=auto"]
    (line,) = check(*words, "launch.processes=2").err
    assert "= 8 does not divide the 2 processes of this run; start a multiple of 8" in line
    assert "check and plan take --ranks 8 for another machine" in line
    assert check(*words, "--ranks", "8").code == 0
    (line,) = check("parallel_config=auto", "launch.processes=auto", "launch.device=cpu").err
    assert f"{PARALLEL}.model_parallel: is auto, and nothing says on how many processes" in line
    assert "check and plan also take --ranks N" in line
    words = ["parallel_config=auto", f"{PARALLEL}.ulysses_degree_in_cp=3", "launch.processes=4"]
    (line,) = check(*words).err
    assert "is auto, and no layout of 4 processes has what the other keys say" in line


def test_a_disk_that_is_too_small_here_is_a_warning_until_the_run_is_here(
    check: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check().about("disk") and not check().about("warning")
    unknown = check(model={"name_or_path": "org/name"}).about("not checked")
    assert "not checked: disk (the sizes of the model are not known here)" in unknown
    monkeypatch.setattr(files, "space_free", lambda _: 1000)
    elsewhere = check()
    (line,) = elsewhere.about("warning")
    assert elsewhere.code == 0 and not elsewhere.about("disk")
    assert line.startswith("warning: output_dir: this run writes ") and "; make room, or" in line
    assert f", and 1000 B are free in `{tmp_path / 'out'}`; " in line
    (tmp_path / "out").mkdir()
    here = check()
    (line,) = here.err
    assert (here.code, here.out) == (2, [])
    assert line.startswith(f"{tmp_path / 'r.yaml'}:") and ": output_dir: this run writes " in line


NEITHER = "is neither a folder here nor org/name of the hub"
NO_HUB_IDS = {
    "qwen22": f"`qwen22` {NEITHER}",
    "Qwen3-8B": f"`Qwen3-8B` {NEITHER}",
    "models/": "the folder `models/` does not exist",
    "a/b/c": "the folder `a/b/c` does not exist",
}


@pytest.mark.parametrize("name", NO_HUB_IDS)
def test_a_model_that_is_no_folder_and_no_hub_id_is_refused(
    check: Callable[..., Said], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check(model={"name_or_path": "org/name"}).code == 0
    said = check(model={"name_or_path": name})
    (line,) = (line for line in said.err if ": model.name_or_path: " in line)
    assert said.code == 2 and f": model.name_or_path: {NO_HUB_IDS[name]}" in line
    assert "; name a folder, or org/name of the hub" in line
    near = name == "Qwen3-8B"
    assert line.endswith("; did you mean `Qwen/Qwen3-8B`?" if near else "/name of the hub")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"hidden_act": "nope"}, "cannot be `nope`: transformers cannot make a model of it: KeyE"),
        ({"rms_norm_eps": "a"}, "cannot be `a`: Validation error for field 'rms_norm_eps'"),
        ({"hidden_size": -4}, "is -4, not a whole number of at least 1; write another"),
        ({"hidden_act": "nope", "head_dim": 0}, ""),
        ({"hidden_act": "nope", "rms_norm_eps": "a"}, ""),
    ],
)
def test_a_field_that_transformers_refuses_is_named_where_the_recipe_writes_it(
    wrong: dict[str, Any], says: str, check: Callable[..., Said]
) -> None:
    """One whose absence alone would not help is not: then two are wrong."""
    config = {**TINY, "model_type": "llama"}
    for at in ("config", "overrides"):
        block = {"config": config, "dtype": "float32"}
        block[at] = {**config, **wrong} if at == "config" else wrong
        code, _, (line, *_) = check("launch.device=cpu", model=block)
        assert code == 2
        key = line.split(": ")[1]
        if says:
            place = line.partition(": ")[0].rpartition(":")[2]
            written = Path(line.partition(":")[0]).read_text().splitlines()[int(place) - 1]
            assert key == f"model.{at}.{next(iter(wrong))}" and says in line
            assert written.strip().startswith(next(iter(wrong)))
        else:
            assert "hidden_act" not in key


def test_parameters_are_counted_with_their_bytes(check: Callable[..., Said]) -> None:
    """By hand: TINY's matrices, norms, embedding and head."""
    d, inner, vocabulary, layers = (
        TINY[key] for key in ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    )
    head = TINY.get("head_dim") or d // TINY["num_attention_heads"]
    q, kv = head * TINY["num_attention_heads"], head * TINY["num_key_value_heads"]
    attention = 2 * d * q + 2 * d * kv
    outside, layer = 2 * vocabulary * d + d, attention + 3 * d * inner + 2 * d
    every = outside + layers * layer
    size = f"{2 * every / 1024:.4g} KiB"
    line = f"parameters: {every:,} in all ({size} in bfloat16), {every:,} trained ({size})"
    assert check().about("parameters") == [line]
    (line,) = check("model.adapter={type: lora, rank: 1, target_modules: [q_proj]}").about(
        "parameters"
    )
    lora = layers * (d + q)
    assert f"{every + lora:,} in all" in line
    assert line.endswith(f", {lora:,} trained ({2 * lora} B)")
    experts, met = 4, 2
    moe = check(model_type="mixtral", num_local_experts=experts, num_experts_per_tok=met)
    (line,) = moe.about("parameters")
    more = layers * (3 * d * inner * (experts - 1) + d * experts)
    active = layers * (3 * d * inner * (met - 1) + d * experts)
    assert line.startswith(f"parameters: {every + more:,} in all (")
    assert f", {every + active:,} active for a token ({2 * (every + active) / 1024:.4g} " in line


def test_experts_of_every_family_are_active_in_part(
    check: Callable[..., Said], tmp_path: Path
) -> None:
    routed = [kind for kind, family in FAMILIES.items() if family.routed]
    assert len(routed) == 12
    for kind in routed:
        own = BESIDE_MLP if kind == "gemma4_text" else {}
        folder = make_model(tmp_path / kind, kind, **own)
        (line,) = check(model={"name_or_path": str(folder)}).about("parameters")
        assert " active for a token (" in line, kind


TENSOR = [f"{PARALLEL}.model_parallel=2", "launch.processes=2"]
MESH = [*TENSOR, f"{PARALLEL}.tensor_parallel_algo=meshslice"]
KNOWN = {
    "tensor": TENSOR,
    "tensor, tokens": [*TENSOR, f"{PARALLEL}.use_seq_parallel=true"],
    "LoRA": ["model.adapter={type: lora, rank: 1}"],
    "freeze": ["model.freeze=[embed]"],
    "float32": ["model.dtype=float32", "launch.device=cpu"],
    "keeps": ["memory.gradient_checkpointing=false"],
    "mesh": MESH,
    "stages": [f"{PARALLEL}.pipeline_stage=2", "launch.processes=2"],
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
SOME_EXPERTS = {"model_type": "qwen3_moe", "decoder_sparse_step": 2, "num_experts": 4, **EXPERTS}


@pytest.mark.parametrize("case", KNOWN)
def test_memory_is_predicted(check: Callable[..., Said], case: str) -> None:
    found = check(*KNOWN[case])
    assert found.about("memory") and not found.unknown("memory")


@pytest.mark.parametrize("config", [SOME_EXPERTS, {"model_type": "gemma4_text", **BESIDE_MLP}])
def test_memory_of_experts_in_some_layers_is_predicted(
    check: Callable[..., Said], config: dict[str, Any]
) -> None:
    found = check(**config)
    assert found.about("memory") and not found.unknown("memory")


def test_memory_of_a_model_that_is_not_here_is_not_checked(check: Callable[..., Said]) -> None:
    said = check(model={"name_or_path": "org/name"})
    assert said.unknown("memory") == [
        "not checked: memory (the sizes of the model are not known here)"
    ]
    assert not said.about("model") and "" not in said.out


def test_a_row_that_does_not_fit_is_said(check: Callable[..., Said]) -> None:
    long = ["data.sequence_length=64m", "model.overrides={max_position_embeddings: 67108864}"]
    (line,) = check(*long).about("memory")
    assert " GiB a rank, which is too much (activations " in line
    assert ", which is too much" not in check().about("memory")[0]


def test_lengths_that_are_not_known_are_found_by_a_command(
    check: Callable[..., Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "../bin/uspft")
    word = f"{PARALLEL}.strategies=auto"
    said = check(word, model={"name_or_path": "org/name"})
    assert said.unknown("memory") == ["not checked: memory (the layouts are not chosen yet)"]
    (line,) = said.unknown("strategies")
    assert line.endswith(f" or `../bin/uspft preprocess {tmp_path / 'r.yaml'} {word}`)")


def test_each_checkpoint_of_a_run_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(tmp_path, 1, 2, 3, summed=True)
    made(tmp_path, 4)
    for place in (tmp_path, tmp_path / "checkpoints"):
        assert main(["check", str(place)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 4 and all("every checksum is right" in line for line in lines[:3])
        assert f"{folder_of(tmp_path, 4)}: step 4, 1 files: whole by their lengths" in lines[3]
    flip(folder_of(tmp_path, 2) / PART, 800)
    assert main(["check", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == 3
    (line,) = said.err.splitlines()
    assert f"{folder_of(tmp_path, 2)} is damaged: {PART}: another checksum" in line
    assert main(["check", str(folder_of(tmp_path, 1))]) == 0
    assert "step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "holds no checkpoint; name a recipe, a checkpoint"),
        (["seed=1"], "command line: seed=1: a checkpoint is checked, and not a recipe"),
        (["--ranks", "2"], "command line: --ranks: a checkpoint is checked"),
    ],
)
def test_what_is_no_checkpoint_and_what_it_does_not_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["check", str(tmp_path), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("command line: ") and told in line
