"""What a run writes in its output folder, by name; everything else stays where it is."""

from __future__ import annotations

import json
from pathlib import Path

from uspft.written import (
    clear_partial,
    is_of_a_run,
    is_written,
    lacks_export,
    later_than,
    new_exports,
    outdate_exports,
    publish_exports,
    set_aside,
    written,
)

OF_A_RUN = (
    *("recipe.yaml", "metrics.jsonl", "incidents.jsonl", "environment.json"),
    "report.html",
    "hf/model.safetensors",
    *("adapter/adapter_config.json", "logs/rank-0.log", "logs/rank-13.log"),
    *("checkpoints/latest", "checkpoints/step-00000010/state.json", ".exports-outdated"),
)
OF_THE_USER = (
    *("data.jsonl", ".git/config", "my.yaml", "run2/metrics.jsonl", "run2/hf/config.json"),
    *("logs/mine.log", "logs/rank-x.log", "checkpoints/step-best/state.json", "checkpoints/notes"),
    *("checkpoints/step-00000010-good/state.json", "earlier-20250101-000000/metrics.jsonl"),
    *("verify/verify.json", "hf2/config.json", "cache/x", "report.md"),
)


def fill(output: Path) -> None:
    for name in (*OF_A_RUN, *OF_THE_USER):
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        (output / name).write_text(name)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_names_are_told_apart() -> None:
    assert [name for name in OF_A_RUN if not is_written(Path(name))] == []
    assert [name for name in OF_THE_USER if is_written(Path(name))] == []
    assert not is_written(Path(".")) and not is_written(Path("checkpoints"))


def test_only_what_a_run_wrote_moves_and_never_twice_to_one_place(tmp_path: Path) -> None:
    assert set_aside(tmp_path, written(tmp_path)) is None
    places = set()
    for _ in range(3):
        fill(tmp_path)
        place = set_aside(tmp_path, written(tmp_path))
        assert place and place.parent == tmp_path and place.name.startswith("earlier-")
        assert files(place) == set(OF_A_RUN)
        assert all((tmp_path / name).read_text() == name for name in OF_THE_USER)
        places.add(place)
    assert len(places) == 3


def test_going_on_moves_later_checkpoints(tmp_path: Path) -> None:
    fill(tmp_path)
    for step in (5, 15, 20):
        (tmp_path / f"checkpoints/step-{step:08d}").mkdir()
    place = set_aside(tmp_path, later_than(tmp_path, 10))
    assert place and {str(p.relative_to(place)) for p in place.rglob("*") if p.is_dir()} == {
        *("checkpoints", "checkpoints/step-00000015", "checkpoints/step-00000020"),
    }
    assert set_aside(tmp_path, later_than(tmp_path, 10)) is None
    assert (tmp_path / "metrics.jsonl").exists() and (tmp_path / "checkpoints/step-best").exists()


def test_exports_stay_until_new_ones_are_whole(tmp_path: Path) -> None:
    assert lacks_export(tmp_path, "hf")
    outdate_exports(tmp_path)
    assert list(tmp_path.iterdir()) == [], "there are none that could be outdated"
    for name in ("hf", "adapter"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").touch()
    assert not lacks_export(tmp_path, "hf")
    outdate_exports(tmp_path)
    assert lacks_export(tmp_path, "hf") and files(tmp_path) >= {"hf/old", "adapter/old"}
    (new_exports(tmp_path) / "hf").mkdir(parents=True)
    (new_exports(tmp_path) / "hf/new").touch()
    assert (tmp_path / "hf/old").exists()
    place = publish_exports(tmp_path)
    assert place and files(place) == {"hf/old", "adapter/old"}
    assert not lacks_export(tmp_path, "hf") and files(tmp_path / "hf") == {"new"}
    assert {path.name for path in tmp_path.iterdir()} == {"hf", place.name}


def test_a_run_s_folder_is_known_by_what_only_a_run_writes(tmp_path: Path) -> None:
    for name in ("hf", "logs", "checkpoints", "checkpoints/step-best"):
        (tmp_path / name).mkdir()
    (tmp_path / "recipe.yaml").write_text("pizza: 4")
    (tmp_path / "environment.json").write_text('{"versions": ["3.11"]}')
    assert not is_of_a_run(tmp_path) and not is_of_a_run(tmp_path / "nowhere")
    (tmp_path / "environment.json").write_text(json.dumps({"versions": {"uspft": "0.1"}}))
    assert is_of_a_run(tmp_path)
    (tmp_path / "environment.json").unlink()
    for name in ("checkpoints/step-00000001", "metrics.jsonl"):
        (tmp_path / name).mkdir()
        assert is_of_a_run(tmp_path)
        (tmp_path / name).rmdir()


def test_what_a_killed_run_left_half_written_goes(tmp_path: Path) -> None:
    fill(tmp_path)
    halves = (
        *("checkpoints/.step-00000011.partial/part-0", "checkpoints/.latest.partial"),
        *(".exports.partial/.hf.partial/shard-0", ".exports.partial/adapter/x"),
        *(".metrics.jsonl.partial", "..exports-outdated.partial"),
    )
    mine = ".mine.partial/x", "checkpoints/.step-best.partial/x", "checkpoints/.notes"
    for name in halves + mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    clear_partial(tmp_path)
    assert files(tmp_path) == {*OF_A_RUN, *OF_THE_USER, *mine}
