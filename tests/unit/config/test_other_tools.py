"""Keys of other tools: each is told what it is called here, or why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.problems import lines
from uspft.config.other_tools import TABLE, OtherTools, TheirKey, other_tools
from uspft.config.reference import keys_of_others, put
from uspft.config.scalars import plain
from uspft.config.yaml.unknown import known_keys

KEYS = known_keys()

PREFERENCES = (
    "leave it out: uspft trains on texts and answers by cross-entropy; "
    "preference training is not here"
)
ACCUMULATION = (
    "leave it out: it is `training.global_batch_size` ÷ (`training.micro_batch_size` × "
    "data_parallel), whatever the number of ranks"
)
ANSWERS = "leave it out: `data.train_on: assistant`, the default, trains answers alone"
SHAPE = (
    "uspft takes a model's shape from its config.json; single fields of it stand in "
    "`model.overrides`, by transformers' names"
)
TEMPLATE = (
    "here it is `data.chat_template`; a Jinja file, and null for the tokenizer's own template; "
    "names of templates are not read"
)

# By tool, what somebody who comes from it would write, and the sentence.
NAMES: dict[str, dict[str, str]] = {
    "mindspore": {
        "parallel_config: {vocab_emb_dp: false}": "leave it out: under `model_parallel` embedding "
        "and head are split over the vocabulary, which changes no number",
        "parallel_config: {gradient_aggregation_group: 4}": "leave it out: how much of the "
        "gradients one message has is DeepSpeed's "
        "`deepspeed.zero_optimization.reduce_bucket_size`, in elements",
        "parallel: {parallel_mode: 1}": "MindSpore's settings of its compiler have none here: "
        "degrees stand in `parallel_config`, sharding of the optimizer in "
        "`deepspeed.zero_optimization.stage`",
        "model_config: {num_layers: 2}": SHAPE,
        "model: {model_config: {num_layers: 2}}": SHAPE,
        "model: {arch: {type: LlamaForCausalLM}}": "leave it out: the architecture is that of the "
        "config.json of `model.name_or_path`",
        "parallel_config: {enable_parallel_optimizer: false}": "here it is "
        "`deepspeed.zero_optimization.stage: 0`",
        "enable_parallel_optimizer: true": "here it is `deepspeed.zero_optimization.stage: 1`",
        "use_parallel: true": "leave it out: a run has as many processes as `launch.processes`, "
        "and its layout is `parallel_config`",
        "micro_batch_interleave_num: 2": "leave it out: it is counted in "
        "`training.global_batch_size`",
        "runner_config: {epochs: 2}": "write `training.epochs`, and `training.global_batch_size` "
        "= batch_size × data_parallel × micro_batch_num (without a pipeline "
        "gradient_accumulation_steps) × micro_batch_interleave_num",
        "runner_wrapper: {use_clip_grad: true}": "here it is `training.max_grad_norm`; losses are "
        "not scaled: bfloat16 needs none",
        "recompute_config: {recompute: true}": "here it is `memory.gradient_checkpointing`; what "
        "of attention is made again is `memory.recompute`",
        "parallel_config: {recompute: true}": "here it is `memory.gradient_checkpointing`",
        "lr_schedule: {lr_end: 0}": "here it is `lr_schedule.min_learning_rate`",
        "lr_schedule: {learning_rate: 1e-5}": "here it is `optimizer.learning_rate`",
        "pretrained_model_dir: here": "here it is `model.name_or_path`",
        "use_ring_attention: true": "here it is `parallel_config.context_parallel_algo: ring_cp`",
        "run_mode: finetune": "leave it out: a recipe without a verb before it trains",
    },
    "axolotl": {
        "base_model: org/name": "here it is `model.name_or_path`",
        "train_on_inputs: false": ANSWERS,
        "data: {train_on_inputs: true}": "here it is `data.train_on: all`",
        "sequence_len: 4096": "here it is `data.sequence_length`",
        "sample_packing: true": "here it is `data.packing`; `best_fit` packs whole documents, "
        "`none` pads each to a row",
        "micro_batch_size: 1": "here it is `training.micro_batch_size`",
        "gradient_accumulation_steps: 4": ACCUMULATION,
        "val_set_size: 0.1": "here it is `data.eval_fraction`; a share, never a number of samples",
        "adapter: lora": "here it is `model.adapter`",
        "sequence_parallel_degree: 4": "here it is `parallel_config.context_parallel`",
        "excess_length_strategy: drop": "here it is `data.overlong`",
        "rl: dpo": PREFERENCES,
        "chat_template: chatml": TEMPLATE,
    },
    "llamafactory": {
        "stage: sft": "leave it out: every run is supervised fine-tuning; "
        "`data.train_on: all` trains all tokens",
        "stage: dpo": PREFERENCES,
        "finetuning_type: full": "leave it out: without `model.adapter` all weights train",
        "finetuning_type: lora": "here it is `model.adapter`",
        "cutoff_len: 4096": "here it is `data.sequence_length`; what happens to longer samples is "
        "`data.overlong`",
        "template: qwen": TEMPLATE,
        "train_on_prompt: false": ANSWERS,
        "mask_history: true": "here it is `data.train_on: last`",
        "neat_packing: true": "here it is `data.packing: best_fit`",
        "lora_target: all": "here it is `model.adapter.target_modules`",
        "val_size: 0.1": "here it is `data.eval_fraction`; a share, never a number of samples",
        "preprocessing_num_workers: 4": "here it is `data.workers`",
        "ddp_timeout: 600": "here it is `launch.timeout_minutes`; in minutes",
    },
    "swift": {
        "tuner_type: lora": "here it is `model.adapter`",
        "train_type: full": "leave it out: without `model.adapter` all weights train",
        "split_dataset_ratio: 0.01": "here it is `data.eval_fraction`",
        "attn_impl: flash_attn": "here it is `model.attention`",
        "loss_scale: last_round": "here it is `data.train_on: last`",
        "sequence_parallel_size: 4": "here it is `parallel_config.context_parallel`",
        "truncation_strategy: delete": "here it is `data.overlong`",
        "rlhf_type: kto": PREFERENCES,
        "padding_free: true": "here it is `data.packing: best_fit`",
    },
    "trl": {
        "optimizer: {name: adamw}": "here it is `optimizer.type`; adamw is the only one",
        "optim: adamw_torch": "here it is `optimizer.type`; adamw is the only one",
        "training: {gradient_accumulation_steps: 4}": ACCUMULATION,
        "per_device_train_batch_size: 1": "here it is `training.micro_batch_size`",
        "assistant_only_loss: true": "here it is `data.train_on: assistant`",
        "dataset_text_field: content": "here it is `data.fields`; as `{text: …}`",
        "report_to: wandb": "write `logging.tensorboard: true`, `logging.wandb: {}` or "
        "`logging.mlflow: {}`",
        "lr_scheduler_type: cosine": "here it is `lr_schedule.type`",
        "average_tokens_across_devices: true": "leave it out: the loss is always divided by the "
        "target tokens of the whole step",
        "load_best_model_at_end: true": "here it is `checkpoint.keep_best`",
    },
}
CASES = [(text, said) for names in NAMES.values() for text, said in names.items()]


def written(text: str) -> tuple[str, str]:
    """The path of the unknown key in a line of YAML, and its last part."""
    at, value = "", yaml.safe_load(text)
    while isinstance(value, dict) and (not at or at in KEYS):
        ((key, value),) = value.items()
        at = f"{at}.{key}" if at else key
    return at, key


@pytest.mark.parametrize(("text", "said"), CASES)
def test_a_key_of_another_tool_has_a_sentence_of_its_own(
    tmp_path: Path, text: str, said: str
) -> None:
    path, key = written(text)
    found = lines(tmp_path, text)
    assert found == [f"r.yaml:2: {path}: unknown key `{key}`; {said}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("device: cuda", "`launch.device`"),
        ("gpus: 4", "`launch.processes`"),
        ("num_gpus: 4", "`launch.processes`"),
    ],
)
def test_what_people_write_leads_to_a_key_too(tmp_path: Path, text: str, said: str) -> None:
    path, key = written(text)
    assert lines(tmp_path, text) == [f"r.yaml:2: {path}: unknown key `{key}`; here it is {said}"]


@pytest.mark.parametrize("device", ["tpu", "npu", "xpu", "mps", "TPU"])
def test_a_device_that_is_not_used_is_no_misspelt_other(tmp_path: Path, device: str) -> None:
    (found,) = lines(tmp_path, f"launch: {{device: {device}}}")
    assert found.endswith(
        f"launch.device: unknown value `{device}`; ranks compute on NVIDIA GPUs and on CPUs alone: "
        "write auto | cuda | cpu"
    )
    (gpu,) = lines(tmp_path, "launch: {device: gpu}")
    assert gpu.endswith("unknown value `gpu`; GPUs are cuda here: write auto | cuda | cpu")


def test_sixty_names_of_five_tools_are_asked_and_documented() -> None:
    assert len(CASES) >= 60 and len(NAMES) == 5
    table = other_tools()
    for tool, names in NAMES.items():
        for text in names:
            at, key = written(text)
            value = yaml.safe_load(text)
            while isinstance(value, dict):
                value = next(iter(value.values()))
            row = table.meaning(key, at.rpartition(".")[0], value)
            assert row is not None, text
            if key not in ("name",):  # what people write, and no tool's
                assert tool in row.tools, (tool, text)


def test_each_row_leads_to_a_key_that_exists_and_can_be_asked() -> None:
    table = other_tools()
    known = {f"{at}.{key}" if at else key for at, keys in KEYS.items() for key in keys}
    assert [row.key for row in table.keys if row.to and row.to not in known] == []
    assert [row.key for row in table.keys if row.key in known] == [], "a key of ours"
    assert [row.key for row in table.keys if not row.here] == []
    assert [row.key for row in table.keys if set(row.tools) - set(table.names)] == []
    asked = [(row.key, value) for row in table.keys for value in row.when or (None,)]
    assert len(asked) == len(set(asked)) >= 300, "a row that another hides"
    after = [row.key for row in table.keys if not row.when]
    for number, row in enumerate(table.keys):
        if row.when and row.key in after:
            rest = [other.key for other in table.keys[number:] if not other.when]
            assert row.key in rest, f"{row.theirs} stands after the row of all values"
    assert {tool for row in table.keys for tool in row.tools} == set(table.names)


def test_the_file_says_what_the_values_it_names_are() -> None:
    said = yaml.safe_load(TABLE.read_text())
    assert set(said) == {"tools", "keys"}
    for row in other_tools().keys:
        for value in row.when:
            assert value is plain(str(value).lower()) or isinstance(value, str), row


def test_a_key_means_what_its_whole_path_says_first() -> None:
    table = OtherTools(
        {},
        (
            TheirKey("lr", to="alone"),
            TheirKey("block.lr", to="inside"),
            TheirKey("top", to="outside", top=True),
            TheirKey("far.deep", ("tool",), to="deep"),
            TheirKey("far.two", ("tool",), to="one"),
            TheirKey("near.two", ("tool",), to="other"),
            TheirKey("far.here", to="what people write"),
            TheirKey("on", to="no", when=(False,)),
            TheirKey("on", to="yes"),
        ),
    )

    def told(key: str, at: str, value: object = None) -> str | None:
        row = table.meaning(key, at, value)
        return row and row.to

    assert [told("lr", at) for at in ("", "block", "other")] == ["alone", "inside", "alone"]
    assert [told("top", at) for at in ("", "block")] == ["outside", None]
    assert [told(key, "") for key in ("deep", "two", "none", "here")] == ["deep", None, None, None]
    assert [told("on", "", value) for value in (False, True, 0)] == ["no", "yes", "yes"]


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


@pytest.mark.parametrize("text", OF_ITS_BLOCK)
def test_a_short_name_means_what_it_means_in_its_block(tmp_path: Path, text: str) -> None:
    path, key = written(text)
    (line,) = lines(tmp_path, text)
    start = f"r.yaml:2: {path}: unknown key `{key}`; {OF_ITS_BLOCK[text]}"
    assert line.startswith(start), line


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


@pytest.mark.parametrize("text", NEAR)
def test_a_hint_stays_inside_its_block_and_within_two_edits(tmp_path: Path, text: str) -> None:
    path, key = written(text)
    (line,) = lines(tmp_path, text)
    start = f"r.yaml:2: {path}: unknown key `{key}`; {NEAR[text]}"
    assert line.startswith(start), line


def test_the_page_is_put_between_its_marks_alone() -> None:
    text = "a\n<!-- made: keys -->\nold\n<!-- end of keys -->\n## Data\n<!-- made: data -->\nx\n"
    text += "<!-- end of data -->\n"
    new = put(text, "keys", "new\n")
    assert new == text.replace("old", "new")
    assert put(new, "data", "y\n") == new.replace("x\n", "y\n")
    with pytest.raises(ValueError, match="made: none"):
        put(text, "none", "new\n")
    page = keys_of_others()
    assert page.count("### ") == len(other_tools().names)
    assert "| `stage: sft \\| pt` | leave it out: every run is supervised" in page


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
