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
from uspft.parameters.experts import Stored, read_quantised, shape_of, stored_in, whole_shape
from uspft.parameters.names import plain_name
from uspft.tensor.parts import Part, as_slices, read_boxes

if TYPE_CHECKING:
    from uspft.config.inputs import ModelBlock
    from uspft.tensor.parts import Range


class WeightsError(InputError):
    """The error that a model's files lack a parameter, have one of another shape, or cannot be
    read."""

    def __init__(self, what: str, remedy: str) -> None:
        self.findings = [("model.name_or_path", what, remedy)]
        super().__init__(f"{what}; {remedy}")


_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}
"""Floating point dtypes by their name in headers."""
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
        self._own_names = _by_own_name(self._files)
        made = stored_in(self._own_names)
        plain = {name: Stored([name], 0) for name in self._own_names}
        self._stored = {
            name: one._replace(parts=[self._own_names[part] for part in one.parts])
            for name, one in (made | plain).items()
        }
        """For each parameter by its Hugging Face name, the names of the tensors that make it up in
        the files."""
        self._names = made.keys()

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        stored = self._required(name)
        if len(stored.parts) == 1:
            return self._read_part(name, stored.parts[0], part)
        if stored.quantised:
            return self._read_quantised(name, stored.parts, part)
        return self._read_parts(name, stored, part)

    def _read_quantised(self, name: str, stored: list[str], part: Part) -> Tensor:
        """Read a part of a parameter in MXFP4, as float32. Raises WeightsError."""
        blocks, scales = ((self._folder / self._files[one], one) for one in stored)
        with _opened(blocks[0]) as mine, _opened(scales[0]) as theirs:
            packed = mine.get_slice(blocks[1])
            _require_shape(blocks[0], name, whole_shape(tuple(packed.get_shape())), part)
            return read_quantised(packed, theirs.get_slice(scales[1]), part)

    def _read_parts(self, name: str, stored: Stored, part: Part) -> Tensor:
        """Read a part of a parameter that files store as several tensors, per expert or in all;
        only the part's bytes are read. Raises WeightsError."""
        width, out = stored.width or len(stored.parts), None
        first = {one: self._stored_shape(one) for one in stored.parts[:width]}
        path = self._folder / self._files[stored.parts[0]]
        _require_shape(path, name, shape_of(stored, first), part)
        of_expert, experts = part, [0]
        if stored.width:
            of_expert = Part(part.shape[1:], part.ranges[1:])
            experts = [*chain.from_iterable(range(*bounds) for bounds in part.ranges[0])]
        for at, expert in enumerate(experts):
            rows = 0
            for one in stored.parts[expert * width : (expert + 1) * width]:
                with _opened(self._folder / self._files[one]) as tensors:
                    held = tensors.get_slice(one)
                    more, *others = held.get_shape()
                    spans = ((rows, rows + more),), *(((0, size),) for size in others)
                    for here, there in of_expert.meets(Part(of_expert.shape, spans)):
                        value = held[as_slices(there)]
                        out = value.new_empty(part.size) if out is None else out
                        (out[at] if stored.width else out)[as_slices(here)] = value
                rows += more
        assert out is not None
        return out

    def _stored_shape(self, stored: str) -> tuple[int, ...]:
        with _opened(self._folder / self._files[stored]) as tensors:
            return tuple(tensors.get_slice(stored).get_shape())

    def holds(self, name: str) -> bool:
        return name in self._stored

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

    def _required(self, name: str) -> Stored:
        if (stored := self._stored.get(name)) is None:
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
        own = {stored: name for name, stored in self._own_names.items()}

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
        return {name: shape_of(self._stored[name], found) for name in self._names}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file. Errors of reading inside the `with` block raise WeightsError too."""
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except WeightsError:
        raise
    except Exception as error:  # safetensors raises several types, none of them exported
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
"""How many rows are in memory at a time for the mean."""


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
"""The bytes in the middle of each tensor that are hashed; enough, since training changes every
tensor."""


def base_digest(block: ModelBlock) -> str:
    """Return a hash of config.json, every tensor's name, type and shape, and a few bytes of each.

    If weights are random, only the config is hashed. Raises WeightsError, OSError.
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
    """Yield each tensor's name in a folder's safetensors files, and the bytes to hash of it."""
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
