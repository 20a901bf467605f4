"""The data of a MindSpore Transformers configuration, and how samples become rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uspft.convert.conversion import Conversion, is_whole

CONFIG = "model.model_config"
LOADER = "train_dataset.data_loader"
HANDLER = f"{LOADER}.handler"
ALPACA, PACKING, TAKE = (
    f"{HANDLER}.{name}" for name in ("AlpacaInstructDataHandler", "PackingHandler", "take")
)
BLEND = f"{LOADER}.config"
HUGGING_FACE, MEGATRON = ("HFDataLoader", "CommonDataLoader"), "BlendedMegatronDatasetDataLoader"
_KINDS = ("json", "csv", "parquet", "arrow", "text")
"""Names by which `load_dataset` reads files instead of a data set."""
_SLICE = re.compile(r"(\w+)\[:(\d+)\]")
PAGE = "docs/coming-from-mindspore.md"


def data(run: Conversion) -> None:
    """Convert the data, and how samples become rows."""
    kind = str(run.value(f"{LOADER}.type", "MindDataset"))
    _rows(run, indexed=kind == MEGATRON)
    if "data.train" in run.given or kind in (*HUGGING_FACE, MEGATRON):
        run.idle("labels are made here, of the samples' tokens", f"{CONFIG}.input_sliced_sig")
    inside = [key for key in run.theirs.values if key.startswith(f"{LOADER}.")]
    if run.settled("data.train", *(key for key in inside if key != f"{LOADER}.shuffle")):
        return
    if kind in HUGGING_FACE:
        _hugging_face(run)
    elif kind == MEGATRON:
        _blend(run)
    else:
        what = f"is {kind}, which reads MindSpore's own files of rows"
        remedy = f"write them as JSON Lines there first, as {PAGE} says, and add data.train=FILE"
        run.refuse(f"{LOADER}.type", what, remedy)
        run.dropped("its files are not read", f"{LOADER}.dataset_dir", f"{LOADER}.dataset_files")


def _hugging_face(run: Conversion) -> None:
    """Convert the arguments of `load_dataset`, and the handlers of its samples."""
    place, files = run.value(f"{LOADER}.path"), run.value(f"{LOADER}.data_files")
    if place is None and not run.theirs.has_block(f"{LOADER}.data_files"):
        run.refuse(f"{LOADER}.path", "is missing", "add data.train=FILE")
        return
    split, most = _split(run)
    if by_split := run.theirs.block(f"{LOADER}.data_files"):
        files = by_split.get(split or "train", [])
    names = [files] if isinstance(files, str) else files
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if files is not None and not named:
        run.refuse(f"{LOADER}.data_files", "names no files", "add data.train=[FILE, FILE]")
        return
    inside = Path(str(place)) if place is not None and place not in _KINDS else Path()
    sources = [{"path": str(inside / name)} for name in names or ()] or [{"path": str(place)}]
    more: dict[str, Any] = {}
    if split and not names:
        more["split"] = split
    elif split not in (None, "train"):
        run.refuse(f"{LOADER}.split", f"is {split} of files", "name the files of that split alone")
    if (taken := _taken(run)) is not None:
        most = taken if most is None else min(most, taken)
    if most is not None and len(sources) == 1:
        more["max_samples"] = most
    elif most is not None:
        what = f"takes {most} samples of several files together"
        run.refuse(f"{TAKE}.n", what, "write them into one file, or add data.train=FILE")
    if run.theirs.has_block(ALPACA):
        more["format"] = "prompt_completion"
        say = "here their `</s>` is the tokenizer's EOS, and `ASSISTANT:` is not trained"
        run.put("data.prompt_template", "alpaca_mindspore", f"{ALPACA}.type", say=say)
    run.outcome.values["data.train"] = [source | more for source in sources]
    names = ("type", "path", "split", "data_files")
    run.told("here in `data.train`", *(f"{LOADER}.{name}" for name in names))
    for key in run.theirs.values:
        if key.startswith(f"{LOADER}.data_files."):
            run.changed(key, "here in `data.train`")
    run.told("here in `data.train`: max_samples", f"{TAKE}.type", f"{TAKE}.n")
    _tokenizer(run)


def _split(run: Conversion) -> tuple[str | None, int | None]:
    """Return the split's name, and how many of its first samples to use (None: all)."""
    key = f"{LOADER}.split"
    split = run.value(key)
    if split is None:
        return None, None
    found = _SLICE.fullmatch(str(split))
    if found:
        return found[1], int(found[2])
    if not str(split).isidentifier():
        run.wrong(key, "write a split, or its first samples as train[:1000]")
    return str(split), None


def _taken(run: Conversion) -> int | None:
    """Return how many samples are used, if that limit applies before packing."""
    key = f"{TAKE}.n"
    if not run.written(key):
        return None
    order = [one for one in run.theirs.values if one.startswith(f"{HANDLER}.")]
    packs = [at for at, one in enumerate(order) if one.startswith(f"{PACKING}.")]
    if packs and order.index(key) > packs[0]:
        remedy = "put it before PackingHandler, or write training.steps"
        run.refuse(key, "stands behind PackingHandler, where it counts rows", remedy)
    return run.whole(key)


def _blend(run: Conversion) -> None:
    """Convert a blend of Megatron indices, with their weights."""
    key = f"{BLEND}.data_path"
    why, remedy = ", and only documents of token ids are read", "add data.train=FILE"
    kind = f"{LOADER}.datasets_type"
    if not run.choice(kind, ("GPTDataset",), "GPTDataset", why=why, remedy=remedy):
        return
    told = run.value(key)
    listed = [told] if isinstance(told, str) else told
    sources = list(_indices(listed if isinstance(listed, list) else []))
    if not sources:
        remedy = "write [weight, path, weight, path], or add data.train=FILE"
        run.wrong(key, remedy, ", no path and no weights with their paths")
        return
    if (eod := run.value(f"{BLEND}.eod")) is not None:
        run.changed(f"{BLEND}.eod", "here in `data.train`: documents end behind it too")
    end = {} if eod is None else {"eod": eod}
    run.outcome.values["data.train"] = [{**one, "format": "megatron", **end} for one in sources]
    run.told(
        "here in `data.train`: Megatron's index", key, f"{LOADER}.type", f"{LOADER}.datasets_type"
    )
    _shares(run)
    if run.flag(f"{BLEND}.eod_mask_loss"):
        run.changed(f"{BLEND}.eod_mask_loss", "as here: nothing predicts a document's first token")
    for name in ("reset_attention_mask", "reset_position_ids", "create_compressed_eod_mask"):
        if run.written(f"{BLEND}.{name}") and not run.flag(f"{BLEND}.{name}"):
            what = "false; here each document has positions of its own and sees no other"
            run.changed(f"{BLEND}.{name}", what)


def _indices(listed: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the sources of a blend; none unless it is a path, or weights and paths."""
    if len(listed) == 1 and isinstance(listed[0], str):
        yield {"path": listed[0]}
        return
    pairs = list(zip(listed[::2], listed[1::2], strict=False))
    weights = [_number(weight) or 0.0 for weight, _ in pairs]
    good = all(0 < weight < float("inf") for weight in weights)
    if len(listed) % 2 or not good or not all(isinstance(path, str) for _, path in pairs):
        return
    for (_, path), weight in zip(pairs, weights, strict=True):
        yield {"path": path, "weight": weight}


def _number(value: Any) -> float | None:
    """Return a number, which may be given as text, or None."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _shares(run: Conversion) -> None:
    """Convert the share of documents that is not trained on."""
    key = f"{BLEND}.split"
    told = run.value(key)
    if told is None:
        return
    parts = [_number(part) for part in re.split(r"[,/]", str(told).strip("[]()"))]
    if None in parts or not any(parts):
        run.wrong(key, "write three shares, as in '99, 1, 0'")
        return
    whole = sum(part or 0.0 for part in parts)
    share = round(1 - (parts[0] or 0.0) / whole, 9)
    if not 0 <= share < 1:
        run.wrong(key, "write '1, 0, 0'", ", which trains on nothing")
    elif share and "data.eval" not in run.given and "data.eval_fraction" not in run.given:
        say = "drawn by seed, where theirs are the last documents; nothing is kept for a test"
        run.put("data.eval_fraction", share, key, say=say)
    else:
        run.changed(key, "all documents train" if not share else "`data.eval` rules")


def rows_of_blend(run: Conversion) -> int | None:
    """Return how many rows of a blend are trained on in one epoch, from `sizes`; None
    without them."""
    key = f"{LOADER}.sizes"
    told = run.value(key)
    if told is None or run.value(f"{LOADER}.type") != MEGATRON:
        return None
    first = told[0] if isinstance(told, list) and told else told
    if is_whole(first):
        return first if first > 0 else None
    run.wrong(key, "write [rows to train on, 0, 0]", ", no list of rows")
    return None


def _tokenizer(run: Conversion) -> None:
    if "model.tokenizer" in run.given:
        return
    names = ("tokenizer_name", "tokenizer", "tokenizer.pretrained_model_dir", "tokenizer.name")
    for key in (*(f"{ALPACA}.{name}" for name in names), f"{LOADER}.tokenizer"):
        if isinstance(run.value(key), str):
            run.put("model.tokenizer", run.value(key), key)
            return
    for file in ("vocab_file", "tokenizer_file"):
        key = f"{ALPACA}.tokenizer.{file}"
        if isinstance(run.value(key), str):
            run.put("model.tokenizer", str(Path(run.value(key)).parent), key)
            return


def _rows(run: Conversion, *, indexed: bool) -> None:
    """Convert the length of a row and packing. indexed: whether the data are Megatron indices."""
    lengths = (
        f"{CONFIG}.seq_length",
        f"{PACKING}.seq_length",
        f"{ALPACA}.seq_length",
        f"{BLEND}.seq_length",
    )
    key = run.written(*lengths)
    if key is None and "data.sequence_length" not in run.given:
        run.refuse(lengths[0], "is missing", "add data.sequence_length=N")
    elif key:
        run.put("data.sequence_length", run.whole(key))
        run.told(f"here `data.sequence_length: {run.whole(key)}`", *lengths)
    compressed = (
        f"{CONFIG}.use_eod_attn_mask_compression",
        f"{LOADER}.create_compressed_eod_mask",
        f"{BLEND}.create_compressed_eod_mask",
    )
    asked = run.written("train_dataset.packing", f"{LOADER}.packing")
    packs = run.theirs.has_block(PACKING) or asked or indexed
    if packs or any(run.flag(one) for one in compressed):
        say = "documents of a row never see one another"
        run.put("data.packing", "best_fit", *compressed, asked, say=say)
    elif run.theirs.has_block(ALPACA):
        run.put("data.packing", "none", f"{ALPACA}.padding")
    strategy = f"{PACKING}.pack_strategy"
    cuts = run.value(strategy) == "truncate" or run.theirs.has_block(ALPACA)
    if indexed:
        run.put("data.overlong", "split")
    elif cuts or run.written(strategy):
        say = "their handler cuts samples to a row" if run.theirs.has_block(ALPACA) else ""
        run.put("data.overlong", "truncate" if cuts else "error", strategy, say=say)
    run.told("here `data.packing: best_fit`", f"{PACKING}.type")
