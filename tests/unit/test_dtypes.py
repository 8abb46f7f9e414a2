"""Element types: the table against the safetensors package itself."""

import pytest
from safetensors import deserialize

from storage.checkpoints.safetensors_header import DTYPE_BITS, atom_bytes, tensor_bits, tensor_bytes
from tests.support.checkpoints import raw_header


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
def test_sizes_equal_those_of_safetensors(dtype: str) -> None:
    shape = (4, 3)
    size = tensor_bytes(dtype, shape)

    def file(stored_bytes: int) -> bytes:
        entry = {"dtype": dtype, "shape": list(shape), "data_offsets": [0, stored_bytes]}
        return raw_header({"t": entry}, bytes(stored_bytes))

    ((name, tensor),) = deserialize(file(size))
    assert (name, tensor["dtype"], len(tensor["data"])) == ("t", dtype, size)
    with pytest.raises(Exception, match="invalid"):
        deserialize(file(size + 1))


def test_packed_types_must_fill_bytes() -> None:
    assert tensor_bits("F4", (3,)) == 12
    assert tensor_bytes("F4", (4, 2)) == 4
    assert tensor_bytes("F6_E2M3", (4,)) == 3
    with pytest.raises(ValueError, match="whole bytes"):
        tensor_bytes("F4", (3,))


def test_sizes_of_zero_elements_and_of_one() -> None:
    assert tensor_bytes("F64", ()) == 8
    assert tensor_bytes("F64", (5, 0, 3)) == 0


@pytest.mark.parametrize("shape", [(2**63,), (2**40, 2**40), (2**40, 2**40, 0), (2**61,)])
def test_overflow_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(OverflowError):
        tensor_bytes("U8" if len(shape) > 1 else "F64", shape)


def test_atoms_hold_whole_elements() -> None:
    for dtype, bits in DTYPE_BITS.items():
        assert atom_bytes(dtype) * 8 % bits == 0
    assert [atom_bytes(d) for d in ("F4", "F6_E2M3", "BF16", "C64")] == [1, 3, 2, 8]
