"""What waits on the host: as it was, once, in time, and with nothing left on the device."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from uspft.model.offload import Copies, HostShelf, offloaded
from uspft.model.recompute import attend_once

CPU = torch.device("cpu")


class Layer(nn.Module):
    """As a checkpointed layer: attention that is remembered between two products."""

    def __init__(self, number: int, given: list[Any]) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number, self._given = number, given
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        def once(x: Tensor) -> Tensor:
            self._given.append(StorageWeakRef(x.untyped_storage()))
            bound = kwargs["uspft"]
            out = attend_once(
                bound.memory, self.number, self.attend, (self.into(x),), shelf=bound.shelf
            )
            return x + self.out(out)

        found: Tensor = checkpoint(once, x, use_reentrant=False)
        return found

    @staticmethod
    def attend(inputs: tuple[Tensor, ...]) -> Tensor:
        """It keeps two halves of one tensor, and what it returns."""
        (x,) = inputs
        halves = (x * 2.0).exp()
        return torch.tanh(halves[:, :3] * halves[:, 3:]).repeat(1, 2).exp()


def run(layers: list[Any], shelf: HostShelf | None) -> list[Tensor]:
    bound = SimpleNamespace(shelf=shelf, memory={})
    x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
    out = x
    for layer in layers:
        out = layer(out, uspft=bound)
    loss = out.square().sum()
    del out
    gc.collect()
    bound.loss = loss
    return [loss, x]


def made(number: int, given: list[Any], *, offloads: bool) -> list[Layer]:
    layers = [Layer(n, given) for n in range(number)]
    for layer in layers if offloads else []:
        layer.forward = partial(offloaded, layer.forward)  # type: ignore[method-assign]
    return layers


@pytest.mark.parametrize("offloads", [False, True])
def test_it_comes_back_as_it_was_and_nothing_stays_behind(offloads: bool) -> None:
    plain = made(3, [], offloads=False)
    loss, x = run(plain, None)
    loss.backward()
    given: list[Any] = []
    layers = made(3, given, offloads=offloads)
    shelf = HostShelf(CPU)
    got, y = run(layers, shelf if offloads else None)
    # The first layer's input is the caller's, the last layer's output the loss's.
    assert [one.expired() for one in given] == [False, offloads, offloads]
    got.backward()
    assert torch.equal(got, loss) and y.grad is not None and x.grad is not None
    assert torch.equal(y.grad, x.grad)
    for one, other in zip(layers, plain, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            assert a.grad is not None and b.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize(("piece_bytes", "pieces"), [(96, [24]), (40, [10, 10, 4]), (3, [1] * 24)])
def test_what_is_large_waits_in_pieces(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, pieces: list[int]
) -> None:
    monkeypatch.setattr("uspft.model.offload.PIECE_BYTES", piece_bytes)
    copies, flat = Copies(CPU), torch.arange(24.0)
    host = copies.to_host(flat)
    assert [len(piece) for piece in host] == pieces
    assert all(one.untyped_storage().nbytes() == 4 * len(one) for one in host)
    back, wait = copies.to_device(host)
    wait()
    assert torch.equal(back, flat) and back.data_ptr() not in [one.data_ptr() for one in host]


def test_a_storage_leaves_once_and_comes_back_with_its_strides() -> None:
    shelf, whole = HostShelf(CPU), torch.arange(24.0).view(4, 6)
    with shelf.together():
        items = [shelf.keep(x) for x in (whole[:, 1:3], whole[:, 3:], whole)]
        other = shelf.keep(whole.clone())
    assert len({id(item.parcel) for item in items}) == 1
    assert other.parcel is not items[0].parcel
    found = [shelf.get(item) for item in items]
    assert [x.stride() for x in found] == [(6, 1)] * 3
    assert torch.equal(found[0], whole[:, 1:3]) and torch.equal(found[1], whole[:, 3:])
    assert len({x.untyped_storage().data_ptr() for x in found}) == 1
    with shelf.together():  # what has left may have given its address to something else
        assert shelf.keep(whole).parcel is not items[0].parcel


class _KeepsTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, empty: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(empty, x)
        return x.sum()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[None, Tensor]:
        empty, x = ctx.saved_tensors
        assert empty.shape == (0,)
        return None, dout.expand_as(x)


def test_an_empty_tensor_beside_an_input_is_none() -> None:
    """torch 2.11's checkpointing keeps one on the CPU, whichever device the input is on."""
    shelf, x = HostShelf(CPU), torch.ones(3, requires_grad=True)
    first = shelf.input(torch.ones(2))
    with shelf.hooks(x):
        out = _KeepsTwo.apply(torch.empty(0, requires_grad=True), x)
    shelf.coming()()
    assert not isinstance(first, Tensor) and first.parcel.here
    out.backward()
    assert x.grad is not None and torch.equal(x.grad, torch.ones(3))


def test_what_is_used_next_comes_first() -> None:
    """A layer's input brings what its attention keeps, and the end of attention's backward the
    input of the layer below."""
    shelf = HostShelf(CPU)
    layers, attended = [], []
    for _ in range(3):
        first = shelf.input(torch.ones(2))
        attended.append(torch.ones(2, requires_grad=True).exp())
        shelf.below(attended[-1])
        with shelf.together():
            layers.append([first, shelf.keep(torch.ones(3)), shelf.keep(torch.ones(4))])

    def here() -> list[list[bool]]:
        return [[item.parcel.here for item in layer] for layer in layers]

    shelf.get(layers[2][0])
    assert here() == [[False] * 3, [False] * 3, [False, True, True]]
    shelf.get(layers[2][1])
    assert here() == [[False] * 3, [False] * 3, [False, True, True]]
    attended[2].sum().backward()  # type: ignore[no-untyped-call]
    assert here() == [[False] * 3, [True, False, False], [False, True, True]]
    shelf.get(layers[1][0])
    assert here() == [[False] * 3, [False, True, True], [False, True, True]]
    attended[0].sum().backward()  # type: ignore[no-untyped-call]
    assert here()[0] == [False] * 3
    del layers[1]
    attended[1].sum().backward()  # type: ignore[no-untyped-call]
    assert here()[0] == [True, False, False]


def test_an_empty_tensor_is_kept_too() -> None:
    shelf = HostShelf(CPU)
    with shelf.together():
        item = shelf.keep(torch.ones(0, 4))
    assert shelf.get(item).shape == (0, 4)


def test_a_shelf_holds_nothing_that_its_user_has_let_go_of() -> None:
    """Else all that layers keep would stay on the host until the last of them has used its own."""
    shelf, x = HostShelf(CPU), torch.ones(3)
    with shelf.together():
        kept = shelf.keep(x)
    given = shelf.input(x)
    parcels = [weakref.ref(item.parcel) for item in (kept, given)]
    gc.disable()
    try:
        for item in (kept, given):
            assert torch.equal(shelf.get(item), x)
        assert [parcel() is None for parcel in parcels] == [False, False]
        del item, kept, given
        assert [parcel() for parcel in parcels] == [None, None]
    finally:
        gc.enable()
