"""Lazy tensors are compared with plain ones, and the bytes that they read are counted."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.reader.lazy_tensor import LazyTensor, assignments_read, read_assigned


class Stored:
    """A stored tensor in memory that counts what is read of it."""

    def __init__(self, tensor: torch.Tensor, name: str = "w") -> None:
        self.tensor, self.name = tensor, name
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.reads: list[int] = []  # bytes of each
        self.into_targets = 0  # reads straight into somebody's tensor
        self.whole_reads = 0

    def read(
        self,
        shape: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
        target: torch.Tensor | None = None,
    ) -> torch.Tensor:
        box = self.tensor.reshape(tuple(shape))[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]
        assert tuple(box.shape) == tuple(sizes), "a read beyond the tensor"
        self.reads.append(box.nbytes)
        if target is not None:
            self.into_targets += 1
            target.view(-1).copy_(box.reshape(-1))
            return target
        return box.clone(memory_format=torch.contiguous_format)

    def read_all(self) -> torch.Tensor:
        self.whole_reads += 1
        return self.read(self.shape, (0,) * len(self.shape), self.shape)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor in which all elements differ."""
    return torch.arange(1, 1 + int(np.prod(shape)), dtype=dtype).reshape(shape)


def lazy(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[LazyTensor, torch.Tensor, Stored]:
    """Return a lazy tensor, the same as a plain one, and what was read."""
    tensor = numbers(*shape, dtype=dtype)
    stored = Stored(tensor)
    return LazyTensor(stored), tensor.clone(), stored


# --- assignment to a lazy tensor -------------------------------------------------------------------------------


@pytest.mark.parametrize("in_mode", [False, True])
def test_data_assigned_to_a_lazy_parameter_is_what_it_holds(in_mode: bool):
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(lambda t: t * 2, lambda t: t.bfloat16(), lambda t: t.t(), lambda t: t.narrow(0, 1, 2)),
        *(lambda t: torch.zeros(2, 2), lambda t: torch.arange(24.0).view(6, 4)[2:4]),
    ]
    for change in changes:
        weight, plain, _ = lazy(6, 4)
        view = weight.narrow(0, 1, 2)
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        with assignments_read() if in_mode else contextlib.nullcontext():
            module.weight.data = change(module.weight.data)
        expected = change(plain)
        assert (module.weight.shape, module.weight.dtype) == (expected.shape, expected.dtype)
        assert torch.equal(module.weight + 0, expected)
        assert read_assigned(module) == ["weight"]
        assert torch.equal(module.weight, expected)
        assert torch.equal(view + 0, plain[1:3])  # it shows what is stored


def test_a_lazy_tensor_in_shared_memory():
    weight, plain, stored = lazy(3, 4)
    shared = weight.share_memory_()
    assert shared.is_shared()
    assert torch.equal(shared, plain)
    assert stored.whole_reads == 1


def test_the_default_device_changes_nothing():
    weight, plain, _ = lazy(3, 4)
    with torch.device("meta"):
        found = [weight.read(), weight[:0].read(), weight.narrow(1, 1, 2).read(), weight.view(torch.int32).read()]
    assert [tensor.device.type for tensor in found] == ["cpu"] * 4
    assert torch.equal(found[2], plain.narrow(1, 1, 2))


# --- random chains -----------------------------------------------------------------------------------------


def _dim(draw: st.DrawFn, tensor: torch.Tensor) -> int:
    return draw(st.integers(-tensor.dim(), tensor.dim() - 1))


def _narrow(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    dim = _dim(draw, t)
    start = draw(st.integers(0, t.shape[dim]))
    length = draw(st.integers(0, t.shape[dim] - start))
    return lambda x: x.narrow(dim, start, length)


def _slice(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    cuts = tuple(
        slice(draw(st.integers(-n, n)), draw(st.none() | st.integers(-n, n)), draw(st.integers(1, 3))) for n in t.shape
    )
    index = draw(st.sampled_from([cuts, (..., *cuts[-1:]), (None, *cuts)]))
    return lambda x: x[index]


def _select(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    dim = _dim(draw, t)
    index = draw(st.integers(-t.shape[dim], t.shape[dim] - 1))
    return lambda x: x.select(dim, index)


def _permute(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    order = draw(st.permutations(range(t.dim())))
    return lambda x: x.permute(order)


def _split_dim(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    dim = draw(st.integers(0, t.dim() - 1))
    parts = draw(st.sampled_from([n for n in range(1, t.shape[dim] + 1) if t.shape[dim] % n == 0]))
    return lambda x: x.unflatten(dim, (parts, -1))


def _chunk(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    dim, parts = _dim(draw, t), draw(st.integers(1, 4))
    return lambda x: x.chunk(parts, dim)[-1]


def _unfold(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    dim = _dim(draw, t)
    size = draw(st.integers(1, t.shape[dim]))
    return lambda x: x.unfold(dim, size, 1)


def _expand(draw: st.DrawFn, t: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    copies = draw(st.integers(1, 3))
    return lambda x: x.unsqueeze(0).expand(copies, *x.shape)


VIEWS: list[tuple[Callable[[torch.Tensor], bool], Any]] = [
    (lambda t: t.dim() > 0, _narrow),
    (lambda t: t.dim() > 0, _slice),
    (lambda t: t.dim() > 0 and t.numel() > 0, _select),
    (lambda t: t.dim() > 0, _permute),
    (lambda t: t.dim() > 0 and t.numel() > 0, _split_dim),
    (lambda t: t.dim() > 0 and t.shape[0] > 0 and t.shape[-1] > 0, _chunk),
    (lambda t: t.dim() > 0 and t.numel() > 0, _unfold),
    (lambda t: t.dim() < 5, _expand),
    (lambda t: True, lambda draw, t: lambda x: x.reshape(-1)),
    (lambda t: t.is_contiguous(), lambda draw, t: lambda x: x.view(-1)),
    (lambda t: t.dim() == 2, lambda draw, t: lambda x: x.t()),
    (lambda t: t.dim() >= 2, lambda draw, t: lambda x: x.diagonal(0, 0, 1)),
    (lambda t: True, lambda draw, t: lambda x: x.unsqueeze(-1)),
    (lambda t: True, lambda draw, t: lambda x: x.squeeze()),
    (lambda t: True, lambda draw, t: lambda x: x.detach()),
    (lambda t: True, lambda draw, t: lambda x: x.data),
    (lambda t: t.dim() > 0 and t.stride(-1) == 1, lambda draw, t: lambda x: x.view(torch.uint8)),
    (lambda t: t.dtype is torch.float32, lambda draw, t: lambda x: x.view(torch.int32)),
]

ENDS: list[Callable[[Any], Any]] = [
    lambda x: torch.empty(x.shape, dtype=x.dtype).copy_(x),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: x.to(torch.float64),
    lambda x: x + x,
    lambda x: torch.stack([x, x]),
    lambda x: torch.tensor(x.tolist()),
    lambda x: torch.from_numpy(x.numpy().copy()),
    lambda x: copy.deepcopy(x),
    lambda x: pickle.loads(pickle.dumps(x)),
]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_chains_of_views_and_copies_equal_plain_tensors(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    ours, plain, stored = lazy(*shape)
    for _ in range(data.draw(st.integers(0, 6))):
        possible = [make for fits, make in VIEWS if fits(plain)]
        step = data.draw(st.sampled_from(possible))(data.draw, plain)
        ours, plain = step(ours), step(plain)
        assert (ours.shape, ours.dtype, ours.stride()) == (plain.shape, plain.dtype, plain.stride())
    end = data.draw(st.sampled_from(ENDS))
    found, expected = end(ours), end(plain)
    assert type(found) is torch.Tensor or found is ours
    assert torch.equal(found.clone(), expected)
    assert all(read_bytes <= stored.tensor.nbytes for read_bytes in stored.reads)


# --- what is read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("view", "elements"),
    [
        (lambda w: w, 32),
        (lambda w: w.narrow(0, 2, 3), 12),
        (lambda w: w.narrow(1, 1, 2), 16),
        (lambda w: w[2:4, 1:3], 4),
        (lambda w: w.t()[1], 8),
        (lambda w: w.view(4, 2, 4)[1:3], 16),
        (lambda w: w.view(2, 4, 4)[:, 1], 20),  # rows 1 and 5, and all between them
        (lambda w: w.flatten()[3:7], 4),
        (lambda w: w[5, 3], 1),
        (lambda w: w[0].expand(7, 4), 4),
        (lambda w: w[:0], 0),
        (lambda w: w.chunk(4)[3], 8),
        (lambda w: w.view(torch.int16)[2:4, 2:4], 5),  # elements of another size: the range from first to last
    ],
)
def test_a_copy_reads_only_what_the_view_shows(view: Callable[[Any], Any], elements: int) -> None:
    ours, plain, stored = lazy(8, 4)
    shown = view(ours)
    assert isinstance(shown, LazyTensor)
    assert stored.reads == []
    assert torch.equal(torch.empty(shown.shape, dtype=shown.dtype).copy_(shown), view(plain))
    assert sum(stored.reads) == 4 * elements


def test_a_copy_of_a_box_is_read_into_its_target():
    ours, plain, stored = lazy(8, 4)
    target = torch.zeros(4, 4)
    target[1:3].copy_(ours[5:7])
    target[0].copy_(ours.t()[1][:4])  # a column: the box is in order
    target.t()[3].copy_(ours[0])  # a target that is not contiguous
    torch.zeros(4, 8).copy_(ours.t())
    assert stored.into_targets == 2
    expected = torch.zeros(4, 4)
    expected[1:3], expected[0] = plain[5:7], plain.t()[1][:4]
    expected.t()[3] = plain[0]
    assert torch.equal(target, expected)
    half = torch.zeros(8, 4, dtype=torch.bfloat16).copy_(ours)
    assert torch.equal(half, plain.bfloat16())
    assert stored.into_targets == 2


def test_a_copy_to_a_tensor_without_memory_reads_nothing() -> None:
    ours, _plain, stored = lazy(8, 4)
    target = torch.empty(2, 4, device="meta")
    assert target.copy_(ours[2:4]) is target
    with pytest.raises(RuntimeError):
        torch.empty(3, 5, device="meta").copy_(ours)
    assert stored.reads == []


def test_properties_read_nothing() -> None:
    ours, _plain, stored = lazy(3, 5)
    assert (len(ours), ours.numel(), ours.nbytes, ours.element_size()) == (3, 15, 60, 4)
    assert (ours.device.type, ours.is_contiguous(), ours.t().is_contiguous()) == ("cpu", True, False)
    assert not ours.requires_grad
    assert ours.contiguous() is not None
    assert ours.to("cpu") is not None
    assert repr(ours[1:]) == "LazyTensor('w', shape=(2, 5), dtype=torch.float32)"
    assert stored.reads == []


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int8, torch.bool, torch.complex64],
)
def test_every_dtype_is_read(dtype: torch.dtype) -> None:
    plain = torch.arange(16).reshape(4, 4).to(dtype)
    ours = LazyTensor(Stored(plain))
    assert torch.equal(ours[1:3].clone().view(torch.uint8), plain[1:3].clone().view(torch.uint8))


def test_conjugate_and_imaginary_views_are_right() -> None:
    plain = torch.complex(numbers(4, 3), -numbers(4, 3))
    ours = LazyTensor(Stored(plain))
    assert torch.equal(ours.conj()[1:].clone(), plain.conj()[1:].clone())
    assert torch.equal(ours.conj().imag.clone(), plain.conj().imag.clone())
    assert torch.equal(torch.view_as_real(ours)[2].clone(), torch.view_as_real(plain)[2].clone())


def test_scalars_are_read() -> None:
    plain = torch.tensor(2.5)
    ours = LazyTensor(Stored(plain))
    assert (ours.item(), float(ours), bool(ours > 1)) == (2.5, 2.5, True)
    assert torch.zeros(3).fill_(ours.item()).tolist() == [2.5] * 3


# --- writes, memory and assignments ------------------------------------------------------------------------


def test_a_write_is_seen_by_all_views() -> None:
    ours, plain, stored = lazy(4, 4)
    row, column = ours[1], ours.t()[2]
    for w in (ours, plain):
        w[1].mul_(10)
        w[0, 2] = -1
        w[w > 100] = 0
    assert torch.equal(row.clone(), plain[1])
    assert torch.equal(column.clone(), plain.t()[2])
    assert stored.reads == [64]


def test_in_place_operations_return_the_lazy_tensor() -> None:
    ours, plain, _ = lazy(2, 3)
    result = ours.add_(1)
    assert result is ours
    assert torch.equal(ours.clone(), plain + 1)
    out = torch.add(plain, 1, out=ours)
    assert out is ours
    assert torch.equal(ours.clone(), plain + 1)


def test_views_in_place_change_the_lazy_tensor() -> None:
    ours, plain, stored = lazy(2, 3)
    ours.t_().unsqueeze_(0)
    assert ours.shape == (1, 3, 2)
    assert stored.reads == []
    assert torch.equal(ours.clone(), plain.t().unsqueeze(0))


def test_memory_is_shared_once_somebody_asked_for_it() -> None:
    ours, _, stored = lazy(4, 4)
    assert ours[1:].data_ptr() == ours.data_ptr() + 16
    ours.numpy()[1, 0] = 99
    assert ours[1, 0].item() == 99
    assert len(stored.reads) == 1


def test_assigned_data_is_read() -> None:
    ours, plain, stored = lazy(4, 4)
    parameter = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
    with assignments_read():
        parameter.data = ours.narrow(0, 1, 2)
    assert type(parameter.data) is torch.Tensor
    assert torch.equal(parameter.data, plain[1:3])
    assert stored.reads == [32]


def test_parameters_made_of_lazy_tensors_are_replaced() -> None:
    ours, plain, _ = lazy(4, 4)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[0].weight = torch.nn.Parameter(ours, requires_grad=False)
    model[1].weight = model[0].weight  # tied
    model.register_buffer("scale", LazyTensor(Stored(numbers(2), "scale")))
    assert read_assigned(model) == ["scale", "0.weight"]
    assert type(model[0].weight) is torch.nn.Parameter
    assert type(model.scale) is torch.Tensor
    assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, plain)
    assert read_assigned(model) == []


@pytest.mark.parametrize("assign", [False, True])
def test_modules_load_a_lazy_state_dict(assign: bool) -> None:
    ours, plain, _ = lazy(4, 6)
    layer = torch.nn.Linear(6, 4, bias=False)
    layer.load_state_dict({"weight": ours}, assign=assign)
    read_assigned(layer)
    assert torch.equal(layer.weight, plain)
    assert torch.equal(layer(torch.ones(6)), plain.sum(1))


def test_fused_and_stacked_parameters_read_their_parts_only() -> None:
    gate, gate_plain, gate_read = lazy(8, 4)
    experts, experts_plain, experts_read = lazy(6, 8, 4)
    fused, stacked = torch.zeros(8, 4), torch.zeros(3, 4, 8)
    fused.narrow(0, 4, 4).copy_(gate.narrow(0, 4, 4))
    for number, expert in enumerate((1, 4, 5)):
        stacked[number].copy_(experts[expert].t().contiguous())
    assert torch.equal(fused[4:], gate_plain[4:])
    assert sum(gate_read.reads) == gate_plain.nbytes // 2
    assert torch.equal(stacked, experts_plain[[1, 4, 5]].transpose(1, 2))
    assert sum(experts_read.reads) == experts_plain.nbytes // 2


def test_quantizing_while_loading_reads_the_part_once() -> None:
    ours, plain, stored = lazy(8, 4, dtype=torch.bfloat16)
    part = ours.narrow(0, 0, 4).to(torch.float32)
    scale = part.abs().amax() / 448
    quantized = (part / scale).to(torch.float8_e4m3fn)
    assert torch.equal(quantized, (plain[:4].float() / (plain[:4].float().abs().amax() / 448)).to(torch.float8_e4m3fn))
    assert stored.reads == [32]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions_read_it(backend: str) -> None:
    ours, plain, _ = lazy(4, 4)
    compiled = torch.compile(lambda x: x.t() * 2 + 1, backend=backend)
    assert torch.equal(compiled(ours), plain.t() * 2 + 1)


def test_errors_of_a_read_reach_the_caller() -> None:
    stored = Stored(numbers(2))

    def fails(*_: Any) -> torch.Tensor:
        raise ConnectionError("the store is gone")

    stored.read = fails  # type: ignore[method-assign]
    with pytest.raises(ConnectionError, match="the store is gone"):
        torch.zeros(2).copy_(LazyTensor(stored))
