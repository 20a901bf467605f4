"""The weights in a model's folder, which are read a part at a time; embeddings for added tokens;
and a digest that identifies a base model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from uspft.config.problems import InputError, said
from uspft.families.multimodal import own_name
from uspft.parameters.experts import Stored, find, fused_shapes, read_quantised, whole_shape
from uspft.parameters.names import plain_name
from uspft.parameters.part import Part, as_slices, read_boxes

if TYPE_CHECKING:
    from uspft.config.inputs import ModelBlock
    from uspft.tensor.parts import Range


class WeightsError(InputError):
    """A model's files lack a parameter, hold one of another shape, or cannot be read."""

    def __init__(self, what: str, remedy: str) -> None:
        self.findings = [("model.name_or_path", what, remedy)]
        super().__init__(f"{what}; {remedy}")


_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Types of floating point by their name in headers."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_AGAIN = "save weights and config.json together, with save_pretrained"


class Weights(Protocol):
    """A source of parameters' values, by their Hugging Face name."""

    def read(self, name: str, part: Part) -> Tensor:
        """Read a part of a parameter, on CPU. Raises WeightsError if none has that whole shape."""
        ...

    def draws(self, name: str) -> bool:
        """Tell whether values are random, drawn from the seed; a part then takes as long as the
        whole."""
        ...


class FolderWeights:
    """The weights of a folder: model.safetensors, or shards with model.safetensors.index.json.

    For a multimodal checkpoint they are those of the language model, under its own names. Raises
    WeightsError if the folder has neither file, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _file_of_each(folder)
        self._stored = _by_own_name(self._files)

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        stored = self._required(name)
        if len(stored.parts) == 1:
            return self._read_part(name, stored.parts[0], part)
        if stored.quantised:
            return self._read_quantised(name, stored.parts, part)
        if stored.width:
            return self._read_experts(name, stored, part)
        return self._read_joined(name, stored, part)

    def _read_quantised(self, name: str, stored: list[str], part: Part) -> Tensor:
        """Read a part of a parameter in MXFP4, as float32. Raises WeightsError."""
        blocks, scales = ((self._folder / self._files[one], one) for one in stored)
        with _opened(blocks[0]) as mine, _opened(scales[0]) as theirs:
            packed = mine.get_slice(blocks[1])
            _require_shape(blocks[0], name, whole_shape(tuple(packed.get_shape())), part)
            return read_quantised(packed, theirs.get_slice(scales[1]), part)

    def _read_experts(self, name: str, stored: Stored, part: Part) -> Tensor:
        """Read a part of a parameter that files store as matrices of single experts; only the
        part's bytes are read. Raises WeightsError."""
        width, out = stored.width, None
        experts = chain.from_iterable(range(*bounds) for bounds in part.ranges[0])
        for at, expert in enumerate(experts):
            for number, one in enumerate(stored.parts[expert * width : (expert + 1) * width]):
                path = self._folder / self._files[one]
                with _opened(path) as tensors:
                    held = tensors.get_slice(one)
                    rows, columns = held.get_shape()
                    whole = len(stored.parts) // width, rows * width, columns
                    _require_shape(path, name, whole, part)
                    mine = Part(part.shape[1:], part.ranges[1:])
                    span = ((number * rows, (number + 1) * rows),)
                    for here, there in mine.meets(Part(mine.shape, (span, ((0, columns),)))):
                        value = held[as_slices(there)]
                        out = value.new_empty(part.size) if out is None else out
                        out[at][as_slices(here)] = value
        assert out is not None
        return out

    def _read_joined(self, name: str, stored: Stored, part: Part) -> Tensor:
        """Read a part of a parameter that is several tensors in files. Raises WeightsError."""
        held: dict[str, Tensor] = {}
        for file in sorted({self._files[one] for one in stored.parts}):
            path = self._folder / file
            with _opened(path) as tensors:
                mine = [one for one in stored.parts if self._files[one] == file]
                held |= {one: tensors.get_tensor(one) for one in mine}
        value = stored.join([held[one] for one in stored.parts])
        _require_shape(path, name, tuple(value.shape), part)
        return part.cut(value)

    def holds(self, name: str) -> bool:
        return self._find(name) is not None

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtype of each floating-point tensor by its name in the files, from headers
        alone. Raises WeightsError."""
        types = ((stored, one.get_dtype()) for stored, one in self._slices())
        return {stored: _FLOATS[one] for stored, one in types if one in _FLOATS}

    def _slices(self) -> Iterator[tuple[str, Any]]:
        """Yield each tensor's name in the files, and its safetensors slice. Raises WeightsError."""
        for path in self.files:
            with _opened(path) as tensors:
                for stored in tensors.keys():  # noqa: SIM118
                    yield stored, tensors.get_slice(stored)

    def _find(self, name: str) -> Stored | None:
        """Find the tensors that hold a parameter, by their names in the files."""
        stored = find(name, self._stored)
        return stored and stored._replace(parts=[self._stored[part] for part in stored.parts])

    def _required(self, name: str) -> Stored:
        if (stored := self._find(name)) is None:
            raise WeightsError(f"{self._folder} holds no parameter {name}", _AGAIN)
        return stored

    def as_stored(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors that make up a parameter in these files. Raises WeightsError
        if the files do not contain it."""
        stored = self._required(name)
        yield from zip(stored.parts, stored.split(value), strict=True)

    def others(self, written: Collection[str], layers: int) -> Iterator[tuple[str, Tensor]]:
        """Yield the files' other tensors unchanged, one at a time, by their names in the files.

        written: the names to leave out. layers: the language model's number of layers; tensors of
        layers beyond it, which a shortened model lacks, are left out too.
        """
        own = {stored: name for name, stored in self._stored.items()}

        def stays(stored: str) -> bool:
            layer = _LAYER.match(own.get(stored, ""))
            return stored not in written and not (layer and int(layer[1]) >= layers)

        for path in self.files:
            with _opened(path) as tensors:
                for stored in filter(stays, tensors.keys()):
                    yield stored, tensors.get_tensor(stored)

    def _read_part(self, name: str, stored: str, part: Part) -> Tensor:
        """Read a part of one stored tensor, and no other bytes. Raises WeightsError."""
        path = self._folder / self._files[stored]
        with _opened(path) as tensors:
            held = tensors.get_slice(stored)
            _require_shape(path, name, tuple(held.get_shape()), part)
            return read_boxes(held, part)

    @property
    def files(self) -> list[Path]:
        return [self._folder / file for file in sorted(set(self._files.values()))]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, with experts fused, from headers alone.

        Raises WeightsError.
        """
        found = {stored: tuple(one.get_shape()) for stored, one in self._slices()}
        mine = self._stored.items()
        return fused_shapes({name: found[stored] for name, stored in mine if stored in found})


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Errors of reading inside the `with` block raise WeightsError too."""
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except WeightsError:
        raise
    except Exception as error:  # safetensors has several kinds, none of them exported
        raise _unreadable(path, error) from error


def _require_shape(path: Path, name: str, shape: tuple[int, ...], part: Part) -> None:
    if shape != part.shape:
        raise WeightsError(f"{path}: {name} is {shape}, the config says {part.shape}", _AGAIN)


def _file_of_each(folder: Path) -> dict[str, str]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            return {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from error
    if not single.exists():
        remedy = "save the model with save_pretrained, or write model.config for random weights"
        raise WeightsError(f"{folder} holds no model.safetensors", remedy)
    with _opened(single) as tensors:
        return dict.fromkeys(tensors.keys(), single.name)


def _by_own_name(files: Iterable[str]) -> dict[str, str]:
    """Return the name in files of each tensor of the language model, by its own name.

    A checkpoint is multimodal if some of its names are inside `language_model`; a language model
    that transformers extracted from one keeps these names.
    """
    if not any("language_model." in stored for stored in files):
        return {stored: stored for stored in files}
    names = {stored: own_name(stored) for stored in files}
    return {own: stored for stored, own in names.items() if own is not None}


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{path} cannot be read: {said(error)}", "copy or download it again")


_ROWS = 4096
"""How many rows are in memory at one time for the mean."""


def table_names(model: Any) -> set[str]:
    """Return the names in files of a model's embedding and head, whose rows are tokens."""
    modules = (model.get_input_embeddings(), model.get_output_embeddings())
    tables = {id(module.weight) for module in modules if module is not None}
    named = model.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, value in named if id(value) in tables}


class GrownWeights:
    """The weights of a folder, whose embedding and head get rows for added tokens.

    Each new row is the mean of the rows in the folder, as transformers initialises new tokens, but
    without noise (Hewitt, 2021, "Initializing New Word Embeddings for Pretrained Language Models").
    """

    def __init__(self, base: FolderWeights, tables: Collection[str]) -> None:
        shapes = base.shapes()
        self._base = base
        self._tables = {name: shapes[name] for name in tables if name in shapes}

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        stored = self._tables.get(name)
        grows = stored and stored[0] < part.shape[0] and stored[1:] == part.shape[1:]
        if not (stored and grows):
            return self._base.read(name, part)
        rows, columns = stored[0], part.ranges[1:]

        def held(ranges: tuple[Range, ...]) -> Tensor:
            return self._base.read(name, Part(stored, (ranges, *columns)))

        start: Tensor | None = None
        pieces = []
        for first, stop in part.ranges[0]:
            if first < rows:
                pieces.append(held(((first, min(stop, rows)),)))
            if stop > rows:
                start = _mean(held, rows) if start is None else start
                pieces.append(start.expand(stop - max(first, rows), -1))
        dtype = held(((0, 1),)).dtype
        return torch.cat([piece.to(dtype) for piece in pieces])


def _mean(held: Any, rows: int) -> Tensor:
    """Return the mean of all rows, [1, columns] in float64."""
    total = 0.0
    for first in range(0, rows, _ROWS):
        total = total + held(((first, min(first + _ROWS, rows)),)).double().sum(0, keepdim=True)
    assert isinstance(total, Tensor)
    return total / rows


PIECE = 64
"""The bytes in the middle of each tensor that are digested; enough, since training changes every
tensor."""


def base_digest(block: ModelBlock) -> str:
    """Return a digest of config.json, every tensor's name, type and shape, and a piece of each.

    If weights are random, only the config is digested. Raises WeightsError, OSError.
    """
    if isinstance(block.config, dict):
        text = json.dumps(block.config, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    source = Path(block.config or block.name_or_path or "")
    file = source / "config.json" if source.is_dir() else source
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    if block.config is None:
        for name, what in sorted(_tensors(source)):
            digest.update(name.encode() + what)
    return digest.hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each tensor's name in a folder's safetensors files, and the bytes to digest of it."""
    for path in FolderWeights(folder).files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for name, entry in json.loads(file.read(length)).items():
                if name == "__metadata__":
                    continue
                first, stop = entry["data_offsets"]
                middle = max(first, (first + stop - PIECE) // 2)
                file.seek(8 + length + middle)
                shape = json.dumps([entry["dtype"], entry["shape"]]).encode()
                yield name, shape + file.read(min(PIECE, stop - middle))
