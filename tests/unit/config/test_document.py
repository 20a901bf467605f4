"""Reading YAML: what the room refuses before it looks at a single key, and where it says so."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hangs import HANG_SECONDS
from tests.support.launch import ROOT
from uspft.config import RecipeError, as_tree, dump, load
from uspft.config.document import bare, meant, parse, plain, token_count

GOOD = """\
model: {name_or_path: org/name}
data: {train: x.jsonl, sequence_length: 4k}
training: {steps: 3, global_batch_size: 2}
"""


def write(folder: Path, text: str | bytes, name: str = "r.yaml") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


def lines(file: Path, *overrides: str) -> list[str]:
    """The problems of a recipe, its folder cut off."""
    with pytest.raises(RecipeError) as caught:
        load(file, overrides)
    assert str(caught.value) == "\n".join(map(str, caught.value.problems))
    return [str(p).replace(f"{file.parent}/", "") for p in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E5", 1e5),
        ("1_000", 1000),
        ("-.5e-3", -0.5e-3),
        ("+7", 7),
        ("0", 0),
        ("5.", 5.0),
        ("true", True),
        ("FALSE", False),
        ("~", None),
        ("", None),
        ("1:30", "1:30"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("yes", "yes"),
        ("on", "on"),
        (".inf", ".inf"),
        (".nan", ".nan"),
        ("1e999", "1e999"),
        ("2024-01-02", "2024-01-02"),
        ("None", "None"),
        ("1__0", "1__0"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_an_unquoted_scalar(text: str, value: object) -> None:
    assert plain(text) == value
    assert type(plain(text)) is type(value)


def test_binary_tokens_and_what_a_string_was_meant_as() -> None:
    assert [token_count(t) for t in ("128k", "1m", "2K", "1M")] == [131072, 2**20, 2048, 2**20]
    assert [token_count(t) for t in ("k", "1.5k", "128 k", "-1k", "12", "1g")] == [None] * 6
    assert meant("10k") == "write 10000 or 10240"
    assert meant("1m") == "write 1000000 or 1048576"
    assert meant("No") == "write false"
    assert meant("010") == "write 10"
    assert meant("some text") is None


BROKEN = {
    "duplicate": (
        GOOD + "seed: 1\nseed: 2\n",
        "r.yaml:5: seed: duplicate key, first at r.yaml:4; keep one of them",
    ),
    "python tag": (
        GOOD + "seed: !!python/object/apply:os.getpid []\n",
        "r.yaml:4: seed: has the tag `!!python/object/apply:os.getpid`, and tags are not read; "
        "leave it out",
    ),
    "own tag": (
        GOOD + "seed: !x 3\n",
        "r.yaml:4: seed: has the tag `!x`, and tags are not read; leave it out",
    ),
    "two documents": (
        GOOD + "---\n" + GOOD,
        "r.yaml:4: a second document starts here; keep one recipe a file",
    ),
    "number as key": (
        GOOD + "7: 1\n",
        'r.yaml:4: 7: the key is not a string; write "7": in quotes, or a name',
    ),
    "list as key": (
        GOOD + "? [a]\n: 1\n",
        "r.yaml:4: a key here is a list or a mapping; write a name as key",
    ),
    "merge key": (
        GOOD + "<<: {seed: 1}\n",
        "r.yaml:4: <<: merge keys are not read; write the values out, or use `base:`",
    ),
    "merge key with what is required": (
        GOOD.replace("training: {", "training: {<<: {steps: 1}, ").replace("steps: 3, ", ""),
        "r.yaml:3: training.<<: merge keys are not read; write the values out, or use `base:`",
    ),
    "a list": ("- 1\n", "r.yaml:1: is not a mapping of keys; write `key: value`"),
    "a word": ("\nhello\n", "r.yaml:2: is not a mapping of keys; write `key: value`"),
    "empty": ("", "r.yaml:1: is empty; write a recipe"),
    "comment": ("# later\n", "r.yaml:1: is empty; write a recipe"),
    "not UTF-8": (
        GOOD.encode() + b"seed: \xff\n",
        "r.yaml:4: is not UTF-8; save the file as UTF-8",
    ),
    "an alias of itself": (
        GOOD + "seed: &s [*s]\n",
        "r.yaml:4: seed[0]: an alias contains itself; write the value out",
    ),
    "no such alias": (
        GOOD + "seed: *s\n",
        "r.yaml:4: is not YAML: found undefined alias 's'; "
        "check indentation; quote text that holds : # * & [ or {",
    ),
    "a tab": (
        "model:\n\tname: x\n",
        "r.yaml:2: is not YAML: found character '\\t' that cannot start any token; "
        "check indentation; quote text that holds : # * & [ or {",
    ),
    "a control character": (
        GOOD + "seed: \x07\n",
        "r.yaml:4: is not YAML: special characters are not allowed; "
        "check indentation; quote text that holds : # * & [ or {",
    ),
    "deep": (
        GOOD + "seed: " + "[" * 5000,
        "r.yaml:4: is nested more than 60 levels deep; flatten it",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_one_problem_with_its_line(tmp_path: Path, name: str) -> None:
    text, message = BROKEN[name]
    assert lines(write(tmp_path, text)) == [message]


def test_files_that_are_none(tmp_path: Path) -> None:
    assert lines(tmp_path / "no.yaml") == ["no.yaml:1: does not exist; check the path"]
    (tmp_path / "mine.yaml").touch()
    (near,) = lines(tmp_path / "mine.yml")
    assert near == "mine.yml:1: does not exist; did you mean `mine.yaml`?"
    (shipped,) = lines(tmp_path / "quickstart")
    assert shipped.endswith("; to copy the shipped recipe of that name: recipes quickstart")
    for name in ("recipes/quickstart.yaml", "configs/zero/zero3.yaml"):
        (fragment,) = lines(write(tmp_path, f"base: [{name}]\n{GOOD}"))
        assert fragment.endswith(f"`{name}` does not exist; write {ROOT / name}")
    (tmp_path / "folder").mkdir()
    assert lines(tmp_path / "folder") == ["folder:1: is a folder; name a YAML file"]
    large = write(tmp_path, GOOD + "#" * 300_000)
    assert lines(large) == ["r.yaml:1: is larger than 262144 bytes; name a recipe"]


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 30)]
    begin = time.monotonic()
    (message,) = lines(write(tmp_path, "\n".join(rows)))
    assert time.monotonic() - begin < HANG_SECONDS
    assert "aliases expand to more than 100000 values" in message
    assert message.startswith("r.yaml:")


def test_an_honest_alias_is_read(tmp_path: Path) -> None:
    tree, problems = parse("a: &x {k: 1}\nb: *x\n", lambda line: f"f:{line}")
    assert tree is not None and not problems
    assert bare(tree) == {"a": {"k": 1}, "b": {"k": 1}}


def test_base_merges_mappings_and_replaces_the_rest(tmp_path: Path) -> None:
    write(tmp_path, "deepspeed: {zero_optimization: {stage: 3, sub_group_size: 5}}\n", "c/z.yaml")
    write(
        tmp_path, "base: [z.yaml]\nseed: 1\noptimizer: {betas: [0.5, 0.5], eps: 1e-6}\n", "c/o.yaml"
    )
    top = "base: [c/o.yaml]\nseed: 2\noptimizer: {betas: [0.1, 0.2]}\ndeepspeed:\n"
    top += "  zero_optimization: {stage: 2}\n"
    loaded = load(write(tmp_path, top + GOOD))
    assert loaded.recipe.seed == 2
    assert loaded.recipe.optimizer.betas == (0.1, 0.2)
    assert loaded.recipe.optimizer.eps == 1e-6
    assert loaded.recipe.deepspeed.zero_optimization == {"stage": 2, "sub_group_size": 5}
    where = loaded.origins.where
    assert where("optimizer.eps") == f"{tmp_path}/c/o.yaml:3"
    assert where("optimizer.betas") == f"{tmp_path}/r.yaml:3"
    assert where("deepspeed.zero_optimization.sub_group_size") == f"{tmp_path}/c/z.yaml:1"
    assert where("optimizer.weight_decay") == f"{tmp_path}/r.yaml:3"
    assert where("memory.loss_tile_tokens") == f"{tmp_path}/r.yaml:1"
    assert str(loaded.origins.problem("seed", "is odd", "write 4")).endswith(
        "r.yaml:2: seed: is odd; write 4"
    )


def test_bases_that_are_wrong(tmp_path: Path) -> None:
    write(tmp_path, "base: [b.yaml]\n", "a.yaml")
    write(tmp_path, "base: [a.yaml]\n", "b.yaml")
    write(tmp_path, "seed: [\n", "broken.yaml")
    (tmp_path / "folder").mkdir()
    text = "base:\n- a.yaml\n- no.yaml\n- 3\n- broken.yaml\n- folder\n"
    assert lines(write(tmp_path, text)) == [
        "b.yaml:1: base[0]: `a.yaml` leads back to a file that names it; break the circle",
        "r.yaml:3: base[1]: `no.yaml` does not exist; check the path",
        "r.yaml:4: base[2]: expected the path of a file; write base: [FILE]",
        "broken.yaml:2: is not YAML: expected the node content, but found '<stream end>'; "
        "check indentation; quote text that holds : # * & [ or {",
        "r.yaml:6: base[4]: `folder` is a folder; name a YAML file",
    ]
    assert lines(write(tmp_path, "base: x.yaml\n")) == [
        "r.yaml:1: base: expected a list of files; write base: [x.yaml]"
    ]
    for level in range(9):
        write(tmp_path, f"base: [d{level + 1}.yaml, d{level + 1}.yaml]\n", f"d{level}.yaml")
    write(tmp_path, "seed: 1\n", "d9.yaml")
    assert "comes after 100 other fragments" in lines(tmp_path / "d0.yaml")[0]


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    overrides = ["seed=1", "seed=7", "optimizer.learning_rate=1e-5", "data.sequence_length=1m"]
    overrides += ["deepspeed.zero_optimization={stage: 3}", "model.overrides.a.b=[1, 2]"]
    loaded = load(file, overrides)
    assert loaded.recipe.seed == 7
    assert loaded.recipe.data.sequence_length == 2**20
    assert loaded.recipe.deepspeed.zero_optimization == {"stage": 3}
    assert loaded.recipe.model.overrides == {"a": {"b": [1, 2]}}
    assert loaded.origins.where("data.sequence_length") == "command line"
    assert loaded.origins.where("data.packing") == f"{file}:2"


OPEN = {"data_parallel", "model_parallel", "context_parallel", "context_parallel_algo"}
OPEN |= {"ulysses_degree_in_cp", "tensor_mesh", "tensor_slices"}


def test_auto_in_the_place_of_degrees_leaves_open_all_that_is_not_set(tmp_path: Path) -> None:
    """A mapping of a fragment under it is replaced, and one above it says what is set."""
    write(
        tmp_path,
        "parallel_config: {context_parallel: 8, tensor_parallel_algo: meshslice}\n",
        "set.yaml",
    )
    write(tmp_path, "parallel_config: auto\n", "auto.yaml")

    algorithm = "tensor_parallel_algo"

    def parallel(text: str, *words: str) -> dict[str, str]:
        found = load(write(tmp_path, text + GOOD), words).recipe
        written = as_tree(found.parallel_config).items()
        return {key: value for key, value in written if key in OPEN or key == algorithm}

    whole = dict.fromkeys(OPEN, "auto") | {algorithm: "megatron"}
    assert parallel("parallel_config: auto\n") == whole
    assert parallel("base: [set.yaml]\nparallel_config: auto\n") == whole
    assert parallel("base: [set.yaml, auto.yaml]\n") == whole
    assert parallel("base: [set.yaml]\n", "parallel_config=auto") == whole
    four = whole | {"context_parallel": 4}
    assert parallel("parallel_config: auto\n", "parallel_config.context_parallel=4") == four
    both = ["parallel_config=auto", "parallel_config.context_parallel=4"]
    assert parallel("base: [set.yaml]\n", *both) == four
    assert parallel("base: [auto.yaml]\nparallel_config: {context_parallel: 4}\n") == four
    eight = whole | {"context_parallel": 8, algorithm: "meshslice"}
    assert parallel("base: [auto.yaml, set.yaml]\n") == eight
    null = parallel("parallel_config: auto\n", "parallel_config.context_parallel=null")
    assert null == whole | {"context_parallel": 1}


def test_what_is_open_is_written_as_it_was_read(tmp_path: Path) -> None:
    text = "parallel_config: auto\ndeepspeed: {zero_optimization: {stage: auto}}\n"
    first = load(write(tmp_path, text + GOOD), ["training.micro_batch_size=auto"]).recipe
    written = dump(first, {"parallel_config.context_parallel": "a reason: # " + "long " * 40})
    assert load(write(tmp_path, written)).recipe == first
    tree = as_tree(first)
    assert tree["deepspeed"]["zero_optimization"]["stage"] == "auto"
    assert tree["training"]["micro_batch_size"] == "auto"
    lines = written.splitlines()
    place = lines.index("  context_parallel: auto")
    assert lines[place - 3].startswith("  # a reason: # long ")
    assert all(line.startswith("  # ") for line in lines[place - 3 : place])
    assert max(map(len, lines)) <= 100


def test_overrides_that_are_wrong(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    wrong = ["seed", "=1", "data..x=1", "seed=", "base=[x]", "model.name_or_path.x=1"]
    wrong += ["data.train=[", "seed=!!int 3", "optimizer.betas=3", "a." * 500 + "a=1"]
    found = lines(file, *wrong)
    form = "is not of the form key.path=value; write key.path=value, such as training.steps=10"
    assert found[:6] == [
        f"command line: seed: {form}",
        f"command line: =1: {form}",
        f"command line: data..x=1: {form}",
        "command line: seed: has no value; write seed=null for none",
        "command line: base: cannot be set on the command line; "
        "list the fragment under `base:` in the recipe",
        "command line: model.name_or_path.x: `model.name_or_path` is a single value; "
        "replace it whole: model.name_or_path=...",
    ]
    assert found[6].startswith("command line: data.train: is not YAML: ")
    assert found[7].startswith("command line: seed: has the tag `!!int`")
    assert found[9:] == [
        "command line: optimizer.betas: expected [beta1, beta2], got 3; write [beta1, beta2]"
    ]
    assert len(found) == 10


def test_a_problem_is_one_line(tmp_path: Path) -> None:
    (message,) = lines(write(tmp_path, GOOD + '"a\\nb": 1\n'))
    assert message.startswith("r.yaml:4: a\\nb: unknown key `a\\nb`; known here: output_dir, ")


def test_importing_the_room_is_light() -> None:
    code = "import sys, uspft.config; print([m for m in ('torch', 'transformers', 'deepspeed') "
    code += "if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
