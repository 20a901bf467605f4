"""docs/keys.md and the editors' schema are what the code says, and say what the loader does."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Strict, create_model

from uspft.config.algorithms import AUTO, CONTEXT
from uspft.config.document import bare, parse, plain, token_count
from uspft.config.loading import mappings
from uspft.config.messages import words as allowed
from uspft.config.problems import Fault
from uspft.config.recipe import Recipe, TrainingBlock
from uspft.config.reference import GROUPED, Key, blocks, keys, main, page, schema
from uspft.config.types import Count, RecipeBlock, Text, validated

ROOT = Path(__file__).parents[3]
FILES = ("keys.md", "recipe.schema.json")
SCHEMA = schema()
KEYS = mappings()
EVERY = [key for at, kind in blocks().items() for key in keys(kind, at)]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """The command that makes the reference, as a person starts it."""
    program = [sys.executable, "-m", "uspft.config.reference", *words]
    return subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_pages_are_what_the_code_says(tmp_path: Path) -> None:
    done = command("--check")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert command(str(tmp_path)).returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (ROOT / "docs" / name).read_bytes()


def test_a_changed_meaning_is_seen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--check"]) == 0
    monkeypatch.setattr(TrainingBlock.model_fields["steps"], "description", "Something else.")
    assert main(["--check"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0].rpartition("/")[2] for line in told] == list(FILES[:2])
    assert main(["--check", str(tmp_path)]) == 1, "a page that is missing"


def unsaid(found: list[Key]) -> list[str]:
    """Keys that do not have a meaning of one line, ended as a sentence is, and what is allowed."""
    said = re.compile(r"[^\n]{10,}[.]")
    return [key.path for key in found if not (said.fullmatch(key.meaning) and allowed(key.node))]


def test_every_key_has_a_meaning() -> None:
    assert unsaid(EVERY) == []
    for kind in blocks().values():
        for name, field in kind.model_fields.items():
            assert len(field.description or "") <= 100, (kind, name)
        assert re.fullmatch(r"[^\n]{10,}[.:]", (kind.__doc__ or "").splitlines()[0]), kind


def test_every_key_that_the_loader_knows_is_there() -> None:
    found = {at: {key.name for key in keys(kind, at)} for at, kind in blocks().items()}
    named = {at: set(KEYS[at]) for at in found}
    named[""] = named[""] - set(found) | {"base"}
    assert found == named
    assert len(EVERY) >= 108
    assert {at for at in KEYS if not at.startswith(("deepspeed.", "logging."))} == set(found)


def test_a_key_without_a_meaning_is_seen() -> None:
    class Silent(RecipeBlock):
        spoken: Count = 1
        """This one says what it is."""
        silent: Count = 1

    assert unsaid(keys(Silent, "")) == ["silent"]


def test_the_page_tells_what_is_not_available_yet() -> None:
    by_path = {key.path: key for key in EVERY}
    text = page()
    asked = [key for key in EVERY if key.later]
    for key in asked:
        assert "not available yet: write " in key.meaning and key.meaning in text
    assert len(asked) == sum("not available yet" in key.meaning for key in EVERY) > 0
    assert by_path["model.trust_remote_code"].default is False, (
        "what a recipe gets, not what is to come"
    )


# The part of JSON Schema that ours uses, written from its definition.


def accepts(node: dict[str, Any], value: Any) -> bool:
    """Whether a schema lets a value pass. Raises KeyError for a word that is not known here."""
    return all(WORDS[word](node, value) for word in node)


def number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


TYPES = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "number": number,
    "integer": lambda v: number(v) and math.isfinite(v) and v == int(v),
}
ALWAYS = dict.fromkeys(
    ("description", "default", "title", "$schema", "$defs"), lambda node, value: True
)
WORDS: dict[str, Any] = {
    **ALWAYS,
    "type": lambda n, v: TYPES[n["type"]](v),
    "enum": lambda n, v: any(type(v) is type(one) and v == one for one in n["enum"]),
    "anyOf": lambda n, v: any(accepts(part, v) for part in n["anyOf"]),
    "$ref": lambda n, v: accepts(SCHEMA["$defs"][n["$ref"].rpartition("/")[2]], v),
    "pattern": lambda n, v: not isinstance(v, str) or bool(re.search(n["pattern"], v)),
    "minimum": lambda n, v: not number(v) or v >= n["minimum"],
    "maximum": lambda n, v: not number(v) or v <= n["maximum"],
    "exclusiveMinimum": lambda n, v: not number(v) or v > n["exclusiveMinimum"],
    "exclusiveMaximum": lambda n, v: not number(v) or v < n["exclusiveMaximum"],
    "items": lambda n, v: not isinstance(v, list) or all(accepts(n["items"], i) for i in v),
    "minItems": lambda n, v: not isinstance(v, list) or len(v) >= n["minItems"],
    "maxItems": lambda n, v: not isinstance(v, list) or len(v) <= n["maxItems"],
    "required": lambda n, v: not isinstance(v, dict) or set(n["required"]) <= set(v),
    "properties": lambda n, v: (
        not isinstance(v, dict)
        or all(accepts(part, v[k]) for k, part in n["properties"].items() if k in v)
    ),
    "additionalProperties": lambda n, v: not isinstance(v, dict) or set(v) <= set(n["properties"]),
}


def property_of(path: str) -> dict[str, Any]:
    """The schema of a key."""
    node: dict[str, Any] = SCHEMA
    *above, name = path.split(".")
    for part in above:
        listed = {"train[]": "Source", "eval[]": "Source", "strategies[]": "Strategy"}
        kind = "AdapterBlock" if part == "adapter" else listed.get(part)
        node = {"$ref": kind} if kind else node["properties"][part]
        node = node["anyOf"][0] if part == "parallel_config" else node  # or `auto`
        node = SCHEMA["$defs"][node["$ref"].rpartition("/")[2]]
    found: dict[str, Any] = node["properties"][name]
    return found


VALUES: list[Any] = [
    *(-7.25, -1, 0, 1, 2, 3, 0.5, 1.5, 1e-30, 10**12, True, False, None),
    *(
        "",
        " ",
        "text",
        "auto",
        "none",
        "never",
        "list",
        "4k",
        "128K",
        "2m",
        "4kb",
        "1.5k",
        "cpu",
        "torch",
    ),
    *("lora", "adamw", "list", "causal"),
    *(
        "all",
        "split",
        "skip",
        "cosine",
        "meshslice",
        "bfloat16",
        "tokens",
        "ring_cp",
        "colossalai_cp",
    ),
    *("ulyses_cp", {"labels": None}, {"roles": {"human": "user"}}, {"label": "x"}),
    *([], [1], [1, 2], [0.1, 0.5], [0.1, 1.0], ["a"], ["a", {"path": "b", "split": "c"}], [[]]),
    *([{"split": "c"}], [{"path": "b", "weight": 0}], [{"max_length": "4k"}], [{}], [0, 1]),
    *({}, {"zzz": [1]}, {"stage": 3}, {"stage": 4}, {"stage": 1, "overlap_comm": None}),
    *({"rank": 4}, {"rank": 0}, {"rope_type": "yarn"}, {"rope_type": "yarn", "factor": 0.5}),
    *({"rope_type": "yarn", "low_freq_factor": 1}, {"rope_type": "longrope"}, {"rope_type": "x"}),
    *({"enabled": True}, {"enabled": "yes"}, {"block_size": 5e8}, {"queue_depth": 0}),
]
# Where a schema cannot say what the check knows: any key may stand in a free mapping, but values
# that were meant otherwise are refused there.
_FILES = (Annotated[tuple[Text, ...], Strict(False)], ...)
FREE = ("model.overrides", "logging.wandb", "logging.mlflow")


@pytest.mark.parametrize("key", EVERY, ids=lambda key: key.path)
def test_the_schema_lets_pass_what_the_check_does(key: Key) -> None:
    node, passed = property_of(key.path), []
    kind = blocks().get(key.path.rpartition(".")[0])
    field = kind.model_fields.get(key.name) if kind else None
    assert field or key.path == "base"
    alone = create_model(
        "Alone", __base__=RecipeBlock, one=(field.annotation, field) if field else _FILES
    )
    for value in VALUES:
        try:
            validated(alone, {"one": value})
        except Fault:
            assert not accepts(node, value) or key.path in FREE, value
        else:
            assert accepts(node, value), value
            passed.append(value)
    assert 0 < len(passed) < len(VALUES)
    if not key.path.startswith("data.eval[]"):  # which shares the meanings of data.train[]
        assert node["description"] == key.meaning
    if not key.required:
        assert accepts(node, node["default"])


def test_numbers_as_only_yaml_files_have_them() -> None:
    steps = property_of("training.steps")
    for text in ("1_000", "-1_000", "10_000.5", "1_0e3"):
        assert isinstance(plain(text), int | float) and accepts(steps, text)
        assert re.search(GROUPED, text)
    for text in ("1000", "1__0", "_1", "0_1", "1_"):
        assert not re.search(GROUPED, text), "written so, an editor reads a number or uspft none"
    length = property_of("data.sequence_length")
    for text in ("4k", "128K", "1m", "4 k", "4kb", "k", "-4k", "1_0k", "４k"):
        assert accepts(length, text) == (token_count(text) is not None), text


def test_the_schema_lists_the_algorithms() -> None:
    synonyms = {name for row in CONTEXT.values() for name in row.synonyms}
    listed = property_of("parallel_config.context_parallel_algo")["enum"]
    assert set(listed) == {*CONTEXT, *synonyms, AUTO, None}
    assert len(CONTEXT) == 5 and synonyms


def recipes() -> dict[str, str]:
    """Every YAML that we ship: recipes, fragments, and what pages show."""
    rooms = [ROOT / "recipes", *(ROOT / "configs" / room for room in ("zero", "parallel"))]
    files = [file for room in rooms for file in room.glob("*.yaml")]
    found = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    for path in pages():
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.S)):
            found[f"{path.relative_to(ROOT).as_posix()}, {number}"] = text
    return found


def pages() -> list[Path]:
    named = [ROOT / name for name in ("README.md", "data/README.md", "uspft/model/README.md")]
    return [*named, *sorted((ROOT / "docs").glob("*.md"))]


def words() -> Iterator[str]:
    """`key.path=value` of every command that a page shows; `export` takes no keys of a recipe."""
    for path in pages():
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if line.startswith(("./launch.sh", "$ ./launch.sh")) and " export " not in line:
                shown = shlex.split(line, comments=True)
                yield from (word for word in shown if re.match(r"[a-z_]+(\.[a-z_]+)*=", word))


def read(text: str) -> Any:
    tree, problems = parse(text, str)
    assert tree is not None and problems == []
    return bare(tree)


def test_every_recipe_that_we_ship_passes_the_schema() -> None:
    found = recipes()
    assert [name for name, text in found.items() if not accepts(SCHEMA, read(text))] == []
    assert len([name for name in found if name.startswith("recipes/")]) == 24
    assert len([name for name in found if name.startswith("configs/")]) == 13
    assert len(found) >= 19, "what pages show"


def test_every_key_on_a_command_line_that_a_page_shows_exists() -> None:
    refused = []
    shown = list(words())
    for word in shown:
        key, _, value = word.partition("=")
        tree = read(value)
        for name in reversed(key.split(".")):
            tree = {name: tree}
        if not accepts(SCHEMA, tree):
            refused.append(key)
    assert refused == ["parallel_config.context_paralel"], "the one that README shows as refused"
    assert len(shown) >= 5


@pytest.mark.parametrize(
    "text",
    [
        "sed: 1",
        "model: {dtyp: float32}",
        "model: {dtype: float8}",
        "model: null",
        "data: {train: [{pth: x}]}",
        "data: {sequence_length: 128kb}",
        "parallel_config: {context_parallel_algo: ulysses}",
        "deepspeed: {zero_optimization: {stage: 4}}",
        "deepspeed: {bf16: {enabled: true}}",
        "optimizer: {betas: [0.9]}",
        "training: {steps: '10'}",
        "base: configs/zero/zero3.yaml",
        "[seed]",
    ],
)
def test_a_wrong_recipe_is_seen(text: str) -> None:
    assert not accepts(SCHEMA, read(text))
    assert accepts(SCHEMA, {"seed": 1})


def test_the_schema_needs_nothing_that_a_fragment_leaves_out() -> None:
    assert "required" not in SCHEMA
    named = [name for name, field in Recipe.model_fields.items() if field.is_required()]
    assert named == ["model", "data", "training"]
    assert accepts(SCHEMA, {name: {} for name in named})
