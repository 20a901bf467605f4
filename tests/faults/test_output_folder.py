"""What lies in an output folder: a run takes what runs have written there, and nothing else."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.refused import Ground
from uspft.lease import Lease


def begins(ground: Ground) -> None:
    """The recipe is taken as far as the ranks."""
    from uspft.__main__ import main

    ground.started.clear()
    assert main([str(ground.path)]) == 1 and len(ground.started) == 1


def files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_in_a_folder_of_the_user_s_all_that_is_hers_stays(ground: Ground) -> None:
    """Twice: the second run moves aside what the first one wrote."""
    hers = {
        ".git/config": "[core]",
        "data/d.jsonl": Path(ground.recipe["data"]["train"]).read_text(),
        "other-run/metrics.jsonl": "{}",
        "other-run/checkpoints/step-00000001/state.json": "{}",
        "logs/training.log": "mine",
        "checkpoints/step-best/state.json": "{}",
        "hf2/config.json": "{}",
    }
    for name, text in hers.items():
        (ground.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (ground.folder / name).write_text(text)
    recipe = {**ground.recipe, "output_dir": ".", "checkpoint": {"resume": "never"}}
    recipe["data"] = {**recipe["data"], "train": "data/d.jsonl"}
    mine = ground.folder / "mine.yaml"
    ground.path.unlink()
    mine.write_text(yaml.safe_dump(recipe))
    hers["mine.yaml"] = mine.read_text()
    from uspft.__main__ import main

    for turn in range(2):
        assert main(["mine.yaml"]) == 1 and len(ground.started) == turn + 1
        found = files(ground.folder)
        assert {name: found[name] for name in hers} == hers
        wrote = {name for name in found if not name.startswith("earlier-")} - hers.keys()
        assert wrote == {"recipe.yaml", "environment.json"}
    (aside,) = ground.folder.glob("earlier-*")
    assert set(files(aside)) == {"recipe.yaml", "environment.json"}


def move(name: str, to: str) -> Callable[[Ground], dict[str, str]]:
    """Put an input into the output folder; what the recipe then says of it."""

    def into(ground: Ground) -> dict[str, str]:
        block, _, key = name.partition(".")
        source = Path(ground.recipe[block][key])
        target = ground.folder / "out" / to
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return {name: str(target)}

    return into


def globbed(ground: Ground) -> dict[str, str]:
    """A pattern that finds what an earlier run wrote beside the data."""
    found = move("data.train", "metrics.jsonl")(ground)["data.train"]
    return {"data.train": str(Path(found).parent / "*.jsonl")}


def linked(ground: Ground) -> dict[str, str]:
    (ground.folder / "link").symlink_to(ground.folder / "out/hf")
    return {"data.cache_dir": "link/cache"}


IN_THE_WAY: dict[str, tuple[Callable[[Ground], dict[str, str]], str]] = {
    "model": (move("model.name_or_path", "hf"), "out/hf`"),
    "data": (move("data.train", "metrics.jsonl"), "metrics.jsonl`"),
    "data in a step": (move("data.train", "checkpoints/step-00000004/d.jsonl"), "d.jsonl`"),
    "a pattern": (globbed, "metrics.jsonl`"),
    "cache": (lambda ground: {"data.cache_dir": "out/adapter/cache"}, "cache`"),
    "a link": (linked, "cache`"),
}


@pytest.mark.parametrize("case", IN_THE_WAY)
def test_an_input_that_would_be_moved_is_refused(
    ground: Ground, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    put, name = IN_THE_WAY[case]
    (ground.folder / "out").mkdir()
    (ground.folder / "out/environment.json").write_text('{"versions": {"uspft": "0"}}')
    changes = put(ground)
    (key,) = changes
    ground.write(changes)
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about(key, name, "moves aside or replaces; name another output_dir, or move it")


def test_many_files_that_would_be_moved_are_one_line(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ground.folder / "out/checkpoints/step-00000004"
    folder.mkdir(parents=True)
    (ground.folder / "out/environment.json").write_text('{"versions": {"uspft": "0"}}')
    for number in range(30):
        (folder / f"{number:02}.txt").write_text("a")
    ground.write({"data.train": str(folder)})
    (line,) = ground.call(capsys).lines
    assert "00.txt` is what a run in output_dir" in line and "(30 such: `" in line


@pytest.mark.parametrize("name", ["cache", "logs", "checkpoints/cache", "data.jsonl"])
def test_an_input_that_lies_beside_is_none_of_it(ground: Ground, name: str) -> None:
    ground.write({"data.cache_dir": f"out/{name}"})
    begins(ground)
    begins(ground)
    assert any((ground.folder / "out" / name).iterdir())


def test_a_recipe_where_the_run_would_write_its_own(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    ground.write({"output_dir": "."})
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about("output_dir", "writes its own recipe.yaml in place of", "another name")
    ground.write({})
    begins(ground)
    own = ground.folder / "out/recipe.yaml"
    text = own.read_text()
    from uspft.__main__ import main

    for resume in ("auto", "never"):  # what a run has left is the run's
        assert main([str(own), f"checkpoint.resume={resume}"]) == 1
    assert own.read_text() == text.replace("resume: auto", "resume: never")


@pytest.mark.parametrize("name", ["hf/config.json", "recipe.yaml", "logs/rank-0.log"])
def test_what_only_bears_a_name_of_ours_is_refused(
    ground: Ground, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = ground.folder / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    for verb in ("train", "check"):
        found = ground.call(capsys, verb, str(ground.path))
        found.about(
            "output_dir", f"/out` holds `{name.removesuffix('/config.json')}`", "another folder"
        )


def test_a_folder_in_use_is_refused_with_who_uses_it(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ground.folder / "out"
    begins(ground)
    ground.started.clear()
    lease = Lease.take(out, print)
    host = os.uname().nodename
    found = ground.call(capsys)
    found.about("output_dir", f"a run is alive in `{out}`", f"host {host}, process {os.getpid()}")
    lease.release()
    begins(ground)
    assert not list(out.glob(".lease*"))


def test_an_export_beside_a_live_run_is_refused(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.unit.checkpoint.test_folder import made
    from uspft.checkpoint import folder
    from uspft.commands import export

    out = ground.folder / "out"
    made(out, 1)
    shutil.copytree(ground.recipe["model"]["name_or_path"], folder.folder_of(out, 1) / "model")
    lease = Lease.take(out, print)
    assert export.named(out).step == 1
    (line,) = ground.call(capsys, "export", "out").lines
    assert f"process {os.getpid()}" in line and line.endswith(", or to=FOLDER")
    lease.release()


def test_room_on_the_disk_is_looked_at_first(
    ground: Ground, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from uspft.__main__ import main
    from uspft.prepare.examine import examine
    from uspft.prepare.files import space_needed
    from uspft.prepare.model import examine_model

    ground.write({"checkpoint.every_steps": 1})
    recipe = examine(ground.path, [], 1, None).recipe
    model = examine_model(recipe)
    assert model.trained == model.parameters > 10_000
    each = 12 * model.trained
    needed = space_needed(recipe, model.trained, model.parameters, recipe.training.steps)
    assert needed == 2 * each + 4 * model.parameters  # two steps, and the model in float32
    training = recipe.training.model_copy(update={"steps": None, "epochs": 9})
    recipe = recipe.model_copy(update={"training": training})
    endless = space_needed(recipe, model.trained, model.parameters, None)
    assert endless == 3 * each + 4 * model.parameters  # one more than the two that stay
    every = recipe.changed(checkpoint={"keep_last": None})
    assert space_needed(every, model.trained, 0, 7) == 7 * each, "all stay"
    (ground.folder / "out/checkpoints/step-00000001").mkdir(parents=True)
    there = space_needed(recipe, model.trained, model.parameters, None)
    assert there == 2 * each + 4 * model.parameters
    shutil.rmtree(ground.folder / "out")
    for free, code in ((needed - 1, 2), (needed, 1)):
        room = SimpleNamespace(f_bavail=free, f_frsize=1, f_blocks=free + 1, f_flag=0)
        monkeypatch.setattr(os, "statvfs", lambda path, room=room: room)
        if code == 2:
            found = ground.call(capsys)
            found.about("output_dir", "this run writes", "are free in", "make room", "keep_last")
            assert main(["check", str(ground.path)]) == 0  # it may be asked about another machine
            assert "warning: output_dir: this run writes " in capsys.readouterr().out
        else:
            begins(ground)


def test_data_and_model_that_have_moved_are_the_same(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.faults.test_bad_files import checkpoint_of
    from uspft.__main__ import main

    folder = checkpoint_of(ground)
    model, data = (
        Path(ground.recipe[b][k]) for b, k in (("model", "name_or_path"), ("data", "train"))
    )
    moved = ground.folder.parent / "moved"
    shutil.copytree(model, moved / "model")
    shutil.copy(data, moved / "other.jsonl")
    changes = {"model.name_or_path": str(moved / "model"), "data.train": str(moved / "other.jsonl")}
    ground.write(changes)
    assert main([str(ground.path)]) == 1 and ground.started
    assert f"going on from {folder}" in capsys.readouterr().out
    shutil.rmtree(ground.folder / "out")
    ground.started.clear()
    ground.write({})
    checkpoint_of(ground)
    for part, key in (("other.jsonl", "data.train"), ("model/config.json", "model.name_or_path")):
        ground.write(changes)
        text = (moved / part).read_text()
        changed = text.replace("10000.0", "20000.0") if "config" in part else text + text
        assert changed != text
        (moved / part).write_text(changed)
        ground.call(capsys).about(key, "than the checkpoint was trained on", "resume=never")
        (moved / part).write_text(text)


def test_a_damaged_checkpoint_is_named_and_stays(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.faults.test_bad_files import checkpoint_of
    from uspft.__main__ import main

    first = checkpoint_of(ground)
    second = first.with_name("step-00000002")
    shutil.copytree(first, second)
    (second / "state.json").write_text("")
    assert main([str(ground.path)]) == 1 and ground.started
    said = capsys.readouterr()
    assert (
        f"{second}/state.json is not JSON" in said.out and "the one before it is taken" in said.out
    )
    assert f"going on from {first}" in said.out and "Traceback" not in said.out + said.err
    (aside,) = (ground.folder / "out").glob("earlier-*")
    assert (aside / "checkpoints/step-00000002/state.json").exists() and not second.exists()
    (told,) = map(json.loads, (ground.folder / "out/incidents.jsonl").open())
    assert told["damaged"].startswith(f"{second}/state.json is not JSON")
    identity = json.loads((first / "state.json").read_text())["identity"]
    assert identity["seed"] == 42


def test_a_run_that_was_lost_after_its_last_step_says_that_it_started_again(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.faults.test_bad_files import checkpoint_of
    from uspft.commands.train import train
    from uspft.launcher.hosts import Hosts
    from uspft.launcher.supervise import Loss
    from uspft.prepare.host import Invocation

    folder = checkpoint_of(ground)
    metrics = ground.folder / "out/metrics.jsonl"
    metrics.write_text('{"step": 1, "loss": 2.0}\n')
    cache = ground.folder.parent / "cache/uspft"
    losses = (Loss("rank 1 was killed", 1, Hosts(), "auto"),)
    place = Invocation("train", cache=cache, losses=losses)
    words = ["training.steps=1", "export.huggingface=false"]
    assert train(ground.path, words, place) == 0 and not ground.started
    assert f"the only step is done: checkpoint {folder}" in capsys.readouterr().out
    told = {"restart": 1, "after_step": 1, "why": "rank 1 was killed"}
    for file in (metrics, metrics.with_name("incidents.jsonl")):
        assert [one for one in map(json.loads, file.open()) if "restart" in one] == [told]


@pytest.mark.parametrize("host", [0, 1])
def test_host_0_alone_reads_all_of_a_checkpoint(ground: Ground, host: int) -> None:
    from rich.console import Console

    from tests.faults.test_bad_files import checkpoint_of
    from uspft.checkpoint.checksums import sealed
    from uspft.config import Fault
    from uspft.launcher.hosts import Hosts
    from uspft.prepare.examine import examine
    from uspft.prepare.host import Invocation
    from uspft.prepare.make_job import prepare_job

    folder = checkpoint_of(ground)
    (folder / "a").write_text("a")
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(sealed({**state, "checksums": {"a": "of another file"}}))
    cache = ground.folder.parent / "cache/uspft"
    found = examine(ground.path, [f"checkpoint.resume={folder}"], 1, None)
    meeting: Any = SimpleNamespace(hosts=Hosts(2, host))
    place, screen = Invocation("train", cache=cache, meeting=meeting), Console(quiet=True)
    if host:
        assert prepare_job(found, place, screen).checkpoint
    else:
        with pytest.raises(Fault, match="a: another checksum than was written"):
            prepare_job(found, place, screen)


def test_data_that_has_gone_between_two_runs_is_named_and_nothing_is_touched(
    ground: Ground, capsys: pytest.CaptureFixture[str]
) -> None:
    """And data that was written anew; put back, the run goes on."""
    from tests.faults.test_bad_files import checkpoint_of
    from uspft.__main__ import main

    data = ground.folder.parent / "mine.jsonl"
    shutil.copy(ground.recipe["data"]["train"], data)
    text = data.read_text()
    ground.write({"data.train": str(data)})
    folder = checkpoint_of(ground)
    before = sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    data.unlink()
    ground.call(capsys).about("data.train.path", "mine.jsonl does not exist")
    data.write_text(text + text)
    ground.call(capsys).about("data.train", "than the checkpoint was trained on", "put files")
    assert before == sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    data.write_text(text)
    assert main([str(ground.path)]) == 1 and ground.started
    assert f"going on from {folder}" in capsys.readouterr().out
