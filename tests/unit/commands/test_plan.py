"""The page that `plan` prints: the recipe's own layout, the others, and what is not predicted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import in_project
from uspft.__main__ import main
from uspft.planner.step import NOT_PREDICTED

ROOT = Path(__file__).parents[3]
LLAMA = "recipes/llama3.1-8b-text-hybrid-128k.yaml"


@pytest.fixture
def planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> object:
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


def test_a_shipped_recipe_of_a_model_whose_weights_are_not_here(planned: object) -> None:
    page = planned(LLAMA)  # type: ignore[operator]
    rows = table(page)
    heads = rows.pop("layout")
    assert heads[0] == "step" and heads[-2:] == ["tokens/s a rank", "MFU"]
    own, *others = rows
    assert own == "ulysses4-ring2 (the recipe's)"
    known = {"data8 (does not fit)", "tensor2-data4", "tensor4-data2", "tensor8", "ulysses8"}
    assert known <= set(others)
    assert len(others) == len(set(others)) == 10
    ranked = [(name.endswith(" (does not fit)"), number(rows[name][0])) for name in others]
    assert ranked == sorted(ranked), "those that do not fit stand last"
    parts = heads.index("hidden")
    for name, cells in rows.items():
        values = [number(cell) for cell in cells]
        assert values[0] == pytest.approx(sum(values[1:parts]) - values[parts], rel=0.02), name
        assert 0.2 < values[-1] < 0.5, "a share of the peak"
        assert values[-2] == pytest.approx(8 * 131072 / values[0] / 8, rel=0.02)
    assert "hardware: h100 (shipped figures" in page
    memory = table(page, "GiB a rank")
    assert memory["GiB a rank"] == ["activations", "state", "of the card", "longest row"]
    assert list(rows) == list(memory)[1:] and memory["tensor8"] == ["–"] * 4
    marked = {name for name in others if name.endswith(" (does not fit)")}
    assert marked == {name for name in others if number(memory[name][2]) > 0.92}
    assert number(memory["data8 (does not fit)"][3]) < 131072 < number(memory["ulysses8"][3])
    assert [line for line in page.splitlines() if line.startswith("not predicted: ")] == [
        "not predicted: memory with matrices that ranks divide",
        *(f"not predicted: {what}" for what in NOT_PREDICTED),
    ]
    assert re.search(r"^step: 8 rows of 131,072 tokens, .* recomputed$", page, re.M)
    assert re.search(r"^weights +\S+ +\S+ +239", page, re.M), "16.06 GB, twice, in 8 passes"


@pytest.mark.parametrize(
    "words", [["model_parallel=2"], ["context_parallel_algo=allgather_cp"]], ids=["tensor", "keys"]
)
def test_the_recipe_s_own_layout_is_told_where_nothing_predicts_its_memory(
    planned: object, words: list[str]
) -> None:
    plain = ["context_parallel=4", "ulysses_degree_in_cp=null", "context_parallel_algo=ring_cp"]
    page = planned(LLAMA, *(f"parallel_config.{word}" for word in [*plain, *words]))  # type: ignore[operator]
    memory = table(page, "GiB a rank")
    own, *others = list(memory)[1:]
    assert own.endswith(" (the recipe's)") and memory[own] == ["–"] * 4 and own in table(page)
    assert any(number(memory[name][2]) for name in others)
    assert "not predicted: memory with " in page


def test_what_holds_weights_that_are_too_much_does_not_fit(planned: object) -> None:
    """Also where nothing predicts the rest: 70 billion parameters of a LoRA run are 131 GiB."""
    page = planned("recipes/llama3.1-70b-lora-tensor-32k.yaml")  # type: ignore[operator]
    layouts = list(table(page))
    assert layouts[1] == "tensor8 (the recipe's)" and "data8 (does not fit)" in layouts
    assert {"tensor2-data4", "tensor4-data2"} <= set(layouts) and "GiB a rank" not in page
    assert "not predicted: memory with LoRA or with matrices that ranks divide" in page
    words = ["parallel_config.model_parallel=1", "parallel_config.use_seq_parallel=false"]
    whole = planned("recipes/llama3.1-70b-lora-tensor-32k.yaml", *words)  # type: ignore[operator]
    assert "data8 (the recipe's, does not fit)" in table(whole)


def test_meshes_stand_beside_one_another_and_beside_one_dimension(planned: object) -> None:
    words = ["context_parallel=1", "context_parallel_algo=planned_cp", "ulysses_degree_in_cp=1"]
    words += ["model_parallel=8", "tensor_parallel_algo=meshslice", "tensor_mesh=[2, 4]"]
    page = planned(LLAMA, *(f"parallel_config.{word}" for word in words))  # type: ignore[operator]
    lines = page.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("mesh (rows × columns)"))
    meshes = [re.split(r"\s{2,}", line) for line in lines[first : first + 5]]
    assert meshes[0][1:] == ["seconds", "in one slice", "qkv", "out", "gate_up", "down"]
    assert {cells[0].split(" (")[0] for cells in meshes[1:]} == {"1 × 8", "2 × 4", "4 × 2", "8 × 1"}
    assert [c[0] for c in meshes if "(the recipe's)" in c[0]] == ["2 × 4 (the recipe's)"]
    seconds = [number(cells[1]) for cells in meshes[1:]]
    assert seconds == sorted(seconds)
    assert all(number(cells[1]) < number(cells[2]) for cells in meshes[1:])
    rows = table(page)
    own = "mesh2x4-planned2 (the recipe's)"
    assert own in rows and "tensor8" in rows
    heads = rows["layout"]
    hidden = {name: number(rows[name][heads.index("hidden")]) for name in (own, "tensor8")}
    assert hidden[own] > hidden["tensor8"] == 0
    short = planned(
        LLAMA, *(f"parallel_config.{word}" for word in words), "data.sequence_length=1024"
    )  # type: ignore[operator]
    assert short.count("not by the rule: ") == 4
    assert "mesh (rows" not in planned(LLAMA)  # type: ignore[operator]


def test_other_ranks_and_other_hardware(planned: object) -> None:
    for ranks, hardware in (("16", "h200"), ("16", "a800"), ("32", "l20")):
        page = planned(LLAMA, "--ranks", ranks, "--hardware", hardware)  # type: ignore[operator]
        assert f"layout: {ranks} processes" in page
        assert f"hardware: {hardware} (as launch.hardware says)" in page
    slow, fast = (
        number(table(planned(LLAMA, f"--hardware={name}"))["tensor8"][0])  # type: ignore[operator]
        for name in ("l20", "h100")
    )
    assert slow > 2 * fast


def test_a_cpu_has_no_peak_and_its_recipe_no_type_of_a_gpu(planned: object) -> None:
    page = planned("recipes/quickstart.yaml")  # type: ignore[operator]
    rows = table(page)
    assert all(cells[-1] == "–" for name, cells in rows.items() if name != "layout")
    assert "hardware: cpu " in page and "float32: the products" not in page
    words = ["recipes/quickstart.yaml", "--hardware", "h100", "model.dtype=bfloat16"]
    page = planned(*words, "launch.device=auto")  # type: ignore[operator]
    assert "bfloat16 on cuda" in page, "the named hardware's device is planned for"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([LLAMA, "--hardware", "h1000"], "did you mean `h100`?"),
        ([LLAMA, "--hardware"], "command line: launch.hardware: "),
        ([LLAMA, "--ranks", "0"], "`0` is no number of ranks"),
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
