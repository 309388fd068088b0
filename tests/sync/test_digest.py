import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trueup.errors import TransportFault
from trueup.sync.digest import digest, lanes, merge, tensor_digest

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex128,
    torch.float8_e4m3fn,
]
ROW = 1 << 14


def random_tensor(dtype: torch.dtype, n: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 2, (n * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_single_flipped_byte_changes_the_digest(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, 300))
    tensor = random_tensor(dtype, n)
    before = tensor_digest("w", tensor)
    raw = tensor.view(torch.uint8)
    byte = data.draw(st.integers(0, raw.numel() - 1))
    raw[byte] ^= data.draw(st.integers(1, 255))
    assert tensor_digest("w", tensor) != before


@settings(max_examples=60, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 5 * ROW), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float64]),
)
def test_digests_of_shards_add_up_wherever_they_are_cut(
    cuts: list[int], dtype: torch.dtype
) -> None:
    tensor = random_tensor(dtype, 5 * ROW, seed=1)
    edges = [0, *sorted(cuts), 5 * ROW]
    parts = [
        tensor_digest("w", tensor[start:stop], offset=start)
        for start, stop in itertools.pairwise(edges)
    ]
    assert merge(reversed(parts)) == merge([tensor_digest("w", tensor)])


def test_one_hot_tensors_obey_the_definition() -> None:
    # bits(1) = 1, so a one-hot tensor's digest is h(name, i) itself: odd, and bits = 3 triples it
    for index in (0, 1, ROW - 1, ROW, 3 * ROW + 5):
        tensor = torch.zeros(4 * ROW, dtype=torch.int32)
        tensor[index] = 1
        h = tensor_digest("w", tensor)
        assert h % 2 == 1
        tensor[index] = 3
        assert tensor_digest("w", tensor) == 3 * h % 2**64
        tensor[index] = -1
        assert tensor_digest("w", tensor) == -h % 2**64


def test_the_sum_wraps_like_exact_integers() -> None:
    n = 100
    h = []
    for i in range(n):
        tensor = torch.zeros(n, dtype=torch.int32)
        tensor[i] = 1
        h.append(tensor_digest("w", tensor))
    values = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(3))
    expected = sum(v * c for v, c in zip(values.tolist(), h, strict=True)) % 2**64
    assert tensor_digest("w", values.to(torch.int32)) == expected


def test_name_and_position_matter() -> None:
    tensor = torch.arange(1.0, 2 * ROW + 1)
    swapped = tensor.clone()
    swapped[[3, ROW + 3]] = tensor[[ROW + 3, 3]]
    assert tensor_digest("a", tensor) != tensor_digest("b", tensor)
    assert tensor_digest("a", tensor) != tensor_digest("a", swapped)
    assert tensor_digest("a", tensor) != tensor_digest("a", tensor.flip(0))


def test_two_tensors_that_swap_their_values_are_noticed() -> None:
    a, b = torch.ones(8), torch.full((8,), 2.0)
    assert digest({"a": a, "b": b}) != digest({"a": b, "b": a})


def test_the_order_of_tensors_does_not_matter() -> None:
    a, b = torch.ones(8), torch.full((8,), 2.0)
    assert digest({"a": a, "b": b}) == digest({"b": b, "a": a})


def test_two_flips_of_the_top_bit_of_wide_elements_do_not_cancel() -> None:
    tensor = torch.arange(10, dtype=torch.int64)
    flipped = tensor.clone()
    flipped[[2, 7]] ^= -(2**63)
    assert tensor_digest("w", tensor) != tensor_digest("w", flipped)


def test_bits_count_not_values() -> None:
    # 0.0 == -0.0, and a NaN differs from itself: the digest sees neither
    assert tensor_digest("w", torch.tensor([0.0])) != tensor_digest("w", torch.tensor([-0.0]))
    nan = torch.tensor([float("nan")])
    assert tensor_digest("w", nan) == tensor_digest("w", nan.clone())


def test_a_view_has_the_digest_of_its_copy() -> None:
    tensor = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).t()
    assert tensor_digest("w", tensor) == tensor_digest("w", tensor.contiguous())


def test_empty_and_scalar_tensors_have_digests() -> None:
    assert tensor_digest("w", torch.empty(0)) == 0
    assert tensor_digest("w", torch.tensor(1.0)) == tensor_digest("w", torch.tensor([1.0]))
    assert digest({}) == "0" * 16


def test_the_digest_is_stable_across_machines_and_releases() -> None:
    # Stored in ledgers: a change of the function is a change of the format. The literal was worked
    # out with Python integers from the formula in the docstring of `sync.digest`.
    assert digest({"weight": torch.arange(40_000, dtype=torch.int32)}) == "d1db837ccef172d2"


def test_a_tensor_without_memory_is_refused() -> None:
    with pytest.raises(TransportFault, match="materialised"):
        lanes(torch.empty(3, device="meta"))
