"""Wrong recipes, commands and data: exit 2, one line each with place, key and remedy, no rank."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.data_cases import CHAT, TOKENIZER
from tests.support.refused import Ground
from uspft.__main__ import main
from uspft.called import VARIABLE

PARALLEL = "parallel_config"
RING2 = {"context_parallel": 2, "context_parallel_algo": "ring_cp"}

# By what is wrong: changes to the good recipe, YAML after it, the key, words of its line.
RECIPES: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    "misspelt key": (
        {f"{PARALLEL}.context_paralel": 2},
        "",
        f"{PARALLEL}.context_paralel",
        ("did you mean `context_parallel`?",),
    ),
    "rows": (
        {PARALLEL: RING2, "data.sequence_length": 30},
        "",
        "data.sequence_length",
        ("30 tokens", "next", "32"),
    ),
    "ranks": (
        {PARALLEL: RING2, "launch.processes": 3},
        "",
        f"{PARALLEL}.context_parallel",
        ("3 processes", "a multiple of 2"),
    ),
    "missing data": ({"data.train": "no.jsonl"}, "", "data.train.path", ("no.jsonl",)),
    "unknown format": ({"data.format": "csv"}, "", "data.format", ("csv", "prompt_completion")),
    "tag": (
        {},
        "wandb: !!python/object/apply:os.system ['touch pwned']\n",
        "wandb",
        ("!!python/object/apply:os.system", "leave it out"),
    ),
    "duplicate": ({}, "seed: 43\n", "seed", ("duplicate key", "recipe.yaml:1")),
    "suffix": ({"training.steps": "10k"}, "", "training.steps", ("10k", "10000", "10240")),
    "derived": (
        {"deepspeed.train_batch_size": 8},
        "",
        "deepspeed.train_batch_size",
        ("uspft derives", "training.global_batch_size"),
    ),
    "no such DeepSpeed key": (
        {"deepspeed.zero_optimization": {"stage": 3, "stage3_prefetch_buket_sise": 1}},
        "",
        "deepspeed.zero_optimization.stage3_prefetch_buket_sise",
        ("did you mean `stage3_prefetch_bucket_size`",),
    ),
}


AT_ONCE_SECONDS = 300.0
"""Ten times what a refusal takes where cores are busy: what takes longer waits for the hub."""
LAUNCHED = ("misspelt key",)
"""Cases that a user's own command shows too; after them the hub's are."""


@pytest.mark.parametrize("case", RECIPES)
def test_a_wrong_recipe(ground: Ground, capsys: pytest.CaptureFixture[str], case: str) -> None:
    changes, more, key, words = RECIPES[case]
    ground.write(changes, more)
    ground.call(capsys).about(key, *words)
    if case in LAUNCHED:
        ground.launch().about(key, *words)
    assert not (ground.folder / "pwned").exists()


def test_all_problems_at_once(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"data.train": "no.jsonl", PARALLEL: RING2, "output_dir": str(ground.path)}
    ground.write(wrong | {"data.sequence_length": 30})
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        assert len(found.lines) == 3
        found.about("output_dir", str(ground.path), "is not a folder; name another folder")
        found.about("data.train.path", "no.jsonl")


SAMPLES: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "overlong": ([{"input_ids": [5] * 9}, {"input_ids": [5] * 33}], (":2: 33 tokens", "overlong")),
    "broken JSON": ([{"input_ids": [5] * 9}, "{", {"input_ids": [5]}], (":2: broken JSON",)),
    "vocabulary": ([{"input_ids": [5, 97]}], (":1: input_ids holds 97", "0 … 96")),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_a_wrong_sample_is_named_by_file_and_line(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    samples, words = SAMPLES[case]
    data = ground.folder / "bad.jsonl"
    lines = (text if isinstance(text, str) else json.dumps(text) for text in samples)
    data.write_text("".join(f"{line}\n" for line in lines))
    ground.write({"data.train": str(data)})
    (line,) = ground.call(capsys).lines
    assert line.startswith(str(data) + words[0]) and "; " in line
    assert all(word in line for word in words[1:])


def test_an_empty_data_set(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    (ground.folder / "empty.jsonl").write_text("")
    ground.write({"data.train": "empty.jsonl"})
    told = "empty.jsonl: holds no sample; give it data, or leave it out"
    for verb in ("train", "check"):
        assert ground.call(capsys, verb, str(ground.path)).lines == [told]


def test_the_hub_out_of_reach(ground: Ground, tmp_path: Path) -> None:
    nowhere = {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
    }
    for key, wish in (("model.name_or_path", "org/model"), ("data.train", "org/data")):
        ground.write({key: wish})
        began = time.monotonic()
        found = ground.launch(**nowhere)
        assert time.monotonic() - began < AT_ONCE_SECONDS
        found.about(key, wish, "name a folder" if "model" in key else "use a local path")


def data_of(ground: Ground, *records: Any) -> str:
    path = ground.folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_tokenizer_that_will_not_do(ground: Ground, capsys: pytest.CaptureFixture[str]) -> None:
    text = data_of(ground, {"text": "hi"})
    key = "model.tokenizer"
    config = {"model": {"config": f"{ground.recipe['model']['name_or_path']}/config.json"}}
    ground.write({**config, "data.train": text})
    ground.call(capsys).about(key, "no tokenizer", "every format but tokenized", "name a folder")
    ground.write({"data.train": text, key: str(TOKENIZER)})
    ground.call(capsys).about(key, "8,192 tokens", "97", "name the model's own")
    ground.write({"data.train": text, key: "./tokenizr"})
    ground.call(capsys).about(key, "`./tokenizr` does not exist")
    ground.write({"data.train": text})
    for verb in ("train", "check"):  # transformers makes an empty one of such a folder
        found = ground.call(capsys, verb, str(ground.path))
        folder = ground.recipe["model"]["name_or_path"]
        assert len(found.lines) == 1
        found.about(key, f"the folder `{folder}` holds no tokenizer (no tokenizer.json, ")


def damaged(folder: Path, case: str) -> tuple[Path, str]:
    """A copy of the shipped tokenizer with one file spoilt, and what is to be said of that."""
    shutil.copytree(TOKENIZER, folder)
    file = folder / ("tokenizer_config.json" if case == "beside" else "tokenizer.json")
    whole = file.read_bytes()
    file.unlink()
    if case in ("cut", "beside"):
        file.write_bytes(whole[: len(whole) // 2])
        return file, "is cut off or damaged ("
    if case == "another":
        file.write_text("[1]")
        return file, "is no JSON object; copy or download it again, whole"
    if case == "pointer":
        file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
        return file, "is a pointer of Git LFS, not the file; run `git lfs pull` there"
    if case == "link":
        file.symlink_to("../blobs/gone")
        return file, "leads nowhere; copy what it stands for"
    file.mkdir()
    return file, "cannot be read: Is a directory; "


@pytest.mark.parametrize("case", ["cut", "beside", "another", "pointer", "link", "unreadable"])
def test_a_damaged_tokenizer_is_named_by_file(
    ground: Ground, capsys: pytest.CaptureFixture[str], tmp_path: Path, case: str
) -> None:
    file, told = damaged(tmp_path / "tokenizer", case)
    changes = {"data.train": data_of(ground, {"text": "hi"}), "model.overrides.vocab_size": 8192}
    config = f"{ground.recipe['model']['name_or_path']}/config.json"
    changes |= {"model.name_or_path": None, "model.config": config}
    changes |= {"model.tokenizer": str(file.parent)}
    for more in ({}, {"model.add_tokens": ["<|new|>"]}):
        ground.write({**changes, **more})
        for verb in ("train", "check"):
            found = ground.call(capsys, verb, str(ground.path))
            assert len(found.lines) == 1
            found.about("model.tokenizer", f"`{file}` {told}")


def test_a_model_that_is_neither_a_folder_nor_of_the_hub(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    key, says = "model.name_or_path", "is neither a folder here nor org/name of the hub"
    for name, near in (
        ("qwen22", None),
        ("qwen3-8b", "Qwen/Qwen3-8B"),
        ("Llama3.1-8B", "meta-llama/Llama-3.1-8B"),
    ):
        ground.write({key: name})
        for verb in ("train", "check"):
            line = ground.call(capsys, verb, str(ground.path)).about(key, f"`{name}` {says}")
            assert "; name a folder, or org/name of the hub" in line
            assert line.endswith(f"; did you mean `{near}`?") == bool(near), line
            assert near or "did you mean" not in line


def test_what_this_user_may_not_read_is_told_as_that(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system as it answers one who is not root: nothing below the folder can be looked at."""
    folder = ground.folder.parent / "barred"
    folder.mkdir()
    stat = os.stat

    def barred(place: Any, *words: Any, **more: Any) -> os.stat_result:
        if str(place).startswith(f"{folder}/"):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return stat(place, *words, **more)

    for key, name in (("name_or_path", folder), ("config", folder), ("name_or_path", folder / "x")):
        model = {"model": {key: str(name), "dtype": "float32"}}
        ground.write({**model, "data.train": ground.recipe["data"]["train"]})
        with monkeypatch.context() as patched:
            patched.setattr(os, "stat", barred)
            found = ground.call(capsys, "check", str(ground.path))
        file = name if name != folder else folder / "config.json"
        found.about(f"model.{key}", f"`{file}` cannot be read: Permission denied; let this user")


def test_data_that_does_not_fit_its_format(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    sized = {"model.tokenizer": str(TOKENIZER), "model.overrides": {"vocab_size": 8192}}
    config = f"{ground.recipe['model']['name_or_path']}/config.json"
    sized |= {"model.name_or_path": None, "model.config": config}
    text = data_of(ground, {"text": "hi"})
    ground.write({**sized, "data.train": text, "data.train_on": "last"})
    ground.call(capsys).about("data.train_on", "is last, and text data has no answers", "all")
    ground.write({**sized, "data.train": text, "data.format": "messages"})
    (line,) = ground.call(capsys).lines
    assert line.startswith(f"{text}:1: no shape of messages has the fields text; ")
    deaf = ground.folder / "chat.jinja"
    deaf.write_text("{{ messages | length }}")
    chat = data_of(ground, CHAT)
    ground.write({**sized, "data.train": chat, "data.chat_template": str(deaf)})
    (line,) = ground.call(capsys).lines
    assert line.startswith(f"{chat}:1: the chat template has no {{% generation %}} marks, and ")
    assert line.endswith("; name a template with {% generation %} marks in data.chat_template")


def test_more_processes_than_gpus(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    ground.write({"launch": {"device": "cuda", "processes": 4}, "model.dtype": "bfloat16"})
    ground.call(capsys).about("launch.processes", "4 processes", "2 GPUs; start at most 2")


def test_a_gpu_without_flash_attention(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.init", lambda: None)
    monkeypatch.setattr("torch.cuda.get_device_capability", [(8, 0), (7, 5)].__getitem__)
    monkeypatch.setattr("torch.cuda.get_device_name", ["A100", "Tesla T4"].__getitem__)
    ground.write({"launch": {"device": "cuda", "processes": 2}, "model.dtype": "bfloat16"})
    told = "GPU 1 of this host, Tesla T4, has compute capability 7.5: bfloat16 and flash attention"
    ground.call(capsys).about("launch.device", told, "or write launch.device: cpu")
    assert not (ground.folder.parent / "cache").exists(), "data was prepared"
    assert main(["train", str(ground.path), "launch.processes=1"]) == 1
    assert len(ground.started) == 1


WORDS: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "verb": (["trian", "recipe.yaml"], ("command line: trian: ", "did you mean `train`?")),
    "no output": (["report", "recipe.yaml"], ("command line: recipe.yaml: is no folder; ",)),
    "option": (["recipe.yaml", "--fast"], ("command line: --fast: unknown option; ",)),
    "ranks": (["recipe.yaml", "--ranks", "2"], ("--ranks: train takes", "launch.processes=N")),
    "no ranks": (
        ["check", "recipe.yaml", "--ranks", "0"],
        ("--ranks: `0` is no whole number above 0",),
    ),
    "no target": (
        ["check"],
        ("command line: check: needs a target; write ../bin/uspft check RECIPE",),
    ),
    "override first": (
        ["seed=1", "recipe.yaml"],
        ("before the target; write ../bin/uspft train RECIPE.yaml seed=1",),
    ),
    "no equals sign": (["recipe.yaml", "seed"], ("command line: seed: ", "write key.path=value")),
    "two recipes": (["recipe.yaml", "recipe.yaml"], ("command line: recipe.yaml: ",)),
    "override": (["recipe.yaml", "sed=1"], ("command line: sed: unknown key `sed`; did you mean",)),
    "value": (["recipe.yaml", "seed=x"], ("command line: seed: ", '"x"')),
    "missing recipe": (["nowhere.yaml"], ("nowhere.yaml:1: does not exist; ",)),
    "folder": (["."], (".:1: is a folder; name a YAML file",)),
    "shipped": (["quickstart"], ("copy the shipped recipe of that name: recipes quickstart",)),
    "export": (["export", "nowhere"], ("command line: nowhere: does not exist; name an output",)),
    "export what": (["export", "."], ("command line: .: holds no checkpoint; name an output",)),
    "export how": (["export", ".", "dtype=x"], ("dtype=x: export takes to=FOLDER and base=PLACE",)),
    "rank by hand": (["rank", "folder"], ("rank: is what train starts; write ../bin/uspft train",)),
}


@pytest.mark.parametrize("case", WORDS)
def test_a_wrong_command(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    words, told = WORDS[case]
    monkeypatch.setenv(VARIABLE, "../bin/uspft")
    (line,) = ground.call(capsys, *words).lines
    assert all(part in line for part in told), line


def test_a_wrong_command_through_launch(ground: Ground) -> None:
    (line,) = ground.launch("trian", "recipe.yaml").lines
    assert "command line: trian: " in line and "did you mean `train`?" in line


HOSTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "count": ({"NNODES": "two"}, ("NNODES=two: must be a whole number",)),
    "place": ({"NNODES": "2", "NODE_RANK": "2"}, ("NODE_RANK=2: ", "from 0 to 1")),
    "port": ({"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "x"}, ("MASTER_PORT=x: ",)),
    "rest": ({"NNODES": "2"}, ("NODE_RANK is not set", "MASTER_ADDR is not set", "MASTER_PORT")),
    "address": (
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_PORT": "29500", "MASTER_ADDR": "no.invalid"},
        ("MASTER_ADDR=no.invalid: this host cannot resolve it",),
    ),
}


@pytest.mark.parametrize("case", HOSTS)
def test_wrong_hosts(
    ground: Ground,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    case: str,
) -> None:
    variables, told = HOSTS[case]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = "\n".join(ground.call(capsys).lines)
    assert all(part in said for part in told), said


def test_a_fault_of_the_program_is_not_the_users(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from uspft.__main__ import main
    from uspft.prepare import make_job

    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    assert main([str(ground.path)]) == 1 and ground.started, "the good recipe is refused"
    out = ground.recipe["output_dir"]
    assert capsys.readouterr().err == f"nothing is saved in {out}: the same command starts anew\n"
    monkeypatch.setattr(make_job, "identity_of", broken)
    with pytest.raises(ValueError, match="a bug"):
        main([str(ground.path)])
