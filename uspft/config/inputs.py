"""The keys of `model`, of `data` and of one source of samples, from which a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from uspft.config.allowed import Described, described, lets_pass, shown
from uspft.config.checks import choice, each, free, path, real, table, text, tokens, whole
from uspft.config.fields import CountOrNone, Flag, PathOrNone, RecipeBlock, TextOrNone, block
from uspft.config.lora import AdapterBlock, pattern
from uspft.config.problems import fault
from uspft.config.rope import scaling

_is = PlainValidator  # a check takes the place of the type in validation
_NONE = (None,)

FORMATS = ("auto", "messages", "prompt_completion", "text", "tokenized", "megatron")


PROMPTS = ("alpaca", "alpaca_mindspore")
"""The sentences that are written around an instruction."""
RECORD = (
    "messages",
    "tools",
    "chat_template_kwargs",
    "system",
    "history",
    "prompt",
    "completion",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
    "text",
    "input_ids",
    "labels",
)
"""The fields of records, under our names."""
LEFT_ALONE = (
    "label",
    "kto_tag",
    "weight",
    "loss",
    "train",
    "training",
    "conversations",
    "system_prompt",
    "system_message",
    "chosen",
    "rejected",
    "chosen_response",
    "rejected_response",
    "rejected_messages",
    "response_chosen",
    "response_rejected",
    "preferred_output",
    "non_preferred_output",
    "chosen_input_ids",
    "rejected_input_ids",
    "images",
    "image",
    "videos",
    "video",
    "audios",
    "audio",
)
"""Fields with which a sample is refused, unless null says to leave them alone."""


def _nothing(value: Any) -> Any:
    if value is not None:
        raise fault(
            f"expected null, got {shown(value)}", "write null, which leaves the field alone"
        )
    return value


_other_name = text("the field's name in the data", also=_NONE)
_null = lets_pass("null", {"enum": [None]})(_nothing)
FIELDS = {
    **dict.fromkeys(RECORD, _other_name),
    **dict.fromkeys(LEFT_ALONE, _null),
    "role": text("the key of a turn's role"),
    "content": text("the key of a turn's content"),
    "roles": free(),
}


class Source(RecipeBlock):
    """A source is one place from which samples come, such as a file, a folder or a hub data set."""

    path: Annotated[str, _is(text("a file, a folder, a glob or a hub id"))]
    """Place of the samples; `python:stdlib` stands for the running Python's standard library."""
    name: TextOrNone = None
    """Configuration of a hub data set; null takes the one that the data set has by default."""
    split: TextOrNone = None
    """Split of a hub data set; null takes `train`."""
    format: Annotated[str | None, _is(choice(*FORMATS, also=_NONE))] = None
    """What is made of this source's records; null takes `data.format`."""
    fields: Annotated[dict[str, Any] | None, _is(table(FIELDS, also=_NONE))] = None
    """What this source names otherwise; its keys win over those of `data.fields`."""
    eod: Annotated[int | None, _is(whole(0, also=_NONE))] = None
    """Token id that ends documents inside those of Megatron's index too; null: the index alone."""
    weight: Annotated[float | None, _is(real(above=0, also=_NONE))] = None
    """Share of an epoch's tokens, relative to the other weights; null: each sample once."""
    max_samples: CountOrNone = None
    """Number of samples, from the first on, that are taken of this source; null takes all."""
    max_tokens: Annotated[int | None, _is(tokens(1, also=_NONE))] = None
    """Number of tokens that the samples taken of this source have at most; null takes all."""

    @property
    def title(self) -> str:
        """The path, followed by the name and split of a hub data set: `org/name (en, test)`."""
        chosen = ", ".join(part for part in (self.name, self.split) if part)
        return f"{self.path} ({chosen})" if chosen else self.path


_SOURCES = "a file, a folder, a glob, a hub id, or a list of {path: ...}"
_list_of_sources = each(block(Source), "a list of sources")
_path = described(text(_SOURCES))
_named = {"anyOf": [_path.schema, described(block(Source)).schema]}
_several = {"anyOf": [_path.schema, {"type": "array", "minItems": 1, "items": _named}]}


@lets_pass(_SOURCES, _several)
def _sources(value: Any) -> tuple[Source, ...]:
    if isinstance(value, str):
        value = [{"path": _path(value)}]
    if not isinstance(value, list | tuple) or not value:
        got = "an empty list" if value == [] else shown(value)
        raise fault(f"expected {_SOURCES}, got {got}", "write the path, or a list of {path: ...}")
    entries = [{"path": entry} if isinstance(entry, str) else entry for entry in value]
    sources: tuple[Source, ...] = _list_of_sources(entries)
    return sources


@lets_pass(_SOURCES, _several, _NONE)
def _sources_or_none(value: Any) -> tuple[Source, ...] | None:
    return None if value is None else _sources(value)


ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The bytes of an element, by `model.dtype`."""


def _config() -> Described:
    """Return a check of the path of a config, or of a mapping that is one."""
    file = described(path("the path of a config.json", also=_NONE))
    fields = described(free())
    named = {"properties": {"model_type": {"type": "string"}}, "required": ["model_type"]}
    wanted = "the path of a config.json, or its contents"

    @lets_pass(wanted, {"anyOf": [*file.schema["anyOf"], fields.schema | named]})
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return file(value)
        if not isinstance(value.get("model_type"), str):
            raise fault("has no `model_type`", "write model_type: llama, qwen2 or another family")
        return fields(value)

    return check


class ModelBlock(RecipeBlock):
    """The block names the model, which parameters train, the compute type and attention kernel."""

    name_or_path: TextOrNone = None
    """Hugging Face folder or hub id of the model; required unless `model.config` is given."""
    config: Annotated[Path | dict[str, Any] | None, _is(_config())] = None
    """A config.json, its folder or its contents, for weights that `seed` draws."""
    tokenizer: TextOrNone = None
    """Folder or hub id of the tokenizer; null takes `name_or_path`."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        _is(choice("float32", "bfloat16", "float16")),
    ] = "bfloat16"
    """Dtype of forward and backward; master weights and Adam are float32; float16 needs a GPU."""
    attention: Annotated[
        Literal["auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "torch"],
        _is(choice("auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "torch")),
    ] = "auto"
    """Attention kernel of a device; `auto` takes the fastest that passes its check on all ranks."""
    rope_scaling: Annotated[dict[str, Any] | None, _is(scaling)] = None
    """How rotary positions are scaled for longer rows; null keeps the scaling in config.json."""
    overrides: Annotated[dict[str, Any], _is(free())] = Field(default_factory=dict)
    """Fields of the model's config.json, with the values that replace its own."""
    adapter: Annotated[AdapterBlock | None, _is(block(AdapterBlock, also=_NONE))] = None
    """LoRA adapter that trains in place of the weights; null trains the weights themselves."""
    freeze: Annotated[tuple[str, ...], _is(each(pattern, "a list of regular expressions"))] = ()
    """Regular expressions; a parameter is not trained where one of them is found in its name."""
    add_tokens: Annotated[
        tuple[str, ...], _is(each(text("a token's text"), "a list of tokens"))
    ] = ()
    """Special tokens that the tokenizer lacks; embedding and head grow by rows of their mean."""
    trust_remote_code: Flag = False
    """Whether Python code that a hub model brings may run."""


class DataBlock(RecipeBlock):
    """The block names the samples and says how they become rows of `sequence_length` tokens."""

    train: Annotated[tuple[Source, ...], _is(_sources)]
    """Samples to train on: one source, or a list of sources."""
    eval: Annotated[tuple[Source, ...] | None, _is(_sources_or_none)] = None
    """Samples to evaluate on, written as `data.train` is; null evaluates nothing."""
    eval_fraction: Annotated[float | None, _is(real(above=0, below=1, also=_NONE))] = None
    """Share of the samples, drawn by `seed`, that is evaluated on and not trained on."""
    format: Annotated[
        Literal["auto", "messages", "prompt_completion", "text", "tokenized", "megatron"],
        _is(choice(*FORMATS)),
    ] = "auto"
    """What is made of records; `auto` tells it from the first record of each file."""
    fields: Annotated[dict[str, Any], _is(table(FIELDS))] = Field(default_factory=dict)
    """What is named otherwise: `{messages: dialog, role: speaker, roles: {human: user}}`."""
    prompt_template: Annotated[str | None, _is(choice(*PROMPTS, also=_NONE))] = None
    """Sentences around each `instruction` and `input`: Alpaca's own, or MindSpore's of them."""
    sequence_length: Annotated[int, _is(tokens(2))]
    """Number of tokens in a row, over all ranks that share it."""
    packing: Annotated[Literal["none", "best_fit"], _is(choice("none", "best_fit"))] = "best_fit"
    """`best_fit` packs whole documents, which never see one another; `none` pads each to a row."""
    overlong: Annotated[
        Literal["error", "truncate", "drop", "split"],
        _is(choice("error", "truncate", "drop", "split")),
    ] = "error"
    """What happens to a sample longer than a row; `split` cuts it into several documents."""
    train_on: Annotated[
        Literal["assistant", "completion", "last", "all"],
        _is(choice("assistant", "completion", "last", "all")),
    ] = "assistant"
    """Target tokens: all answers (`assistant`, `completion`), the `last` one, or `all` tokens."""
    on_bad_sample: Annotated[Literal["error", "skip"], _is(choice("error", "skip"))] = "error"
    """What happens to a sample that cannot be used; `skip` leaves it out, counted and named."""
    unused_fields: Annotated[Literal["list", "error"], _is(choice("list", "error"))] = "list"
    """What is done about fields of records that nothing uses: they are told, or an error."""
    chat_template: PathOrNone = None
    """Jinja file that renders conversations; null takes the tokenizer's own template."""
    shuffle: Flag = True
    """Whether samples come in an order drawn from `seed` and the epoch; else in file order."""
    workers: Annotated[int, _is(whole(0))] = 2
    """Processes that tokenise (threads, where there is little); `preprocess` takes all cores."""
    cache_dir: PathOrNone = None
    """Folder for tokenised data; null takes `uspft/data` in `$XDG_CACHE_HOME` (~/.cache)."""
