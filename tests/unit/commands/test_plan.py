"""The page that `plan` prints: the recipe's own layout, the others, and what is not predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.launch import in_project
from uspft.__main__ import main
from uspft.commands.plan import TOP
from uspft.planner.step import NOT_PREDICTED

ROOT = Path(__file__).parents[3]
LLAMA = "recipes/llama3.1-8b-text-hybrid-128k.yaml"
Run = Callable[..., str]


@pytest.fixture
def planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Runs `plan` in the project's folder, which must stay as it is."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("socket.socket.connect", lambda *a: pytest.fail("a network was asked"))

    def run(*words: str) -> str:
        before = in_project()
        assert main(["plan", *words]) == 0, capsys.readouterr().err
        assert in_project() == before, "something was written"
        return capsys.readouterr().out

    return run


def table(page: str, head: str = "layout") -> dict[str, list[str]]:
    """The cells of each layout's line, and the heads at `head`."""
    lines = page.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(f"{head}  "))
    rows = [re.split(r"\s{2,}", line) for line in lines[first:]]
    width = len(rows[0])
    return {name: cells for name, *cells in rows if len(cells) + 1 == width}


def number(cell: str) -> float:
    return 0.0 if cell == "–" else float(cell.replace(",", ""))


def test_a_shipped_recipe_of_a_model_whose_weights_are_not_here(planned: Run) -> None:
    page = planned(LLAMA, "--top", "200")
    rows = table(page)
    assert rows.pop("layout") == [
        *("seconds", "GiB", "longest row", "tokens/s a rank", "MFU", "beside the first")
    ]
    assert "ulysses4-ring2 (the recipe's)" in rows and len(rows) > 40
    known = {"data8", "tensor2-data4", "tensor4-tokens-data2", "ulysses8", "ulysses2-planned4"}
    assert known <= set(rows)
    ranked = [("does not fit" in cells[-1], number(cells[0])) for cells in rows.values()]
    assert ranked == sorted(ranked), "those that do not fit stand last"
    for name, cells in rows.items():
        assert 0.1 < number(cells[4]) < 0.5, "a share of the peak"
        assert number(cells[3]) == pytest.approx(8 * 131072 / number(cells[0]) / 8, rel=0.02)
        needs, card = map(float, cells[1].split(" of "))
        assert ("does not fit" in cells[-1]) == (needs > 0.92 * card), name
        assert (number(cells[2]) >= 131072) == (needs <= 0.92 * card), name
    assert "hardware: h100 (shipped figures" in page
    assert "machine: published figures, none measured here; layouts within 12 %" in page
    assert re.search(r"^step: 8 rows of 131,072 tokens, .* recomputed$", page, re.M)
    assert re.search(r"^weights +\S+ +\S+ +239", page, re.M), "16.06 GB, twice, in 8 passes"
    assert [line for line in page.splitlines() if line.startswith("not predicted: ")] == [
        f"not predicted: {what}" for what in NOT_PREDICTED
    ]


def test_the_first_and_the_recipes_own_stand_by_part(planned: Run) -> None:
    page = planned(LLAMA)
    rows = table(page)
    first = list(rows)[1]
    assert rows[first][-1] == "the first"
    heads = re.findall(r"^by part \((.+?)\)", page, re.M)
    assert heads == [first, "ulysses4-ring2"]
    parts = table(page, f"by part ({first})")
    seconds = sum(number(parts[name][0]) for name in ("products", "attention", "elementwise"))
    whole = re.search(r"^step +(\S+)", page.split("by part")[1], re.M)
    assert whole and seconds < number(whole[1]) < 1.05 * seconds
    others = [cells[-1] for name, cells in list(rows.items())[2:]]
    assert any("all-to-all +" in why for why in others) and "tie" in " ".join(others)


def test_what_is_left_out_is_counted(planned: Run) -> None:
    page = planned(LLAMA, "data.sequence_length=65552", "--ranks", "24")
    found = re.findall(r"^left out: (\d+), since (.+)$", page, re.M)
    assert found and any("tokens of a row do not divide" in why for _, why in found)


def test_the_recipes_own_is_printed_wherever_it_stands(planned: Run) -> None:
    words = ["parallel_config.model_parallel=8", "parallel_config.context_parallel=1"]
    words += ["parallel_config.ulysses_degree_in_cp=null"]
    page = planned(LLAMA, "--top", "2", *words, "parallel_config.context_parallel_algo=null")
    names = list(table(page))[1:]
    assert len(names) == 3 and names[2] == "tensor8 (the recipe's)"
    assert re.search(r"^and \d+ more \(--top N\)$", page, re.M)


def test_only_some_ways_to_split(planned: Run) -> None:
    page = planned(LLAMA, "--only", "tensor,ring", "--top", "100")
    names = list(table(page))[1:]
    assert {"tensor4-tokens-ring2", "ring8", "tensor8", "data8"} <= set(names)
    others = {name for name in names if "ulysses" in name or "planned" in name}
    assert others == {"ulysses4-ring2 (the recipe's)"}
    assert re.search(r"^left out: \d+, since --only names other ways to split a step$", page, re.M)
    assert "more (--top N)" not in page


def test_what_only_leaves_out_stands_nowhere_on_the_page(planned: Run) -> None:
    """The first of the table is the first by part, and the Nth that is taken."""
    words = [LLAMA, "--only", "tensor,pipeline", "--top", "3"]
    page = planned(*words)
    first, *_ = names = [name.removesuffix(" (the recipe's)") for name in list(table(page))[1:]]
    heads = re.findall(r"^by part \((.+?)\)", page, re.M)
    assert heads == list(dict.fromkeys([first, "ulysses4-ring2"]))
    assert table(page)[list(table(page))[1]][-1] == "the first"
    data = json.loads(planned(*words, "--json"))
    assert [one["name"] for one in data["layouts"]] == names and data["layouts"][0]["why"] is None


def test_the_same_as_data(planned: Run) -> None:
    found = json.loads(planned(LLAMA, "--json", "--top", "5"))
    assert set(found) == {"layouts", "left_out", "machine", "model"}
    first, *_, own = found["layouts"]
    assert len(found["layouts"]) == 6 and own["own"] and not first["own"]
    assert {"name", "parallel_config", "zero_stage", "step_seconds", "parts"} <= set(first)
    assert {"memory_bytes", "fits", "longest_row_tokens", "tie", "why"} <= set(first)
    assert own["parallel_config"]["ulysses_degree_in_cp"] == 4 and own["zero_stage"] == 3
    assert first["why"] is None and first["tie"] and own["why"]
    for one in found["layouts"]:
        assert sum(one["parts"].values()) == pytest.approx(one["step_seconds"])
    page = planned(LLAMA, "--top", "5")
    printed = {name.split(" (")[0]: cells[0] for name, cells in list(table(page).items())[1:]}
    assert printed == {one["name"]: f"{one['step_seconds']:.3g}" for one in found["layouts"]}


def test_what_no_name_says_has_a_column_where_it_is_open(planned: Run) -> None:
    words = ["deepspeed.zero_optimization.stage=auto", "training.micro_batch_size=auto"]
    heads, *rows = table(planned(LLAMA, *words, "--top", "8")).values()
    assert heads[:3] == ["ZeRO", "micro-batch", "seconds"]
    found = json.loads(planned(LLAMA, *words, "--json", "--top", "8"))["layouts"]
    told = [[str(one["zero_stage"]), str(one["micro_batch_size"])] for one in found]
    assert [cells[:2] for cells in rows] == told and len({*map(tuple, told)}) > 1
    heads, first, *_ = table(planned(LLAMA, words[0], "--top", "1")).values()
    assert heads[:2] == ["ZeRO", "seconds"] and first[0] == told[0][0]


def test_the_longest_row_is_worked_out_of_as_many_as_are_printed(planned: Run) -> None:
    every = json.loads(planned(LLAMA, "--json"))["layouts"]
    known = [one["longest_row_tokens"] is not None or one["own"] for one in every]
    assert len(every) > TOP and known == [n < TOP or one["own"] for n, one in enumerate(every)]
    some = json.loads(planned(LLAMA, "--json", "--top", "30"))["layouts"]
    assert len(some) >= 30 and all(one["longest_row_tokens"] is not None for one in some)


def test_the_longest_row_is_that_of_check(planned: Run, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["memory.recompute=nothing"], ["memory.attention_heads=auto"]):
        words = [LLAMA, *more, "--ranks", "8"]
        assert main(["check", *words]) == 0
        said = re.search(r"the longest row that fits is (\d+)k;", capsys.readouterr().out)
        every = json.loads(planned(*words, "--json", "--top", "1"))
        (own,) = [one for one in every["layouts"] if one["own"]]
        assert said and own["longest_row_tokens"] == 1024 * int(said[1])


def test_memory_and_the_longest_row_stand_for_matrices_on_a_mesh(planned: Run) -> None:
    words = ["recipes/llama3.1-70b-lora-mesh-32k.yaml", "--top", "3"]
    page = planned(*words)
    cells = list(table(page).values())[1:]
    needs = [(float(line[1].split()[0]), number(line[2])) for line in cells]
    assert len(needs) == 4 and all(gib > 0 and longest > 0 for gib, longest in needs)
    found = json.loads(planned(*words, "--json"))["layouts"]
    assert all(one["memory_bytes"] > 0 and one["longest_row_tokens"] > 0 for one in found)


def test_a_layout_is_taken_as_a_recipe(
    planned: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new.yaml"
    page = planned(LLAMA, "--take", "2", "-o", str(file), "--top", "3")
    second = list(table(page))[2]
    assert f"written: {second} to {file}, with output_dir outputs/new\n" in page
    again = planned(str(file), "--top", "3")
    assert f"{second} (the recipe's)" in table(again)
    assert f"by part ({second})" in again
    for words, told in (
        (["-o", str(file), "--take", "1"], "is there already"),
        (["--take", "1"], "goes with -o FILE"),
        (["-o", str(tmp_path / "b.yaml")], "goes with --take N"),
        (["--take", "9999", "-o", str(tmp_path / "b.yaml")], "layouts; write a number"),
        (["--only", "tensr"], "did you mean `tensor`?"),
    ):
        assert main(["plan", LLAMA, *words]) == 2
        said = capsys.readouterr()
        assert told in said.err and not said.out, words
    assert not (tmp_path / "b.yaml").exists()
    data = planned(LLAMA, "--take", "2", "-o", str(tmp_path / "c.yaml"), "--top", "1", "--json")
    assert len(json.loads(data)["layouts"]) == 2, "the first and the recipe's own"
    own = file.read_text().replace("output_dir: outputs/new", "output_dir: outputs/c")
    assert (tmp_path / "c.yaml").read_text() == own, "where a run would not go on from another's"
    planned(LLAMA, "--take", "2", "-o", str(tmp_path / "d.yaml"), "output_dir=here")
    assert "output_dir: here\n" in (tmp_path / "d.yaml").read_text()


def test_a_pipeline_stands_among_the_layouts_and_its_timeline_is_drawn(
    planned: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    degrees = ["pipeline_stage=4", "pp_interleave_num=2", "context_parallel=1"]
    degrees += ["context_parallel_algo=null", "ulysses_degree_in_cp=null"]
    words = [*(f"parallel_config.{word}" for word in degrees), "data.sequence_length=8192"]
    words += ["training.global_batch_size=16"]
    picture = tmp_path / "own.svg"
    page = planned(LLAMA, *words, "--top", "400")
    rows = table(page)
    own = "data2-pipeline4x2 (the recipe's)"
    assert own in rows and {"tensor2-tokens-pipeline4", "pipeline8x4", "data8"} <= set(rows)
    assert not {name for name in rows if "pipeline16" in name or "gpipe" in name}
    assert "GiB" in rows["layout"] and rows[own][1] != "–"
    parts = table(page, "by part (data2-pipeline4x2)")
    assert number(parts["bubble"][0]) > 0 and parts["stage-messages"][2].endswith("GiB")
    assert "timeline of data2-pipeline4x2: 8 micro-batches, " in page
    lines = page.split("timeline of data2-pipeline4x2")[1].splitlines()[2:6]
    drawn = [re.split(r"\s{2,}", line) for line in lines]
    assert [cells[0] for cells in drawn] == [f"rank {n}" for n in range(4)]
    assert all(len(cells[1]) == 100 and {"0", "a", "7", "h"} <= set(cells[1]) for cells in drawn)
    assert drawn[0][1].startswith("0") and drawn[3][1].startswith("·")
    tokens = [number(cells[3]) for cells in drawn]
    assert tokens == [8192 * inputs for inputs in (11, 9, 7, 5)], "w + 1 stage inputs"
    needs = max(number(cells[4]) for cells in drawn)
    assert number(rows[own][1].split(" of ")[0]) == pytest.approx(needs, rel=0.01)
    rank = list(rows).index(own)
    page = planned(LLAMA, *words, "--take", str(rank), "--timeline", str(picture))
    assert f"drawn: data2-pipeline4x2 in {picture}" in page
    bars = ElementTree.parse(picture).getroot().iter("{http://www.w3.org/2000/svg}title")
    titles = [str(bar.text) for bar in bars]
    assert len(titles) == 4 * 2 * 8 * 2, "forward and backward of each stage and micro-batch"
    assert titles[0].startswith("forward of stage 0, micro-batch 0: 0 to ")
    data8 = list(rows).index("data8")
    for taken, told in (
        (["--take", str(data8)], "data8 has one stage"),
        (["--timeline", str(picture)], "is there already"),
    ):
        again = [] if "--timeline" in taken else ["--timeline", str(tmp_path / "b.svg")]
        assert main(["plan", LLAMA, *words, *taken, *again]) == 2
        assert told in capsys.readouterr().err
    assert not (tmp_path / "b.svg").exists()


def test_stages_that_the_recipes_keys_forbid_are_counted(planned: Run) -> None:
    words = [LLAMA, "deepspeed.zero_optimization.offload_optimizer.device=cpu"]
    left = re.findall(r"^left out: (\d+), since (.+)$", planned(*words), re.M)
    lost = [why for _, why in left if "loses gradients at stage 3" in why]
    assert len(lost) == 2 and "pp_interleave_num 4" in " ".join(lost)
    names = set(table(planned(*words, "--top", "400")))
    assert "data4-pipeline2" in names and not {name for name in names if "x2" in name}
    stage_0 = ["deepspeed.zero_optimization.stage=0", "training.global_batch_size=1"]
    single = planned(LLAMA, *stage_0, "--top", "400")
    assert "since ZeRO-0 is not available with stages" in single
    assert not {name for name in table(single) if "pipeline" in name}


def test_meshes_stand_beside_one_another_and_beside_one_dimension(planned: Run) -> None:
    words = ["context_parallel=1", "context_parallel_algo=planned_cp", "ulysses_degree_in_cp=1"]
    words += ["model_parallel=8", "tensor_parallel_algo=meshslice", "tensor_mesh=[2, 4]"]
    page = planned(LLAMA, *(f"parallel_config.{word}" for word in words))
    rows = table(planned(LLAMA, "--top", "500", *(f"parallel_config.{word}" for word in words)))
    own = "mesh2x4-planned2 (the recipe's)"
    assert own in rows and "tensor8" in rows and "mesh4x2-ulysses2-planned2" in rows
    hidden = re.search(r"^tensor +\S+ +(\S+)", page.split("by part (mesh2x4-planned2)")[1], re.M)
    assert hidden and number(hidden[1]) > 0
    slices = re.findall(r"^slices: qkv (\d+), out (\d+), gate_up (\d+), down (\d+)$", page, re.M)
    assert slices and max(map(int, slices[-1])) > 1
    assert "slices: " not in planned(LLAMA)


def test_other_ranks_and_other_hardware(planned: Run) -> None:
    for ranks, hardware in (("16", "h200"), ("16", "a800"), ("32", "l20")):
        page = planned(LLAMA, "--ranks", ranks, "--hardware", hardware)
        assert f"layout: {ranks} processes" in page
        assert f"hardware: {hardware} (as launch.hardware says)" in page
    slow, fast = (
        number(table(planned(LLAMA, f"--hardware={name}", "--top", "500"))["tensor8"][0])
        for name in ("l20", "h100")
    )
    assert slow > 2 * fast


def test_a_cpu_has_no_peak_and_its_recipe_no_type_of_a_gpu(planned: Run) -> None:
    page = planned("recipes/quickstart.yaml")
    rows = table(page)
    assert all(cells[4] == cells[2] == "–" for name, cells in rows.items() if name != "layout")
    assert "hardware: cpu " in page and "float32: the products" not in page
    words = ["recipes/quickstart.yaml", "--hardware", "h100", "model.dtype=bfloat16"]
    page = planned(*words, "launch.device=auto")
    assert "bfloat16 on cuda" in page, "the named hardware's device is planned for"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([LLAMA, "--hardware", "h1000"], "did you mean `h100`?"),
        ([LLAMA, "--hardware"], "command line: launch.hardware: "),
        ([LLAMA, "--ranks", "0"], "`0` is no whole number above 0"),
        ([LLAMA, "--ranks", "3"], "does not divide the 3 processes"),
        ([LLAMA, "--steps", "3"], "plan takes no such option; write training.steps=N"),
        ([LLAMA, "model.name_or_path=org/nobody"], "the sizes of org/nobody are not on this"),
        (["check", LLAMA, "--hardware", "h100"], "check takes no such option"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    verb = [] if words[0] == "check" else ["plan"]
    assert main([*verb, *words]) == 2
    assert told in capsys.readouterr().err


def test_rows_of_the_data_stand_for_all_where_it_is_here(planned: Run, tmp_path: Path) -> None:
    recipe = "recipes/llama3.1-8b-text-hybrid-128k.yaml"
    alone = planned(recipe, "--top", "3")
    assert ", each priced as one document, since the data is not here" in alone
    data = tmp_path / "d.jsonl"
    lengths = [300] * 40 + [9000] * 4 + [60000]
    data.write_text("".join(json.dumps({"input_ids": [7] * n}) + "\n" for n in lengths))
    words = [recipe, f"data.train={data}", "data.format=tokenized", "--top", "3"]
    page = planned(*words)
    (step,) = re.findall(r"^step: .*$", page, re.M)
    assert re.search(r"priced by \d+ rows of the first records, of \S+ documents", step), step
    found = json.loads(planned(*words, "--json"))
    rows = found["model"]["rows"]
    assert rows["sampled"] > 8 and rows["documents_per_row"] > 20
    one = json.loads(planned(recipe, "--top", "3", "--json"))
    assert one["model"]["rows"] == {"sampled": 0}
    seconds = [each["layouts"][0]["parts"]["attention"] for each in (found, one)]
    assert seconds[0] < 0.7 * seconds[1], "documents of a row see less than all of it"
