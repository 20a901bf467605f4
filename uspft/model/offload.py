"""What layers keep for the backward pass, waiting on the host instead of the device.

It leaves when it is kept, and comes back before it is used: what a layer's attention keeps while
the layer runs again, and the input of the layer below behind the last that attention's backward
does, which has the most on the device. On a GPU copies run on a stream of their own,
to and from pinned memory. On a CPU they are made at once, in the same order.
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
"""Of a block of the host's memory. torch rounds pinned blocks up to a power of two: of a tensor in
one block up to half would be lost, of one in pieces less than one of them."""


class HostShelf:
    """What one forward pass has put on the host, in the order in which it was kept.

    A layer's input comes first, then what its attention keeps. The shelf holds none of it: what
    waits for the backward pass does.
    """

    def __init__(self, device: torch.device) -> None:
        self._copies = Copies(device)
        self._parcels: list[weakref.ref[Parcel]] = []
        self._layers: list[int] = []
        """The place of each layer's first parcel."""
        self._here: dict[int, tuple[Parcel, Tensor]] = {}
        """By its address, a storage that has been put here and is still on the device."""

    def input(self, x: Tensor) -> Item | Tensor:
        """Put a layer's input on the host. From here on it is what this layer keeps.

        An empty tensor, which torch 2.11's checkpointing keeps beside each, is returned.
        """
        if not x.numel():
            return x
        self.left()
        self._layers.append(len(self._parcels))
        return self._put(x)

    def keep(self, x: Tensor) -> Item:
        """Put on the host what the layer's attention keeps, within `together`."""
        return self._put(x, again=True)

    def left(self) -> None:
        """Give back the device's memory of all that layers so far have put here."""
        self._copies.left()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Copy each storage once, however many of its tensors are kept within the `with` block."""
        try:
            yield
        finally:
            self._here.clear()

    def _put(self, x: Tensor, *, again: bool = False) -> Item:
        storage = x.untyped_storage()
        address = storage._cdata  # of a storage without elements too
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
        """Return a tensor as it was, on the device, and let the rest of its layer's come."""
        if isinstance(item, Tensor):
            return item
        found = item.parcel.take().as_strided(item.shape, item.stride, item.offset)
        bounds = [*(self._layers or [0]), len(self._parcels)]
        layer = bisect_right(bounds, item.parcel.place) - 1
        self._fetch(range(bounds[layer] + 1, bounds[layer + 1]))
        return found

    def below(self, x: Tensor) -> None:
        """Let the input of the layer below come when the gradient of x has: an input of the
        attention of the layer that runs."""
        come = self.coming()
        x.register_hook(lambda _: come())

    def coming(self) -> Callable[[], None]:
        """Return the function that lets the input of the layer below the one that runs come."""
        places = self._layers[-2:-1]
        return lambda: self._fetch(places)

    def _fetch(self, places: Iterable[int]) -> None:
        """Let parcels come that are still waited for."""
        for place in places:
            if parcel := self._parcels[place]():
                parcel.fetch()

    def hooks(self) -> Any:
        """Return the context in which a checkpointed layer's input is kept on the host."""
        return torch.autograd.graph.saved_tensors_hooks(self.input, self.get)


class Item(NamedTuple):
    """One kept tensor: the storage that it lies in, and where."""

    parcel: Parcel
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Parcel:
    """One storage that is on the host, on its way, or back on the device.

    again: whether it is asked for more than once, and then stays on the device.
    """

    def __init__(self, copies: Copies, flat: Tensor, place: int, *, again: bool) -> None:
        self.place, self._again = place, again
        self._copies, self._host = copies, copies.to_host(flat)
        self._back: tuple[Tensor, Callable[[], None]] | None = None

    @property
    def here(self) -> bool:
        """Whether it has begun to come back, and has not been taken for good."""
        return self._back is not None

    def fetch(self) -> None:
        """Let it begin to come back."""
        if self._back is None:
            self._back = self._copies.to_device(self._host)

    def take(self) -> Tensor:
        """Return it flat, on the device."""
        self.fetch()
        assert self._back
        flat, wait = self._back
        wait()
        if not self._again:
            self._back = None
        return flat


class Copies:
    """Copies between a device and the host, in the order in which they are asked for.

    The host is far ahead of the device: memory that a copy on another stream still reads or writes
    when its tensor goes would have to wait until the host sees that the copy has ended
    (`Tensor.record_stream`), and layers would pile up. Instead a tensor is kept here until the
    device's own stream waits for its copy; what follows in that stream may have the memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._leaving: list[_UnderWay] = []
        self._coming: dict[int, _UnderWay] = {}
        self._asked = 0

    def to_host(self, flat: Tensor) -> list[Tensor]:
        """Return a copy on the host, in pieces, which is whole once the stream has come to it."""
        pieces = flat.split(max(1, PIECE_BYTES // flat.element_size()))
        if self._stream is None:
            return [piece.clone() for piece in pieces]
        host = [torch.empty(p.shape, dtype=p.dtype, pin_memory=True) for p in pieces]
        self._leaving.append(self._copied(flat, zip(host, pieces, strict=True)))
        return host

    def left(self) -> None:
        """Let the device's stream wait for what leaves, whose memory is then its own again."""
        for _, copied in self._leaving:
            torch.cuda.current_stream(self._device).wait_event(copied)
        self._leaving.clear()

    def to_device(self, host: list[Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Return a copy on the device, and the function that lets what follows wait for it."""
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
        """Copy into the first of each pair behind all that the device has been asked for."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for into, x in pairs:
                into.copy_(x, non_blocking=True)
            return _UnderWay(flat, self._stream.record_event())


class _UnderWay(NamedTuple):
    """A tensor of the device that is being copied, and what tells that this has ended."""

    flat: Tensor
    copied: Any


def offload_inputs(model: Any) -> None:
    """Make checkpointed layers keep their inputs on the host, where a call has a shelf for it."""
    for layer in model.base_model.layers:
        layer.forward = partial(offloaded, layer.forward)


def offloaded(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for a layer's forward, `plain`."""
    shelf: HostShelf | None = kwargs["uspft"].shelf
    with shelf.hooks() if shelf else nullcontext():
        return plain(*args, **kwargs)
