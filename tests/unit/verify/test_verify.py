"""What `verify` knows before ranks start: layouts, depth, tolerances, the verdict."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_documents, make_model
from tests.support.refused import Ground
from uspft.__main__ import main
from uspft.config import Fault, Recipe
from uspft.model.hf_config import model_config
from uspft.planner.layouts import Candidate, candidates, chosen
from uspft.planner.memory import (
    USABLE_SHARE,
    Sizes,
    fitting_depth,
    sizes_of,
    why_not_plain,
    with_depth,
)
from uspft.prepare.examine import layout_findings
from uspft.verify import work as verify_work
from uspft.verify.report import Report
from uspft.verify.result import Difference, Measured, Result, group_of
from uspft.verify.verdict import FIXED, MAX_TOLERANCE, PLAIN, measured_tolerance, mismatches
from uspft.verify.work import VerifyJob


def recipe(folder: Path = Path("model"), **blocks: Any) -> Recipe:
    base: dict[str, Any] = {
        "model": {"name_or_path": str(folder), "dtype": "float32"},
        "data": {"train": "d.jsonl", "sequence_length": 96},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
    }
    return Recipe.model_validate(
        {key: {**base.get(key, {}), **blocks.get(key, {})} for key in {**base, **blocks}}
    )


def layouts(given: Recipe, ranks: int) -> list[Candidate]:
    return candidates(given, ranks, lambda r, layout: layout_findings(r, layout, None))


def own(**parallel: Any) -> dict[str, Any]:
    return {"parallel_config": parallel}


RING = own(data_parallel=1, context_parallel=2, context_parallel_algo="ring_cp")


@pytest.mark.parametrize(("ranks", "count"), [(1, 1), (2, 5), (4, 11), (8, 19)])
def test_every_layout_is_there_once(ranks: int, count: int) -> None:
    found = layouts(recipe(data={"sequence_length": 128}), ranks)
    assert len(found) == count == len({one.name for one in found})
    assert all(one.layout.ranks == ranks and one.reason is None for one in found)
    degrees = {(one.layout.ulysses, one.layout.ring, one.layout.data) for one in found}
    every = {
        (u, r, ranks // (u * r))
        for u in range(1, ranks + 1)
        for r in range(1, ranks + 1)
        if ranks % (u * r) == 0
    }
    assert degrees == every


def test_the_recipes_own_layout_is_first_and_there_once() -> None:
    hybrid = own(
        data_parallel=1,
        context_parallel=4,
        context_parallel_algo="hybrid_cp",
        ulysses_degree_in_cp=2,
    )
    found = layouts(recipe(**hybrid), 4)
    assert found[0].name == "hybrid_cp 2×2" and len(found) == 11
    found = layouts(recipe(**own(data_parallel=2, context_parallel_algo="ring_cp")), 2)
    assert [one.name for one in found][:2] == ["whole rows, data 2", "ulysses_cp 2"]


def test_what_is_illegal_says_why() -> None:
    given = recipe(**RING, data={"sequence_length": 98})
    reasons = {one.name: one.reason for one in layouts(given, 2)}
    assert reasons["ulysses_cp 2"] is None and reasons["whole rows, data 2"] is None
    assert "98 tokens do not split into 4" in str(reasons["ring_cp 2"])
    stage0 = {"deepspeed": {"zero_optimization": {"stage": 0}}, "model": {"dtype": "bfloat16"}}
    reasons = {one.name: one.reason for one in layouts(recipe(**RING, **stage0), 2)}
    assert reasons["whole rows, data 2"] is None  # one micro-batch
    assert "in bfloat16 would accumulate 2" in str(reasons["ring_cp 2"])


def test_of_very_many_the_kept_ones_have_every_trait() -> None:
    every = layouts(recipe(data={"sequence_length": 512}), 32)
    assert len(every) > 24 and chosen(every, None) == every
    found = chosen(every, 24)
    kept = [one for one in found if one.reason is None]
    assert len(kept) == 24 and len(found) == len(every) and kept[0] == every[0]
    for trait in ("context_parallel_algo", "context_parallel"):
        values = [Counter(getattr(one.parallel, trait) for one in some) for some in (kept, every)]
        assert values[0].keys() == values[1].keys()
    assert all("--all" in str(one.reason) for one in found if one not in kept)


def test_depth_follows_memory_and_keeps_every_kind_of_layer() -> None:
    sizes = Sizes(1000, (100,) * 6, ("full", "full", "window", "full", "full", "window"), 10, 5)
    assert sizes.shallowest == 3
    for depth in range(3, 7):
        need = math.ceil(sizes.need_bytes(depth) / USABLE_SHARE)
        assert fitting_depth(sizes, need) == depth
        assert depth == 3 or fitting_depth(sizes, need - 1) == depth - 1
    with pytest.raises(Fault, match="3 of 6 layers"):
        fitting_depth(sizes, math.ceil(sizes.need_bytes(3) / USABLE_SHARE) - 1)


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    windows = {"layer_types": ["full_attention", "sliding_attention"], "use_sliding_window": True}
    make_model(tmp_path, "qwen2", kv_heads=2, sliding_window=5, **windows)
    given = recipe(tmp_path)
    sizes = sizes_of(given, model_config(given.model, given.data.sequence_length), with_plain=True)
    assert sizes.shallowest == 2 and len(sizes.layers) == 2
    shapes = json.loads((tmp_path / "config.json").read_text())
    assert sizes.outside == 2 * shapes["vocab_size"] * 64 + 64
    shorter = with_depth(given, 1)
    config = model_config(shorter.model, shorter.data.sequence_length)
    assert (config.num_hidden_layers, config.layer_types) == (1, ["full_attention"])
    assert sum(sizes_of(shorter, config, with_plain=True).layers) == sizes.layers[0]
    longer = recipe(tmp_path, data={"sequence_length": 192})
    more = sizes_of(
        longer, model_config(longer.model, longer.data.sequence_length), with_plain=True
    )
    assert more.need_bytes(2) > sizes.need_bytes(2)


def test_plain_transformers_is_left_out_with_a_reason(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2", kv_heads=2)

    def why(memory: int = 1 << 34, **blocks: Any) -> str | None:
        given = recipe(tmp_path, **blocks)
        return why_not_plain(given, model_config(given.model, 96), memory)

    assert why() is None
    assert "at most" in str(why(data={"sequence_length": 8192}))
    assert "dropout" in str(why(model={"adapter": {"dropout": 0.1}}))
    assert why(model={"adapter": {"dropout": 0.0}}) is None
    assert "too much memory" in str(why(memory=1 << 18))
    make_model(tmp_path, "gemma2", kv_heads=2)  # whose soft-cap transformers writes out
    assert why() is None
    long = {"data": {"sequence_length": 4096}, "memory": 1 << 30}
    assert "every score of 4,096 tokens" in str(why(**long))
    make_model(tmp_path, "qwen2", kv_heads=2)
    assert why(**long) is None


def result(loss: float = 2.0, norm: float = 1.0, off: float = 0.0) -> Result:
    groups = {"attention": Difference(off, "q"), "mlp": Difference(0.0, "up")}
    return Result(Measured([loss], [norm], [7]), groups)


REFERENCE = Measured([2.0], [1.0], [7])


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (result(loss=2.0001), "loss"),
        (result(loss=math.nan), "loss"),
        (result(norm=1.001), "gradient norm"),
        (result(norm=math.inf), "gradient norm"),
        (result(off=1e-3), "gradient of q"),
        (result(off=math.inf), "gradient of q"),
        (Result(Measured([2.0], [1.0], [6]), {}), "target tokens"),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), "the loss is nan"),
        (Result(Measured(), {}), "loss"),
    ],
)
def test_a_mismatch_is_named(wrong: Result, word: str) -> None:
    assert mismatches(result(), REFERENCE, FIXED["float32"]) == []
    found = mismatches(wrong, REFERENCE, FIXED["float32"])
    assert found and word in found[0]


def test_in_bfloat16_the_yardstick_is_one_process_beside_float32() -> None:
    plain = result(loss=2.005, off=0.05)
    assert measured_tolerance("float32", REFERENCE, plain) == FIXED["float32"]
    assert measured_tolerance("bfloat16", REFERENCE, None) == FIXED["bfloat16"]
    found = measured_tolerance("bfloat16", REFERENCE, plain)
    assert found.loss == pytest.approx(4 * 0.005 / 2.005)
    assert found.of_group("attention") == pytest.approx(0.2)
    assert found.of_group("mlp") == FIXED["bfloat16"].every / 4
    far = measured_tolerance("bfloat16", REFERENCE, result(loss=9.0, off=9.0))
    assert (far.loss, far.of_group("attention")) == (PLAIN["bfloat16"].loss, MAX_TOLERANCE)


def report(*results: Result | None, inject: str | None = None, plain: Result | None = None) -> Any:
    every = layouts(recipe(**RING), 2)[: len(results)]
    every = [
        one if found else replace(one, reason="why")
        for one, found in zip(every, results, strict=True)
    ]
    facts = {"dtype": "float32"}
    return Report.of(facts, (REFERENCE, plain), list(zip(every, results, strict=True)), inject)


def test_the_verdict_of_all() -> None:
    good, bad = result(), result(off=0.1)
    assert report(good, good, plain=good).ok and report(good, None).ok
    assert not report(good, bad).ok and not report(good, plain=bad).ok and not report(None).ok
    assert report(bad, bad, inject="mask").ok
    assert not report(bad, good, inject="mask").ok and not report(good, inject="mask").ok
    assert not report(bad, inject="mask", plain=bad).ok
    text = report(good, bad, None).text()
    assert "ring_cp 2 (the recipe's)" in text and "not tried: ulysses_cp 2: why" in text
    assert "gradient of q off by 1.0e-01" in text and "whole rows differ too" in text
    nowhere = replace(
        report(good), reference=Measured([2.0], [1.0], [7], "step 2: the loss is nan")
    )
    assert not nowhere.ok and "one process: step 2: the loss is nan" in nowhere.text()
    missed = report(bad, good, inject="mask").text()
    assert "NOT CAUGHT: --inject mask shows in 1 of 2 layouts, not in whole rows" in missed
    entries = json.loads(json.dumps(report(good, result(off=math.inf)).as_json(), allow_nan=False))
    assert [one["verdict"] for one in entries["layouts"]] == ["equal", "DIFFERS"]
    assert entries["verdict"] == "differs"


def scaled(share: float, loss: float = 2.0, mlp: float | None = None) -> Result:
    """Every gradient off by a share."""
    groups = {"attention": Difference(share, "q"), "mlp": Difference(mlp or share, "up")}
    return Result(Measured([loss], [1.0 + share], [7]), groups)


@pytest.mark.parametrize(
    ("wrong", "scale"),
    [
        (scaled(2e-3, loss=2.004), True),
        (scaled(2e-3), True),  # gradients alone
        (scaled(2e-3, loss=2.4), False),
        (scaled(2e-3, mlp=2e-2), False),
        (scaled(math.inf), False),
        (result(off=0.1), False),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), False),
    ],
)
def test_one_factor_in_all_is_a_scale_and_not_attention(wrong: Result, scale: bool) -> None:
    every = report(wrong, result(), wrong, wrong, wrong).text()
    assert "every layout that shares rows differs" in every
    assert ("a wrong scale" in every) == scale == ("attention kernel, mask or" not in every)
    assert ("a wrong scale" in report(wrong, wrong).text()) == scale
    some = report(wrong, result(), result()).text()
    assert "only some layouts differ" in some and ("a wrong scale" in some) == scale


@pytest.fixture
def ranks_answer(monkeypatch: pytest.MonkeyPatch) -> list[Result]:
    """What the layouts' ranks leave, in turn, in place of running; the one process leaves 2.0."""
    answers: list[Result] = []

    def answer(words: Any, *rest: Any, **more: Any) -> int:
        work = VerifyJob.read(Path(words[0]))
        if work.is_reference:
            Result(REFERENCE, {}).leave(work.folder / verify_work.REFERENCE)
            return 0
        for one in answers[: len(work.layouts)]:
            one.leave(work.folder / verify_work.LAYOUTS)
        return 0 if answers else 1

    monkeypatch.setattr("uspft.commands.verify.start_ranks", answer)
    return answers


@pytest.mark.parametrize(
    ("last", "words", "code", "verdict"),
    [
        (result(), [], 0, "equal"),
        (result(off=1e-3), [], 1, "differs"),
        (Result(Measured(stopped="step 1: the loss is nan"), {}), [], 1, "differs"),
        (result(), ["--inject", "mask"], 1, "not caught"),
        (None, [], 1, None),
    ],
)
def test_the_command_says_it_by_its_exit_code(
    last: Result | None,
    words: list[str],
    code: int,
    verdict: str | None,
    ranks_answer: list[Result],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make_model(tmp_path / "model", "llama")
    given = {
        "model": {"name_or_path": str(tmp_path / "model"), "dtype": "float32"},
        "data": {"train": str(make_documents(tmp_path / "d.jsonl", [32, 20], masked=[0.0]).path)},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
        "output_dir": str(tmp_path / "out"),
    }
    given["data"] |= {"sequence_length": 32, "cache_dir": str(tmp_path / "cache")}
    (tmp_path / "r.yaml").write_text(json.dumps(given))
    ranks_answer += [*[result(off=0.1 if words else 0.0)] * 4, last] if last else []
    assert main(["verify", str(tmp_path / "r.yaml"), *words]) == code
    path = tmp_path / "out" / "verify" / "verify.json"
    assert (json.loads(path.read_text())["verdict"] if path.exists() else None) == verdict
    assert verdict is None or "5 layouts" in capsys.readouterr().out


def test_parameters_have_groups() -> None:
    names = {
        "model.embed_tokens.weight": "embedding",
        "lm_head.weight": "head",
        "model.layers.0.self_attn.q_proj.bias": "attention",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.1.mlp.experts.gate_up_proj": "mlp",
        "base_model.model.layers.0.self_attn.q_proj.lora_A.default.weight": "adapter",
        "something": "other",
    }
    assert {name: group_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--inject", "banana"], "unknown fault `banana`; write one of order, mask, scale, label"),
        (["--inject"], "unknown fault ``"),
        (["--steps", "0"], "`0` is no number of steps"),
        (["--ranks", "2"], "verify takes no such option; write launch.processes=N"),
        (["--quick"], "unknown option"),
        (["training.stepz=3"], "did you mean `steps`"),
    ],
)
def test_wrong_words_are_refused(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = {
        "model": {"config": "configs/models/quickstart.json", "tokenizer": "data/tokenizer"},
        "data": {"train": "README.md", "sequence_length": 64, "overlong": "split"},
        "training": {"steps": 3, "global_batch_size": 2},
        "launch": {"device": "cpu", "processes": 2},
    }
    ground = Ground(tmp_path, tree)
    ground.write({})
    lines = ground.call(capsys, "verify", str(ground.path), *words).lines
    assert len(lines) == 1 and told in lines[0]
