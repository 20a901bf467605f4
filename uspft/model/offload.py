"""Offloading of saved activations to the host until the backward pass.

A tensor is copied to the host when it is saved, and back before it is used: what a layer's
attention saved, while the layer is recomputed; and the input of the layer below, after attention's
backward, which is the peak of device memory. On a GPU copies run on a stream of their own, to and
from pinned memory. On a CPU they are made at once, in the same order.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 1 << 28
"""The size of a block of host memory. torch rounds pinned blocks up to a power of two, which could
waste half of a large block; with pieces of this size it wastes less than one piece per tensor."""


class HostShelf:
    """The tensors that one forward pass has offloaded, in order: for each layer its input, and then
    what its attention saved.

    The autograd graph owns them, through `Item`s; the shelf only has references.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = Copies(device)
        self._parcels: list[weakref.ref[Parcel]] = []
        self._layers: list[int] = []
        """The index of each layer's first parcel."""
        self._here: dict[int, tuple[Parcel, Tensor]] = {}
        """The offloaded storages that are still on the device too, by address."""

    def input(self, x: Tensor) -> Item:
        """Offload a layer's input, which begins a new layer."""
        self.left()
        self._layers.append(len(self._parcels))
        return self._put(x)

    def keep(self, x: Tensor) -> Item:
        """Offload a tensor that the layer's attention saves; called within `together`."""
        return self._put(x, again=True)

    def left(self) -> None:
        """Free the device memory of everything offloaded so far."""
        self._copies.left()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Copy each storage once within the `with` block, even if several of its tensors are
        saved."""
        try:
            yield
        finally:
            self._here.clear()

    def _put(self, x: Tensor, *, again: bool = False) -> Item:
        storage = x.untyped_storage()
        address = storage._cdata  # unique also for a storage without elements
        known = self._here.get(address) if again else None
        if known is None or known[1].dtype != x.dtype:
            flat = x.detach().as_strided((storage.nbytes() // x.element_size(),), (1,), 0)
            parcel = Parcel(self._copies, flat, len(self._parcels), again=again)
            self._parcels.append(weakref.ref(parcel))
            known = parcel, flat
            if again:
                self._here[address] = known
        return Item(known[0], tuple(x.shape), x.stride(), int(x.storage_offset()))

    def get(self, item: Item | Tensor) -> Tensor:
        """Return a tensor on the device, and start to copy back the rest of its layer's."""
        if isinstance(item, Tensor):
            return item
        found = item.parcel.take().as_strided(item.shape, item.stride, item.offset)
        bounds = [*(self._layers or [0]), len(self._parcels)]
        layer = bisect_right(bounds, item.parcel.place) - 1
        self._fetch(range(bounds[layer] + 1, bounds[layer + 1]))
        return found

    def below(self, x: Tensor) -> None:
        """Start to copy the input of the layer below back as soon as the gradient of x is computed.
        x: an input of the running layer's attention."""
        come = self.coming()
        x.register_hook(lambda _: come())

    def coming(self) -> Callable[[], None]:
        """Return the function that starts to copy back the input of the layer below the running
        one."""
        places = self._layers[-2:-1]
        return lambda: self._fetch(places)

    def _fetch(self, places: Iterable[int]) -> None:
        """Start to copy back those of these parcels that are still needed."""
        for place in places:
            if parcel := self._parcels[place]():
                parcel.fetch()

    def hooks(self, x: Tensor) -> Any:
        """Return the context in which the input of a checkpointed layer is offloaded, and nothing
        else that checkpointing saves: an empty tensor (torch 2.11), and a layer's part of the
        embeddings of all layers, which are one tensor (Gemma 4). x: the input."""
        here = x.untyped_storage()._cdata

        def put(saved: Tensor) -> Item | Tensor:
            return self.input(saved) if saved.untyped_storage()._cdata == here else saved

        return torch.autograd.graph.saved_tensors_hooks(put, self.get)


class Item(NamedTuple):
    """One saved tensor: its storage, and its position in it."""

    parcel: Parcel
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Parcel:
    """One offloaded storage: on the host, being copied, or back on the device.

    again: whether it is needed more than once, and so stays on the device after the first use.
    """

    def __init__(self, copies: Copies, flat: Tensor, place: int, *, again: bool) -> None:
        self.place, self._again = place, again
        self._copies, self._host = copies, copies.to_host(flat)
        self._back: tuple[Tensor, Callable[[], None]] | None = None

    @property
    def here(self) -> bool:
        """Whether it is being copied back or is back, and has not been taken for the last time."""
        return self._back is not None

    def fetch(self) -> None:
        """Start to copy it back."""
        if self._back is None:
            self._back = self._copies.to_device(self._host)

    def take(self) -> Tensor:
        """Return the storage on the device, flat."""
        self.fetch()
        assert self._back
        flat, wait = self._back
        wait()
        if not self._again:
            self._back = None
        return flat


class Copies:
    """Copies between a device and the host, in the order in which they are started.

    The host runs far ahead of the device. With `Tensor.record_stream`, memory used by a copy on
    another stream would only be reused after the host sees that the copy has ended, and layers
    would pile up. Instead a tensor stays referenced here until the device's main stream waits for
    its copy; later work in that stream may reuse the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: list[_UnderWay] = []
        self._coming: dict[int, _UnderWay] = {}
        self._asked = 0

    def to_host(self, flat: Tensor) -> list[Tensor]:
        """Return a copy on the host, in pieces, which is complete when the copy stream reaches
        it."""
        pieces = flat.split(max(1, PIECE_BYTES // flat.element_size()))
        if self._stream is None:
            return [piece.clone() for piece in pieces]
        host = [torch.empty(p.shape, dtype=p.dtype, pin_memory=True) for p in pieces]
        self._leaving.append(self._copied(flat, zip(host, pieces, strict=True)))
        return host

    def left(self) -> None:
        """Make the device's stream wait for the copies to the host, whose sources it may then
        reuse."""
        for _, copied in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._leaving.clear()

    def to_device(self, host: list[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return a copy on the device, and the function that makes later work wait for it."""
        if self._stream is None:
            return torch.cat(host), lambda: None
        sizes = [len(piece) for piece in host]
        flat = torch.empty(sum(sizes), dtype=host[0].dtype, device=self._device)
        number, self._asked = self._asked, self._asked + 1
        self._coming[number] = self._copied(flat, zip(flat.split(sizes), host, strict=True))

        def wait() -> None:
            if coming := self._coming.pop(number, None):
                torch.cuda.current_stream(self._device).wait_event(coming.copied)

        return flat, wait

    def _copied(self, flat: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> _UnderWay:
        """Copy the second of each pair into the first, after all work queued on the device."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for into, x in pairs:
                into.copy_(x, non_blocking=True)
            return _UnderWay(flat, self._stream.record_event())


class _UnderWay(NamedTuple):
    """A device tensor that is being copied, and the event that marks the copy's end."""

    flat: Tensor
    copied: Any


def offload_inputs(model: Any) -> None:
    """Make checkpointed layers offload their inputs, in calls that have a shelf."""
    for layer in model.base_model.layers:
        layer.forward = partial(offloaded, layer.forward)


def offloaded(plain: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a layer's forward, `plain`, with its input x offloaded."""
    shelf: HostShelf | None = kwargs["uspft"].shelf
    with shelf.hooks(x) if shelf else nullcontext():
        return plain(x, *args, **kwargs)
