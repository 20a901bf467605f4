"""The files that a recipe's data sources name, as sorted lists; only directories are read."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from uspft.data.faults import SHOWN_PLACES, DataError, grouped

if TYPE_CHECKING:
    from uspft.config.inputs import DataBlock, Source

FORMATS = ("auto", "messages", "prompt_completion", "text", "tokenized", "megatron")
STDLIB = "python:stdlib"
KINDS = {
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".idx": "megatron",
}
"""The kind of a file by its ending; any other is one text, or JSON Lines if `format` says so."""
PACKED = (".gz", ".zst")
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)
_SAVED, _SAVED_SPLITS = ("state.json", "dataset_info.json"), "dataset_dict.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_SUFFIX = re.compile(r"\.[A-Za-z]{1,10}$")
_BINARY = re.compile(
    r"\.(7z|avro|bin|bz2|db|docx?|feather|gif|h5|hdf5|jpe?g|mindrecord|np[yz]|orc"
    r"|pdf|pickle|pkl|png|pth?|pyc|safetensors|so|sqlite|tar|tgz|tfrecord|xlsx?|xz|zip)",
    re.IGNORECASE,
)
_DESCRIBES = re.compile(r"(readme|licen[cs]e)([._-].*)?", re.IGNORECASE)
_INFOS = "dataset_infos.json"
_TRAIN = ("train", "training")
_OTHERS = ("test", "testing", "validation", "valid", "val", "dev", "eval", "evaluation")
_NO_LETTER = re.compile(r"[\W\d_]+")


@dataclass(frozen=True)
class SourceFile:
    """One file to read; shown: its name as the recipe has it, for messages.

    kind: json (Lines or an array), csv, tsv, parquet, arrow, megatron (an index, whose tokens are
    in another file), or text, which is one sample.
    """

    path: Path
    shown: str
    kind: str
    library: bool = False  # of the standard library: skipped if it is empty or not UTF-8
    eod: int | None = None
    """For an index: a token after which a document ends too."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files with its samples: for an index, also that of the tokens."""
        return (
            (self.path, self.path.with_suffix(".bin")) if self.kind == "megatron" else (self.path,)
        )

    @property
    def size(self) -> int:
        """The total bytes of these files."""
        return sum(path.stat().st_size for path in self.paths)

    def digest(self) -> str:
        """Return the blake2b hash of each of these files. Raises DataError."""
        found = ""
        try:
            for path in self.paths:
                with path.open("rb") as handle:
                    made = hashlib.file_digest(handle, lambda: hashlib.blake2b(digest_size=16))
                    found += made.hexdigest()
        except OSError as error:
            what = f"cannot be read: {error.strerror}; mend it or leave it out"
            raise DataError([f"{self.shown}: {what}"]) from error
        return found

    @property
    def packed(self) -> str:
        """The ending of its compression, or an empty string."""
        suffix = self.path.suffix.lower()
        return suffix if suffix in PACKED else ""


def _suffix(path: Path) -> str:
    """Return a file's ending in lower case, without that of its compression."""
    last = path.suffix.lower()
    return path.with_suffix("").suffix.lower() if last in PACKED else last


def source_problems(data: DataBlock) -> list[tuple[str, str, str]]:
    """Return (key, what, remedy) for each fault of data.train and data.eval; no file is read."""
    problems: list[tuple[str, str, str]] = []
    for key, source in _keyed(data):
        declared = source.format or data.format
        if declared not in FORMATS:
            what = f"unknown format {declared!r}"
            problems.append((f"{key}.format", what, f"write one of {', '.join(FORMATS)}"))
        problems += _index_problems(key, source, declared)
        if is_hub_id(source.path):
            continue
        if is_saved(source.path):
            problems += _split_problems(key, source)
            continue
        for name in ("name", "split"):
            if getattr(source, name) is not None:
                what = f"{name} {getattr(source, name)!r} means nothing for files"
                problems.append((f"{key}.{name}", what, "leave it out; only a hub data set has it"))
        found = _listing_problems(source.path, declared)
        problems += [(f"{key}.path", what, remedy) for what, remedy in found]
    return problems


def not_checked(data: DataBlock) -> list[str]:
    """Return one line for each hub data set, which cannot be checked without a network."""
    return [
        f"{key}: hub data set {source.path} (needs the network)"
        for key, source in _keyed(data)
        if is_hub_id(source.path)
    ]


def is_hub_id(path: str) -> bool:
    """Tell whether a path reads as org/name of the hub.

    Neither it nor its folder may exist on this disk, and it may not end in a file's extension.
    """
    if not _HUB_ID.fullmatch(path) or os.path.exists(path):
        return False
    return not os.path.isdir(Path(path).parent) and not _FILE_SUFFIX.search(path)


def list_files(name: str, declared: str) -> list[SourceFile]:
    """Return the files of a source that is not a hub data set, in reading order.

    name: the source's path, as in the recipe. declared: its format.
    """
    if name == STDLIB:
        return list(_standard_library())
    path = Path(name)
    found, _ = _found(path)
    if os.path.isdir(path):
        described = set(describing(found))
        found = [file for file in found if file not in described]
    if not found and os.path.isfile(index := f"{path}.idx"):  # the common name of both files
        found = [Path(index)]
    # The file of tokens stands for the index next to it.
    found = [
        beside if file.suffix == ".bin" and (beside := file.with_suffix(".idx")).is_file() else file
        for file in found
    ]
    found = list(dict.fromkeys(found))
    other = "text" if declared in ("auto", "text") else "json"
    return [SourceFile(p, str(p), KINDS.get(_suffix(p), other)) for p in found]


def describing_files(data: DataBlock) -> list[str]:
    """Return a line for each folder with files that are not read because they only describe the
    data."""
    lines = []
    for _, source in _keyed(data):
        folder = Path(source.path)
        if not is_hub_id(source.path) and os.path.isdir(folder) and not is_saved(source.path):
            found = describing(_found(folder)[0])
            names = ", ".join(path.relative_to(folder).as_posix() for path in found[:SHOWN_PLACES])
            more = ", …" if len(found) > SHOWN_PLACES else ""
            lines += [f"{source.path}: not read, as what describes it: {names}{more}"] * bool(found)
    return lines


def is_saved(name: str) -> bool:
    """Tell whether a path is a folder that `save_to_disk` of `datasets` wrote."""
    folder = Path(name)
    whole = all(os.path.isfile(folder / mark) for mark in _SAVED)
    return whole or os.path.isfile(folder / _SAVED_SPLITS)


def _index_problems(key: str, source: Source, declared: str) -> Iterator[tuple[str, str, str]]:
    """Yield faults of settings for Megatron's index on another kind of source, and the reverse."""
    elsewhere = is_hub_id(source.path) or is_saved(source.path) or source.path == STDLIB
    files = [] if elsewhere else list_files(source.path, declared)
    indexed = bool(files) and all(file.kind == "megatron" for file in files)
    if elsewhere and declared == "megatron":
        remedy = "name the .idx, or its folder"
        yield f"{key}.format", f"{source.path} is no index of Megatron's", remedy
    if source.eod is not None and (elsewhere or files) and not indexed:
        what = "ends documents of Megatron's index, which this is not"
        yield f"{key}.eod", what, "leave it out"
    if indexed and source.fields:
        yield f"{key}.fields", "an index holds token ids, and no fields", "leave it out"


def _split_problems(key: str, source: Source) -> Iterator[tuple[str, str, str]]:
    """Yield faults of `name` and `split` on a source that `save_to_disk` wrote."""
    if source.name is not None:
        what = f"name {source.name!r} means nothing for a saved data set"
        yield f"{key}.name", what, "leave it out; only a hub data set has it"
    splits = saved_splits(source.path)
    if source.split is not None and source.split not in splits:
        what = f"{source.path} has no split {source.split!r}"
        remedy = f"write one of {', '.join(splits)}" if splits else "leave it out"
        yield f"{key}.split", what, remedy
    elif source.split is None and splits and "train" not in splits:
        yield f"{key}.split", f"{source.path} has several splits", f"write {' or '.join(splits)}"


def saved_splits(name: str) -> list[str]:
    """Return the splits of a folder that `save_to_disk` wrote, or [] where it has none."""
    try:
        text = (Path(name) / _SAVED_SPLITS).read_text(encoding="utf-8")
        return [str(split) for split in json.loads(text)["splits"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []


def _found(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the files that a path names, in reading order; and the FIFOs, sockets and devices,
    which cannot be read twice.

    path: a file, a glob, or a folder, whose hidden files and folders are skipped.
    """
    if os.path.isdir(path):
        every = sorted(_below(path), key=lambda p: p.relative_to(path).as_posix())
    elif os.path.exists(path) or not glob.has_magic(str(path)):
        every = [path]
    else:
        every = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    files = [one for one in every if os.path.isfile(one)]  # Path.is_file raises for a long name
    others = (one for one in every if os.path.exists(one) and not os.path.isdir(one))
    return files, [one for one in others if not os.path.isfile(one)]


def _keyed(data: DataBlock) -> Iterator[tuple[str, Source]]:
    for block in ("train", "eval"):
        sources = getattr(data, block, None) or ()
        for i, source in enumerate(sources):
            yield (f"data.{block}" if len(sources) == 1 else f"data.{block}[{i}]"), source


def _listing_problems(path: str, declared: str) -> Iterator[tuple[str, str]]:
    if path.startswith("python:") and path != STDLIB:
        yield f"unknown source {path!r}", f"write {STDLIB}, a path or a hub id"
        return
    if path == STDLIB and declared not in ("auto", "text"):
        yield f"{STDLIB} is text, not {declared}", "leave the format out"
        return
    files, place = list_files(path, declared), Path(path)
    _, special = _found(place)
    if os.path.isdir(place):
        records = [file.path for file in files if _suffix(file.path) in KINDS]
        if both := two_splits([file.relative_to(place).as_posix() for file in records]):
            what = f"{path} holds {both[0]} and {both[1]}, which are two splits by their names"
            yield what, "name the files that are meant, by their paths or by globs"
    odd = "is a FIFO, a socket or a device, and no file"
    remedy = "write its contents to a file, since data is read more than once"
    yield from grouped((str(one), odd, remedy) for one in special)
    if not files and not special:
        if glob.has_magic(path):
            yield f"{path} matches no file", "correct the pattern"
        elif os.path.isdir(place):
            yield f"the folder {path} holds no file", "name a folder with data, or a file"
        elif "://" in path:
            yield f"{path} is an address", "load it to a file and name that, or name a hub id"
        else:
            yield f"{path} does not exist", "name a file, a folder, a glob or a hub id (org/name)"
    yield from grouped(_unread(files, declared, alone=os.path.isfile(place)))


def _unread(files: list[SourceFile], declared: str, alone: bool) -> Iterator[tuple[str, str, str]]:
    """Yield each file that its name shows to be unreadable, why, and the remedy.

    declared: the source's format. alone: whether the source is that single file, not a folder or a
    glob.
    """
    other = "" if alone else ", or leave it out: name a glob of what is meant"
    for file in files:
        ending, indexed = _suffix(file.path), file.kind == "megatron"
        if declared == "megatron" and not indexed:
            yield file.shown, "is no index of Megatron's", "name the .idx of it" + other
        elif indexed and declared not in ("auto", "megatron"):
            yield file.shown, f"is an index of token ids, not {declared}", "leave the format out"
        elif indexed and not file.packed and not os.path.isfile(file.path.with_suffix(".bin")):
            what = f"has no {file.path.with_suffix('.bin').name} next to it, which holds its tokens"
            yield file.shown, what, "put it there" + other
        elif _BINARY.fullmatch(ending):
            convert = "convert it to JSON Lines (data/README.md shows the formats)"
            yield file.shown, f"is a {ending} file, which is not read", convert + other
        elif file.packed and not ending:
            what = "does not say what is compressed in it"
            yield file.shown, what, f"call it .jsonl{file.packed}, or what it is"
        elif file.packed and file.kind in ("parquet", "arrow", "megatron"):
            yield file.shown, "is compressed as a whole", "decompress it"


def _below(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".") and f != "__pycache__"]
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def _standard_library() -> Iterator[SourceFile]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for parent, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in _SKIPPED_FOLDERS]
        found += [Path(parent, name) for name in names if name.endswith(".py")]
    for path in sorted(found, key=lambda p: p.relative_to(root).as_posix()):
        shown = f"{STDLIB}/{path.relative_to(root).as_posix()}"
        yield SourceFile(path, shown, "text", library=True)


def describing(files: Sequence[Path]) -> list[Path]:
    """Return the files of a folder that describe its data, such as a README, a licence or
    `dataset_infos.json`, if they are in a folder of data files or above one."""
    records = {path for path in files if _suffix(path) in KINDS and path.name != _INFOS}
    around = {folder for path in records for folder in path.parents}
    return [
        path
        for path in files
        if path.parent in around
        and (path.name == _INFOS or (path not in records and _DESCRIBES.fullmatch(path.name)))
    ]


def two_splits(names: Sequence[str]) -> tuple[str, str] | None:
    """Return a name that says train and one that says test or the like; None unless both exist.

    names: of data files, relative to the folder: `data/train-00000.parquet`.
    """
    words = {name: set(_NO_LETTER.split(name.lower())) for name in names}
    train = [name for name in names if words[name].intersection(_TRAIN)]
    others = [name for name in names if words[name].intersection(_OTHERS)]
    others = [name for name in others if name not in train]
    return (train[0], others[0]) if train and others else None
