"""The tables of other tools' keys: every row leads somewhere, and none is written twice; keys and
files of other tools are each told what they are called here, or why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.converted import EXAMPLES
from tests.support.problems import lines
from uspft.config import load
from uspft.config.document import parse
from uspft.config.loading import mappings
from uspft.config.other_tools import FOLDER, TOOLS, hint_of, table_of, tool_of
from uspft.config.problems import InputError
from uspft.config.recipe import Recipe

TABLES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def test_each_tool_has_a_table_and_each_table_a_tool() -> None:
    below = {name for tool in TOOLS.values() for name in tool.below}
    assert set(TABLES) == set(TOOLS) | below
    assert len(TABLES) == 10
    assert sum(len(table_of(name).rows) for name in ("trainer", "deepspeed", "axolotl")) > 600


@pytest.mark.parametrize("name", TABLES)
def test_a_row_leads_to_a_key_that_exists_or_says_why(name: str) -> None:
    known = {f"{at}.{key}" if at else key for at, keys in mappings().items() for key in keys} | {
        "base"
    }
    rows = table_of(name).rows.values()
    leads = [row.to for row in rows if row.becomes in ("same", "translate")]
    assert [to for to in leads if to not in known] == []
    assert [row.key for row in rows if row.becomes == "same" and not row.to] == []
    assert [row.key for row in rows if row.hint.remedy[-1:] in ("", ".")] == []
    assert [row.key for row in rows if row.becomes != "refuse" and (row.but or row.unless)] == []
    assert [row.key for row in rows if row.unless and row.unless not in known] == []


@pytest.mark.parametrize("name", TABLES)
def test_no_key_has_two_rows(name: str) -> None:
    """A YAML reader would take the last without a word."""
    text = (FOLDER / f"{name}.yaml").read_text()
    _, problems = parse(text, str)
    assert [str(problem) for problem in problems if "duplicate" in problem.what] == []


def test_a_row_that_says_more_than_a_row_does_is_no_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from uspft.config import other_tools as table

    monkeypatch.setattr(table, "FOLDER", tmp_path)
    for said in ('{same: seed, ignore: "no"}', "{same: seed, when: 1}", "{ignore: 3}", "{}"):
        (tmp_path / "people.yaml").write_text(f'"":\n  key: {said}\n')
        table.table_of.cache_clear()
        with pytest.raises((ValueError, TypeError)):
            table.table_of("people")
    table.table_of.cache_clear()


ACCUMULATION = (
    "here it is `training.global_batch_size`; rows of a whole step: per-device batch × "
    "accumulation × replicas; the accumulation follows from it, whatever the number of ranks"
)
MICRO = (
    "here it is `training.micro_batch_size`; rows of one forward of a replica; the whole step's "
    "are `training.global_batch_size`"
)
PREFERENCES = "uspft trains on texts and answers by cross-entropy; preference training is not here"
BLOCK = "it is a block of MindSpore Transformers: "
OPTIMIZER_SHARDS = (
    "here it is `deepspeed.zero_optimization.stage`; true is stage 1, or 2 and 3 as its neighbours "
    "say; false is stage 0, or 1 with stages and with several micro-batches in bfloat16"
)
ANSWERS = "here it is `data.train_on`; true is all; false, the default, is assistant"
TEMPLATE = (
    "here it is `data.chat_template`; null for the tokenizer's own; chatml, llama3 and gemma are "
    "files in data/templates; other names are not read"
)
TUNER = "here it is `model.adapter`; full trains all weights; lora, the default, an adapter"
STAGE = (
    "here it is `data.format`; sft trains answers and pt texts; rm, ppo, dpo and kto are refused: "
    "preference training is not here"
)

# By tool, what somebody who comes from it would write, and the sentence.
NAMES: dict[str, dict[str, str]] = {
    "mindspore": {
        "parallel_config: {vocab_emb_dp: false}": "leave it out: under tensor degrees the "
        "embedding is split by tokens of the vocabulary",
        "parallel_config: {gradient_aggregation_group: 4}": "leave it out: gradients are summed in "
        "buckets of bytes",
        "parallel: {parallel_mode: 1}": f"{BLOCK}`parallel_mode` is `parallel_config` here",
        "model_config: {num_layers: 2}": f"{BLOCK}`num_layers` is `model.config` here",
        "model: {model_config: {num_layers: 2}}": f"{BLOCK}`num_layers` is `model.config` here",
        "model: {arch: {type: LlamaForCausalLM}}": f"{BLOCK}`type` is `model.config` here",
        "parallel_config: {enable_parallel_optimizer: false}": OPTIMIZER_SHARDS,
        "enable_parallel_optimizer: true": OPTIMIZER_SHARDS,
        "use_parallel: true": "here it is `parallel_config`; where it is false every degree is 1",
        "micro_batch_interleave_num: 2": "here it is `training.global_batch_size`; it multiplies "
        "the batch",
        "runner_config: {epochs: 2}": f"{BLOCK}`epochs` is `training.epochs` here",
        "runner_wrapper: {use_clip_grad: true}": f"{BLOCK}`use_clip_grad` is "
        "`training.max_grad_norm` here",
        "recompute_config: {recompute: true}": f"{BLOCK}`recompute` is "
        "`memory.gradient_checkpointing` here",
        "context: {mode: 0}": "it is a block of MindSpore Transformers, whose configurations "
        "`convert` reads; leave it out",
        "lr_schedule: {lr_end: 0}": "here it is `lr_schedule.min_learning_rate`",
        "lr_schedule: {learning_rate: 1e-5}": "here it is `optimizer.learning_rate`; the peak",
        "pretrained_model_dir: here": "here it is `model.name_or_path`; the Hugging Face folder",
        "use_ring_attention: true": "here it is `parallel_config.context_parallel_algo`; ring_cp "
        "in place of allgather_cp",
        "run_mode: finetune": "leave it out: a recipe without a verb before it trains; eval and "
        "predict are refused",
    },
    "axolotl": {
        "base_model: org/name": "here it is `model.name_or_path`",
        "train_on_inputs: false": ANSWERS,
        "data: {train_on_inputs: true}": ANSWERS,
        "sequence_len: 4096": "here it is `data.sequence_length`",
        "sample_packing: true": "here it is `data.packing`; true is best_fit, which packs whole "
        "documents; false is none, which pads each to a row",
        "micro_batch_size: 1": MICRO,
        "gradient_accumulation_steps: 4": ACCUMULATION,
        "val_set_size: 0.1": "here it is `data.eval_fraction`; a share, never a number of samples; "
        "0 is null",
        "adapter: lora": "here it is `model.adapter`; lora; qlora becomes LoRA on weights that are "
        "not quantised",
        "sequence_parallel_degree: 4": "here it is `parallel_config.context_parallel`; ranks that "
        "share a row; replicas are ranks ÷ it",
        "excess_length_strategy: drop": "here it is `data.overlong`; drop, which is the default, "
        "and truncate stay, raise is error",
        "rl: dpo": PREFERENCES,
        "chat_template: chatml": TEMPLATE,
    },
    "llamafactory": {
        "stage: sft": STAGE,
        "stage: dpo": STAGE,
        "finetuning_type: full": TUNER,
        "cutoff_len: 4096": "here it is `data.sequence_length`",
        "template: qwen": TEMPLATE,
        "train_on_prompt: false": ANSWERS,
        "mask_history: true": "here it is `data.train_on`; true is last",
        "neat_packing: true": "here it is `data.packing`; true is best_fit",
        "lora_target: all": "here it is `model.adapter.target_modules`; all, the default, is null: "
        "all linear projections of the layers",
        "val_size: 0.1": "here it is `data.eval_fraction`; a share, never a number of samples",
        "preprocessing_num_workers: 4": "here it is `data.workers`",
    },
    "swift": {
        "tuner_type: lora": TUNER,
        "train_type: full": TUNER,
        "split_dataset_ratio: 0.01": "here it is `data.eval_fraction`; 0 is null",
        "attn_impl: flash_attn": "here it is `model.attention`; `auto` takes flash attention where "
        "it is installed and exact",
        "loss_scale: last_round": "here it is `data.train_on`; default is assistant, last_round "
        "last, all all; weights inside an answer are refused",
        "truncation_strategy: delete": "here it is `data.overlong`; delete, the default, is drop, "
        "right is truncate, split stays; left is refused",
        "rlhf_type: kto": PREFERENCES,
    },
    "trl": {
        "training: {gradient_accumulation_steps: 4}": ACCUMULATION,
        "per_device_train_batch_size: 1": MICRO,
        "assistant_only_loss: true": "here it is `data.train_on`; true is assistant; false, the "
        "default, all",
        "dataset_text_field: content": "here it is `data.fields`; as {text: …}",
        "average_tokens_across_devices: true": "leave it out: the loss is always divided by the "
        "target tokens of the whole step",
        "load_best_model_at_end: true": "here it is `checkpoint.keep_best`",
        "push_to_hub: true": "leave it out: a run uploads nothing; afterwards `hf upload ORG/NAME "
        "OUTPUT/hf` does",
    },
    "accelerate": {
        "num_processes: 8": "here it is `launch.processes`; all devices, which count in the batch",
        "zero_stage: 3": "here it is `deepspeed.zero_optimization.stage`",
        "mixed_precision: bf16": "here it is `model.dtype`; bf16 is bfloat16, no is float32; fp16 "
        "and fp8 are refused",
    },
    "megatron": {
        "tensor_model_parallel_size: 2": "here it is `parallel_config.model_parallel`",
        "sequence_parallel: true": "here it is `parallel_config.use_seq_parallel`",
        "train_iters: 10": "here it is `training.steps`",
    },
    "people": {
        "sequence_parallel: 4": "here it is `parallel_config.context_parallel`",
        "optimizer: {name: adamw}": "here it is `optimizer.type`; adamw is the only one",
        "device: cuda": "here it is `launch.device`",
        "gpus: 4": "here it is `launch.processes`",
        "max_seq_len: 8": "here it is `data.sequence_length`",
    },
}
CASES = [(text, said) for names in NAMES.values() for text, said in names.items()]


def written(text: str) -> tuple[str, str, Any]:
    """The path of the unknown key in a line of YAML, its last part and its value."""
    at, value = "", yaml.safe_load(text)
    while isinstance(value, dict) and (not at or at in mappings()):
        ((key, value),) = value.items()
        at = f"{at}.{key}" if at else key
    return at, key, value


@pytest.mark.parametrize(("text", "said"), CASES)
def test_a_key_of_another_tool_has_a_sentence_of_its_own(
    tmp_path: Path, text: str, said: str
) -> None:
    path, key, _ = written(text)
    found = lines(tmp_path, text)
    assert found == [f"r.yaml:2: {path}: unknown key `{key}`; {said}"]


def test_sixty_names_of_all_tools_are_asked() -> None:
    assert len(CASES) >= 60 and NAMES.keys() == TOOLS.keys()
    for tool, names in NAMES.items():
        for text in names:
            path, key, _ = written(text)
            rows = table_of(tool).rows
            inside = (row for row in rows if f".{row}.".find(f".{key}.") >= 0)
            assert path in rows or key in rows or next(inside, None), (tool, text)


def test_what_is_no_key_of_another_tool_has_no_hint() -> None:
    for key in ("sead", "steps", "names", "path", "name", "nvme_path", "offload"):
        assert hint_of(key, "", 1) is None, key
    assert hint_of("stage", "", 3) is None, "a stage of theirs is a word"
    assert hint_of("template", "data", "x") is None, "it means that outside all blocks alone"
    for key, ours in (("max_length", "data.sequence_length"), ("do_eval", "data.eval")):
        hint = hint_of(key, "data", 1)  # another tool has the key too, and it does nothing there
        assert hint is not None and hint.to == {ours}
    block = hint_of("runner_config", "", {"epochs": 1, "batch_size": 2, "sink_mode": True})
    assert block is not None
    assert block.to == {"training.epochs", "training.micro_batch_size"}


TOLD = {
    "axolotl-chat.yaml": "axolotl",
    "llamafactory-full.yaml": "LLaMA-Factory",
    "swift-lora.yaml": "ms-swift",
    "trl-ring.yaml": "TRL and transformers' Trainer",
    "trainer-deepspeed.json": "TRL and transformers' Trainer",
    "accelerate-sp.yaml": "accelerate",
}


@pytest.mark.parametrize("name", TOLD)
def test_a_configuration_given_as_a_recipe_is_told_in_one_line(name: str) -> None:
    file = EXAMPLES / name
    for words in ((), ("training.steps=3",)):
        with pytest.raises(InputError) as told:
            load(file, words)
        assert str(told.value) == (
            f"{file}:1: is a configuration of {TOLD[name]}, and no recipe; write ./launch.sh "
            f"convert {file} -o RECIPE.yaml"
        )


def test_mindspore_s_is_told_too_and_a_recipe_is_none(tmp_path: Path) -> None:
    theirs = "seed: 1\nrunner_config: {epochs: 2}\ntrainer: {type: x}\nparallel: {full_batch: 1}\n"
    (tmp_path / "r.yaml").write_text(theirs)
    with pytest.raises(InputError, match="is a configuration of MindSpore Transformers, and no"):
        load(tmp_path / "r.yaml")
    (tmp_path / "r.yaml").write_text(f"{theirs}training: {{steps: 1}}\n")
    with pytest.raises(InputError, match="unknown key `runner_config`"):
        load(tmp_path / "r.yaml")
    ours = tuple(Recipe.model_fields)
    assert tool_of(ours, ours) is None
    assert tool_of(("learning_rate", "max_steps"), ours) is None, "too few to say"
    trainers = tool_of(("learning_rate", "max_steps", "bf16"), ours)
    assert trainers is not None and trainers.name == "trl", "the Trainer's own"


@pytest.mark.parametrize("device", ["tpu", "npu", "xpu", "mps", "TPU"])
def test_a_device_that_is_not_used_is_no_misspelt_other(tmp_path: Path, device: str) -> None:
    (found,) = lines(tmp_path, f"launch: {{device: {device}}}")
    assert found.endswith(
        f"launch.device: unknown value `{device}`; ranks compute on NVIDIA GPUs and on CPUs alone: "
        "write auto | cuda | cpu"
    )
    (gpu,) = lines(tmp_path, "launch: {device: gpu}")
    assert gpu.endswith("unknown value `gpu`; GPUs are cuda here: write auto | cuda | cpu")


OF_ITS_BLOCK = {
    "model: {path: x}": "here it is `model.name_or_path`",
    "model: {name: x}": "here it is `model.name_or_path`",
    "data: {path: x}": "here it is `data.train`",
    "lr_schedule: {name: cosine}": "here it is `lr_schedule.type`",
    "logging: {steps: 3}": "here it is `logging.every_steps`",
    "checkpoint: {steps: 3}": "here it is `checkpoint.every_steps`",
    "parallel_config: {cp: 2}": "here it is `parallel_config.context_parallel`",
    "parallel_config: {dp: 2}": "here it is `parallel_config.data_parallel`",
    "parallel_config: {pp: 2}": "here it is `parallel_config.pipeline_stage`",
    "path: x": "known here: ",
    "name: x": "known here: ",
    "launch: {name: x}": "known here: ",
    "checkpoint: {path: x}": "known here: ",
}


NEAR = {
    "sead: 1": "did you mean `seed`?",
    "Seed: 1": "did you mean `seed`?",
    "model: {dytpe: float32}": "did you mean `dtype`?",
    "training: {max_grad_nrm: 1}": "did you mean `max_grad_norm`?",
    "checkpoint: {every_stpes: 5}": "did you mean `every_steps`?",
    "steps: 3": "it belongs to `training.steps`",
    "stage: 3": "it belongs to `deepspeed.zero_optimization.stage`",
    "nvme_path: x": "known here: ",
    "offload: true": "known here: ",
    "names: [x]": "known here: ",
    "sequnce_length: 1": "known here: ",
    "parallel_config: {strategy: x}": "known here: ",
    "model: {file: x}": "known here: ",
    "training: {seq: 1}": "known here: ",
    "data: {tran: x}": "did you mean `train`?",
    "memory: {sed: 1}": "known here: ",
}


@pytest.mark.parametrize("text", OF_ITS_BLOCK | NEAR)
def test_a_hint_stays_inside_its_block_and_within_two_edits(tmp_path: Path, text: str) -> None:
    path, key, _ = written(text)
    (line,) = lines(tmp_path, text)
    start = f"r.yaml:2: {path}: unknown key `{key}`; {(OF_ITS_BLOCK | NEAR)[text]}"
    assert line.startswith(start), line


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: org/name", "write the folder or hub id as `model.name_or_path`"),
        ("data: x.jsonl", "write the file or folder as `data.train`"),
        ("optimizer: adamw_torch", "leave it out, or write its keys below it; "),
        ("lr_schedule: cosine", "write it as `lr_schedule.type`"),
        ("deepspeed: zero3.json", "write `deepspeed.zero_optimization.stage` and the like below"),
        ("memory: low", "indent its keys below it, or leave it out"),
    ],
)
def test_one_value_where_a_block_stands_leads_to_the_key_that_takes_it(
    tmp_path: Path, text: str, said: str
) -> None:
    key, _, value = text.partition(": ")
    (line,) = lines(tmp_path, text)
    start = f'r.yaml:2: {key}: expected a mapping of keys, got the string "{value}"; {said}'
    assert line.startswith(start), line
