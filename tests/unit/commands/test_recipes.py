"""`recipes`: what is listed, and a copy that means what its original means, over no other file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from uspft.called import VARIABLE
from uspft.commands.recipes import SHIPPED, copy, recipes
from uspft.config import InputError, Recipe, load
from uspft.prepare.files import find_paths

PLACE = {VARIABLE: "../bin/uspft"}
NAMES = sorted(path.stem for path in SHIPPED.iterdir())

# What each is for, written here a second time, by hand.
WANTED = """\
quickstart
    random weights, 4 CPU processes, rows of 4k: all weights, on Python's standard library
llama3.1-8b-text-whole-1m
    meta-llama/Llama-3.1-8B, 1 GPU, rows of 1m: all weights, on texts
qwen3-0.6b-chat-whole-8k
    Qwen/Qwen3-0.6B, 1 GPU, rows of 8k: all weights, on conversations
qwen3.5-9b-lora-whole-32k
    Qwen/Qwen3.5-9B, 1 GPU, rows of 32k: LoRA, on conversations
llama3.1-8b-text-ulysses-64k
    meta-llama/Llama-3.1-8B, 2 GPUs, rows of 64k: all weights, on texts
gemma3-12b-chat-ulysses-32k
    google/gemma-3-12b-it, 8 GPUs, rows of 32k: all weights, on conversations
gpt-oss-20b-text-ulysses-64k
    openai/gpt-oss-20b, 8 GPUs, rows of 64k: all weights, on texts
llama3.1-70b-lora-mesh-32k
    meta-llama/Llama-3.1-70B, 8 GPUs, rows of 32k: LoRA, on conversations
llama3.1-70b-lora-tensor-32k
    meta-llama/Llama-3.1-70B, 8 GPUs, rows of 32k: LoRA, on conversations
llama3.1-8b-text-hybrid-128k
    meta-llama/Llama-3.1-8B, 8 GPUs, rows of 128k: all weights, on texts
llama3.1-8b-text-ring-8m
    meta-llama/Llama-3.1-8B, 8 GPUs, rows of 8m: all weights, on texts
qwen2.5-32b-lora-planned-32k
    Qwen/Qwen2.5-32B, 8 GPUs, rows of 32k: LoRA, on conversations
qwen2.5-7b-chat-switching-32k
    Qwen/Qwen2.5-7B-Instruct, 8 GPUs, rows of 32k: all weights, on conversations
qwen2.5-7b-chat-ulysses-32k
    Qwen/Qwen2.5-7B-Instruct, 8 GPUs, rows of 32k: all weights, on conversations
qwen3-30b-a3b-lora-ulysses-32k
    Qwen/Qwen3-30B-A3B, 8 GPUs, rows of 32k: LoRA, on conversations
qwen3-8b-text-ring-64k
    Qwen/Qwen3-8B, 8 GPUs, rows of 64k: all weights, on texts
qwen3.5-9b-text-planned-128k
    Qwen/Qwen3.5-9B, 8 GPUs, rows of 128k: all weights, on texts
llama3.1-8b-text-hybrid-128k-16gpu
    meta-llama/Llama-3.1-8B, 16 GPUs, rows of 128k: all weights, on texts
mixtral-8x7b-v0.1-text-ulysses-32k-16gpu
    mistralai/Mixtral-8x7B-v0.1, 16 GPUs, rows of 32k: all weights, on texts
llama3.1-8b-text-ring-32m-32gpu
    meta-llama/Llama-3.1-8B, 32 GPUs, rows of 32m: all weights, on texts
llama3.1-70b-text-pipeline-8k-64gpu
    meta-llama/Llama-3.1-70B, 64 GPUs, rows of 8k: all weights, on texts
llama3.1-70b-text-tensor-128k-64gpu
    meta-llama/Llama-3.1-70B, 64 GPUs, rows of 128k: all weights, on texts
qwen3-30b-a3b-text-hybrid-128k-64gpu
    Qwen/Qwen3-30B-A3B, 64 GPUs, rows of 128k: all weights, on texts
qwen3-next-80b-a3b-text-hybrid-128k-64gpu
    Qwen/Qwen3-Next-80B-A3B-Instruct, 64 GPUs, rows of 128k: all weights, on texts
"""


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes([], PLACE) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(WANTED)
    assert sorted(line for line in WANTED.splitlines() if line[0] != " ") == NAMES
    assert shown.removeprefix(WANTED) == "copy one here: ../bin/uspft recipes NAME [FILE]\n"


def meaning(path: Path) -> Recipe:
    """A recipe whose paths are as a command of any folder finds them."""
    found = find_paths(load(path.resolve()))
    assert found.missing.keys() <= {"model.name_or_path"}, "a hub id is no path"
    return found.recipe


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_means_what_its_original_means(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes([name], PLACE) == 0
    assert meaning(Path(f"{name}.yaml")) == meaning(SHIPPED / f"{name}.yaml")
    text = Path(f"{name}.yaml").read_text()
    top = text.partition("base:")[0]
    assert f"../bin/uspft {name}.yaml" in top and "recipes/" not in top
    assert "launch.sh" not in top
    before = len((SHIPPED / f"{name}.yaml").read_text().splitlines())
    assert len(text.splitlines()) == before, "comments come along"


def test_a_plain_copy_would_not_do(tmp_path: Path) -> None:
    shutil.copy(SHIPPED / "qwen3-0.6b-chat-whole-8k.yaml", tmp_path)
    with pytest.raises(InputError, match=r"zero1\.yaml"):
        load(tmp_path / "qwen3-0.6b-chat-whole-8k.yaml")


def test_a_copy_inside_the_project_moves_with_it(tmp_path: Path) -> None:
    project = tmp_path / "here: a #project"
    for name in ("recipes", "configs", "data"):
        shutil.copytree(SHIPPED.parent / name, project / name)
    original = project / "recipes/qwen3-0.6b-chat-whole-8k.yaml"
    copy(original, project / "mine.yaml", "uspft")
    text = (project / "mine.yaml").read_text()
    assert "base: [configs/zero/zero1.yaml]" in text
    assert str(tmp_path) not in text.partition("base:")[2]
    assert "train: data/samples/messages.jsonl" in text
    copy(original, tmp_path / "outside.yaml", "uspft")  # where names need quotes
    for copied in (project / "mine.yaml", tmp_path / "outside.yaml"):
        apart = {"output_dir": None}
        both = [meaning(path).model_copy(update=apart) for path in (copied, original)]
        assert both[0] == both[1]


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, mine, link = tmp_path / "folder", tmp_path / "mine.yaml", tmp_path / "link.yaml"
    folder.mkdir()
    mine.write_text("seed: 1\n")
    link.symlink_to(tmp_path / "nowhere")
    assert recipes(["quickstart.yaml", str(folder)], PLACE) == 0
    for there in (mine, link, folder, folder / "quickstart.yaml"):
        with pytest.raises(InputError, match="is there already, and nothing is overwritten; name"):
            recipes(["quickstart", str(there)], PLACE)
    assert mine.read_text() == "seed: 1\n" and not (tmp_path / "nowhere").exists()
    with pytest.raises(InputError, match="cannot be written: No such file or directory; name"):
        recipes(["quickstart", str(tmp_path / "none" / "mine.yaml")], PLACE)
    assert f"written: {folder}/quickstart.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["quikstart"], "quikstart: is no shipped recipe; did you mean `quickstart`?"),
        (["zzz"], "zzz: is no shipped recipe; `../bin/uspft recipes` lists them"),
        (["--all"], "--all: unknown option; write ../bin/uspft recipes [NAME [FILE]]"),
        (["quickstart", "a.yaml", "seed=1"], "seed=1: recipes takes a name and a file; write"),
        (["quickstart", "seed=1"], "seed=1: recipes takes a name and a file; write"),
    ],
)
def test_a_wrong_word_is_told(words: list[str], told: str) -> None:
    with pytest.raises(InputError) as raised:
        recipes(words, PLACE)
    assert str(raised.value).startswith(f"command line: {told}")


def test_a_package_without_its_repository_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no recipes are next to the package"):
        recipes([], PLACE, tmp_path)
