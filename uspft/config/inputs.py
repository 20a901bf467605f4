"""The blocks `model` and `data` of a recipe, and one source of samples."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required, Union

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Strict,
    WithJsonSchema,
)

from uspft.config.messages import shown, unknown_value
from uspft.config.problems import Fault, fault
from uspft.config.types import (
    As,
    BelowOne,
    Count,
    FilePath,
    Free,
    Natural,
    Pattern,
    Positive,
    RecipeBlock,
    Text,
    Tokens,
    elsewhere,
    mapping_of,
    only,
    tokens,
)

Format = Literal["auto", "messages", "prompt_completion", "text", "tokenized", "megatron"]
Sentences = Literal["alpaca", "alpaca_mindspore"]

_Other = Annotated[Text, Field(title="the field's name in the data")] | None


_REMEDY_OF_NULL = "write null, which leaves the field alone"
_Null = Annotated[None, BeforeValidator(only(None, "expected null, got {}", _REMEDY_OF_NULL))]
RECORD_FIELDS = (
    *("messages", "tools", "chat_template_kwargs", "system", "history", "prompt", "completion"),
    *("instruction", "input", "output", "question", "answer", "text", "input_ids", "labels"),
)
"""The fields of records that a recipe may rename."""
FIELDS_LEFT_ALONE = (
    *("label", "kto_tag", "weight", "loss", "train", "training", "conversations"),
    *("system_prompt", "system_message", "chosen", "rejected", "chosen_response"),
    *("rejected_response", "rejected_messages", "response_chosen", "response_rejected"),
    *("preferred_output", "non_preferred_output", "chosen_input_ids", "rejected_input_ids"),
    *("images", "image", "videos", "video", "audios", "audio"),
)
"""Fields that change what a sample trains; a sample with one is refused unless null ignores it."""
FieldNames = mapping_of(
    "FieldNames",
    {
        **dict.fromkeys(RECORD_FIELDS, _Other),
        **dict.fromkeys(FIELDS_LEFT_ALONE, _Null),
        "role": Annotated[Text, Field(title="the key of a turn's role")],
        "content": Annotated[Text, Field(title="the key of a turn's content")],
        "roles": Free,
    },
)
"""The keys of `data.fields`."""


class Source(RecipeBlock):
    """A source is one place from which samples come, such as a file, a folder or a hub data set."""

    path: Annotated[Text, Field(title="a file, a folder, a glob or a hub id")]
    """Place of the samples; `python:stdlib` stands for the running Python's standard library."""
    name: Text | None = None
    """Configuration of a hub data set; null takes the one that the data set has by default."""
    split: Text | None = None
    """Split of a hub data set; null takes `train`."""
    format: Format | None = None
    """How this source's records become text; null takes `data.format`."""
    fields: Annotated[dict[str, Any] | None, As(FieldNames | None)] = None
    """Field names in this source's records; they take precedence over `data.fields`."""
    eod: Natural | None = None
    """Token id that ends a document within a sample of a Megatron index; null: the index alone."""
    weight: Positive | None = None
    """Share of an epoch's tokens, relative to the other weights; null: each sample once."""
    max_samples: Count | None = None
    """Number of samples to take from this source, from the first on; null takes all."""
    max_tokens: Tokens | None = None
    """Most tokens that the samples of this source may have together; null takes all."""

    @property
    def title(self) -> str:
        """The path, followed by the name and split of a hub data set: `org/name (en, test)`."""
        chosen = ", ".join(part for part in (self.name, self.split) if part)
        return f"{self.path} ({chosen})" if chosen else self.path


_SOURCES = "a file, a folder, a glob, a hub id, or a list of {path: ...}"


def _listed(value: Any) -> Any:
    """Return the sources as a list of mappings; a plain path becomes a source."""
    if not isinstance(value, str | list | tuple):
        raise fault(f"expected {_SOURCES}, got {shown(value)}", _REMEDY)
    entries = [value] if isinstance(value, str) else value
    if not entries:
        raise fault(f"expected {_SOURCES}, got an empty list", _REMEDY)
    return [{"path": entry} if isinstance(entry, str) else entry for entry in entries]


_REMEDY = "write the path, or a list of {path: ...}"
_Several = Annotated[list[Text | Source], Field(min_length=1)]
Sources = Annotated[
    tuple[Source, ...],
    Strict(False),
    BeforeValidator(
        _listed, json_schema_input_type=Annotated[Text | _Several, Field(title=_SOURCES)]
    ),
]
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""The bytes of an element, by `model.dtype`."""


_A_CONFIG: dict[str, Any] = {
    "properties": {"model_type": {"type": "string"}},
    "required": ["model_type"],
}


def _config(value: Any) -> Any:
    if isinstance(value, dict) and not isinstance(value.get("model_type"), str):
        raise fault("has no `model_type`", "write model_type: llama, qwen2 or another family")
    return value


_Module = Annotated[Text, Field(title="a module's name")]
_Parameter = Annotated[Text, Field(title="a parameter's name")]
_Token = Annotated[Text, Field(title="a token's text")]


class AdapterBlock(RecipeBlock):
    """The block trains low-rank matrices next to frozen weights (LoRA, arXiv 2106.09685)."""

    type: Literal["lora"] = "lora"
    """The kind of adapter; LoRA is the only one."""
    rank: Count = 16
    """Rank of the two low-rank matrices of an adapted weight."""
    alpha: Positive = 32.0
    """Scale of the adapter: its output is multiplied by alpha ÷ rank."""
    dropout: BelowOne = 0.0
    """Share of an adapter's inputs that dropout sets to 0; the mask is the same in every layout."""
    target_modules: (
        Annotated[tuple[_Module, ...], Strict(False), Field(title="a list of module names")] | None
    ) = None
    """Names of the projections to adapt; null adapts every linear projection of the layers."""
    target_parameters: Annotated[
        tuple[_Parameter, ...], Strict(False), Field(title="a list of parameter names")
    ] = ()
    """Matrices of experts and routers to adapt, named as in peft: mlp.experts.down_proj."""


# The keys of `model.rope_scaling` for each of its types, with Hugging Face's names. A missing
# `factor` becomes data.sequence_length ÷ the model's original positions, at least 1.

_BY_PAIR = "a list of numbers, one for each pair of a head's dimensions"
_ByPair = Annotated[tuple[Positive, ...], Strict(False), Field(title=_BY_PAIR)]
_THETA = {"rope_theta": Positive}
_FACTOR = {**_THETA, "factor": Annotated[float, Field(ge=1)]}
_ORIGINAL = {**_FACTOR, "original_max_position_embeddings": Count}
TYPES: dict[str, dict[str, Any]] = {
    "default": _THETA,
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "yarn": {
        **_ORIGINAL,
        **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow"), Positive),
        **dict.fromkeys(("mscale", "mscale_all_dim"), Positive),
        "truncate": bool,
    },
    "longrope": {
        **_ORIGINAL,
        "attention_factor": Positive,
        **dict.fromkeys(("short_factor", "long_factor"), Required[_ByPair]),
    },
    "llama3": {
        **_ORIGINAL,
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Required[Positive]),
    },
}


def _of_a_type(value: Any) -> Any:
    if isinstance(value, dict) and "type" in value and "rope_type" not in value:
        raise fault("has `type`, whose key is `rope_type`", f"write rope_type: {value['type']}")
    if not isinstance(value, dict) or "rope_type" not in value:
        what = "has no `rope_type`" if isinstance(value, dict) else "expected a mapping or null"
        raise fault(what, "write {rope_type: yarn, factor: 4.0} or null")
    if value["rope_type"] not in list(TYPES):
        raise Fault([("rope_type", *unknown_value(value["rope_type"], {"enum": list(TYPES)}))])
    return value


_OfEachType: Any = Union[  # noqa: UP007 - made of the table
    tuple(
        mapping_of(name.title(), {"rope_type": Required[Literal[name]], **keys})
        for name, keys in TYPES.items()
    )
]
Scaling: Any = Annotated[
    _OfEachType,
    Discriminator("rope_type"),
    BeforeValidator(_of_a_type),
    Field(title=f"a mapping with rope_type: {' | '.join(TYPES)}"),
]
"""A RoPE scaling; which keys it has depends on its type."""


_FLOAT16 = elsewhere({"float16": "it needs a loss scale, and no GPU has run it here"})


class ModelBlock(RecipeBlock):
    """The block names the model, which parameters train, the compute type and attention kernel."""

    name_or_path: Text | None = None
    """Hugging Face folder or hub id of the model; required unless `model.config` is given."""
    config: (
        Annotated[
            Annotated[FilePath, Field(title="the path of a config.json")]
            | Annotated[Free, Field(title="its contents", json_schema_extra=_A_CONFIG)],
            BeforeValidator(_config),
        ]
        | None
    ) = None
    """A config.json, its folder or its contents, for weights that `seed` draws."""
    tokenizer: Text | None = None
    """Folder or hub id of the tokenizer; null takes `name_or_path`."""
    dtype: Annotated[Literal["float32", "bfloat16"], _FLOAT16] = "bfloat16"
    """Dtype of forward and backward; master weights and Adam are float32; float16 is refused."""
    attention: Literal["auto", "flash_attn_4", "flash_attn_3", "flash_attn_2", "torch"] = "auto"
    """Attention kernel of a device; `auto` takes the fastest that passes its check on all ranks."""
    rope_scaling: Annotated[dict[str, Any] | None, As(Scaling | None)] = None
    """How rotary positions are scaled for longer rows; null keeps the scaling in config.json."""
    overrides: Free = Field(default_factory=dict)
    """Fields of the model's config.json, with the values that replace its own."""
    adapter: AdapterBlock | None = None
    """LoRA adapter that trains in place of the weights; null trains the weights themselves."""
    freeze: Annotated[
        tuple[Pattern, ...], Strict(False), Field(title="a list of regular expressions")
    ] = ()
    """Regular expressions; a parameter whose name matches one of them is not trained."""
    add_tokens: Annotated[tuple[_Token, ...], Strict(False), Field(title="a list of tokens")] = ()
    """Special tokens to add to the tokenizer; their embedding and head rows start as the mean."""
    trust_remote_code: Annotated[
        bool,
        AfterValidator(only(False, "code from the hub is not available yet", "write false")),
        WithJsonSchema({"const": False}),
        Field(exclude=True),  # from the recipe file that a run writes
    ] = False
    """Whether Python code that a hub model brings may run; not available yet: write `false`."""


class DataBlock(RecipeBlock):
    """The block names the samples and says how they become rows of `sequence_length` tokens."""

    train: Sources
    """Samples to train on: one source, or a list of sources."""
    eval: Sources | None = None
    """Samples to evaluate on, written as `data.train` is; null evaluates nothing."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the samples, drawn by `seed`, that is evaluated on and not trained on."""
    format: Format = "auto"
    """How records become text; `auto` decides by the first record of each file."""
    fields: Annotated[dict[str, Any], As(FieldNames)] = Field(default_factory=dict)
    """Field names of the records: `{messages: dialog, role: speaker, roles: {human: user}}`."""
    prompt_template: Sentences | None = None
    """Template around each `instruction` and `input`: Alpaca's, or MindSpore's variant."""
    sequence_length: Annotated[int, tokens(2)]
    """Number of tokens in a row, over all ranks that share it."""
    packing: Literal["none", "best_fit"] = "best_fit"
    """`best_fit` packs whole documents, which never see one another; `none` pads each to a row."""
    overlong: Literal["error", "truncate", "drop", "split"] = "error"
    """What happens to a sample longer than a row; `split` cuts it into several documents."""
    train_on: Literal["assistant", "completion", "last", "all"] = "assistant"
    """Target tokens: all answers (`assistant`, `completion`), the `last` one, or `all` tokens."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """What happens to a sample that cannot be used; `skip` leaves it out, counts and names it."""
    unused_fields: Literal["list", "error"] = "list"
    """What happens if records have fields that nothing uses: they are listed, or an error."""
    chat_template: FilePath | None = None
    """Jinja file that renders conversations; null takes the tokenizer's own template."""
    shuffle: bool = True
    """Whether samples are shuffled anew in each epoch, by `seed`; false keeps the file order."""
    workers: Natural = 2
    """Processes that tokenise (threads, for small data); `preprocess` uses all cores."""
    cache_dir: FilePath | None = None
    """Folder for tokenised data; null takes `uspft/data` in `$XDG_CACHE_HOME` (~/.cache)."""
