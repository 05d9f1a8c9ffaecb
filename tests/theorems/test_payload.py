"""The coded exchange as theorems: what it keeps exactly, what its errors are, and that both ends agree."""

import math
from collections.abc import Sequence
from itertools import count

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_noloco.outer import ExchangeReport
from megatron_noloco.outer.bucket_code import DIGITS
from megatron_noloco.outer.payload import (
    BLOCK,
    CELLS,
    Codec,
    Received,
    blocks_in,
    message_bytes,
    signs_of,
    whole_steps,
    wide_type,
)
from megatron_noloco.outer.vectors import BUCKET
from megatron_noloco.plans.grouping import Group
from megatron_noloco.plans.payloads import BITS, CODES
from megatron_noloco.plans.stability import pull_error
from tests.kit.fleet import all_blocks, average, fleet_of, noise

ERRORS = {8: 0.05, 4: 0.6, 3: 0.9}  # of the pull towards the group's mean; generous
KEPT_ERROR = 0.8  # likewise, of groups that keep it


def means(vectors: Tensor, group: Group, bits: int) -> tuple[Tensor, list[ExchangeReport]]:
    """Return what the members take for the mean, with what they keep of it, and the reports."""
    found, exchanges = average(vectors, group, bits)
    kept = [torch.zeros(len(found[0])) if one._rounding is None else one._rounding for one in exchanges]
    return found + torch.stack(kept), [exchange.report for exchange in exchanges]


def alike(replicas: int, elements: int, apart: float = 0.01, seed: int = 0) -> Tensor:
    """Return vectors of size 1 that differ by `apart`."""
    return noise(elements, seed=seed) + apart * noise(replicas, elements, seed=seed + 1)


# What is kept exactly


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(0, 1), (0, 2, 4), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("elements", [1, 700, 9000])
def test_the_mean_of_the_group_is_kept_and_each_is_near_it(bits: int, group: Group, elements: int) -> None:
    vectors = alike(5, elements)
    found, reports = means(vectors, group, bits)
    true = vectors[list(group)].double()
    one_rounding = 2**-23 * float(true.abs().max())
    torch.testing.assert_close(found.double().mean(0), true.mean(0), rtol=0, atol=one_rounding)
    pull = (true - true.mean(0)).norm()
    error = KEPT_ERROR if bits < 8 and len(group) > 2 else ERRORS[bits]
    assert (found.double() - true.mean(0)).norm() <= error * pull + len(true) * one_rounding
    assert sum(report.compared_elements for report in reports) == elements * (2 if len(group) == 2 else 1)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_in_one_group_stay_together_to_a_part_of_a_step(bits: int, replicas: int) -> None:
    """Facts 1 and 4, but not bitwise; what the code leaves is forgotten like any other spread."""
    fleet = fleet_of(replicas, replicas, elements=2000, payload=f"int{bits}")
    for round_index in range(5):
        theta = fleet.phi + 0.01 * noise(replicas, 2000, seed=round_index)
        fleet.train(theta)
        fleet.exchange(round_index)
        apart = float((0.7 * theta).std(dim=0).norm())
        assert float(fleet.phi.std(dim=0).norm()) < 2 * ERRORS[bits] * apart
    spread = float(fleet.phi.std(dim=0).norm())
    for round_index in range(5, 25):
        fleet.exchange(round_index)
    assert float(fleet.phi.std(dim=0).norm()) < spread / 30 + 1e-5


@pytest.mark.parametrize("members", [3, 9])
@pytest.mark.parametrize("bucket", [BUCKET, 3 * BLOCK])
def test_kept_errors_leave_equal_bits(members: int, bucket: int) -> None:
    """Blocks that are sent in fp32 have no error; the others, also in next bits, have that which is reported."""
    vectors = alike(members, 9000)
    vectors[0, 600], exact = 7.0, (2000, 2100)  # a difference that does not fit
    found, exchanges = average(vectors, tuple(range(members)), 4, bucket=bucket, exact=[exact])
    rounding = torch.stack([exchange._rounding for exchange in exchanges])
    assert torch.equal(found, found[:1].expand(members, -1))
    in_fp32 = [blocks for blocks in range(18) if not rounding[:, blocks * BLOCK : (blocks + 1) * BLOCK].any()]
    assert in_fp32 == [at // BLOCK for at in exact]
    assert all(exchange.report.resent_elements >= 3 * BLOCK for exchange in exchanges)
    expected = sum(exchange.report.squared_error for exchange in exchanges)
    assert float(rounding.square().mean(0).sum()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("bits", BITS)
def test_equal_replicas_with_equal_gradients_stay_bitwise_equal(bits: int) -> None:
    fleet = fleet_of(3, 3, elements=1000, payload=f"int{bits}")
    for round_index in range(3):
        fleet.train(fleet.phi + noise(1000, seed=round_index))
        fleet.exchange(round_index)
        assert torch.equal(fleet.phi, fleet.phi[:1].expand(3, -1))


OUTLIERS = st.tuples(
    st.integers(0, 3), st.integers(0, 2999), st.sampled_from([0.1, -1.0, 7.0, -50.0, 1e4, -1e9, 1e30])
)


@settings(max_examples=40)
@given(st.sampled_from(BITS), st.integers(2, 4), st.lists(OUTLIERS, max_size=6), st.integers(0, 99))
def test_any_differences_keep_the_mean(
    bits: int, members: int, outliers: list[tuple[int, int, float]], seed: int
) -> None:
    """In one digit, in two or in fp32; and all members know which."""
    vectors = alike(4, 3000, seed=seed)[:members]
    for member, at, value in outliers:
        vectors[member % members, at] += value
    found, reports = means(vectors, tuple(range(members)), bits)
    largest = torch.nn.functional.pad(vectors.abs().amax(0), (0, -3000 % BLOCK)).view(-1, BLOCK).amax(1)
    error = (found.double().mean(0) - vectors.double().mean(0)).abs()
    assert bool((error <= 2**-21 * largest.repeat_interleave(BLOCK)[:3000]).all())
    assert len({report.resent_elements for report in reports}) == 1


# Errors


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("members", [2, 4])
def test_error_is_as_reported_whatever_the_weights(bits: int, members: int) -> None:
    group, errors = tuple(range(members)), []
    for size in (3, 300):
        # In double precision, so that it is the code's error and not that of fp32.
        vectors = (size * noise(200 * BLOCK, seed=0) + noise(members, 200 * BLOCK, seed=1)).float()
        found, reports = means(vectors, group, bits)
        true = vectors.double()
        pull = true.mean(0) - true
        errors.append(float((found.double() - true - pull).norm() / pull.norm()))
        squared_error = sum(report.squared_error for report in reports)
        deviation = sum(report.squared_deviation for report in reports)
        report = ExchangeReport(group, squared_error=squared_error, squared_deviation=deviation)
        assert report.payload_error == pytest.approx(errors[-1], rel=0.05)
        variance = float(true.var(dim=0).sum()) * (2 if members == 2 else 1)  # a pair sees all, at both ends
        assert deviation == pytest.approx(variance, rel=0.01), "less the variance of rounding"
    assert errors[1] == pytest.approx(errors[0], rel=0.05)
    assert errors[0] == pytest.approx(pull_error(f"int{bits}", bits < 8 and members > 2), rel=0.15)


# What does not fit


def coded(codec: Codec, vector: Tensor, steps: Tensor, digits: int = 1) -> Received:
    """Return what a member sends of a vector."""
    codes = torch.empty(digits, len(steps), codec.block_bytes, dtype=torch.uint8)
    checksums = torch.empty(len(steps), dtype=torch.int32)
    for digit, out in enumerate(codes):
        codec.encode(all_blocks(vector, steps), digit, (out, checksums))
    return list(codes), checksums


def both_ends(
    codec: Codec, mine: Tensor, theirs: Tensor, steps: Tensor, digits: int
) -> list[tuple[Tensor, Tensor]]:
    """Return m and the verdict, at either end."""
    ends = []
    for own, other in ((mine, theirs), (theirs, mine)):
        received = coded(codec, other, steps, digits)
        blocks = all_blocks(own, steps)
        m, right, _ = codec.differences(blocks, whole_steps(blocks)[1], received)
        ends.append((m, right))
    return ends


DIFFERENCES = st.one_of(
    st.integers(-(2**17), 2**17),
    st.sampled_from(
        [sign * 2**power + more for sign in (-1, 1) for power in range(29) for more in (-1, 0, 1)]
    ),
)


@settings(max_examples=300)
@given(
    st.sampled_from(BITS),
    st.lists(st.tuples(st.integers(-(2**22), 2**22), DIFFERENCES), min_size=1, max_size=40),
    st.sampled_from([2.0**-30, 1.0, 3.0]),
    st.integers(1, DIGITS),
)
def test_ends_agree_on_verdict_and_opposite_difference(
    bits: int, numbers: Sequence[tuple[int, int]], step: float, digits: int
) -> None:
    mine = torch.tensor([n for n, _ in numbers], dtype=torch.float32) * step
    theirs = torch.tensor([n + m for n, m in numbers], dtype=torch.float32) * step
    (m, right), (their_m, their_right) = both_ends(Codec(bits), mine, theirs, torch.tensor([step]), digits)
    assert torch.equal(right, their_right)
    true = ((theirs.double() - mine.double()) / step).round().long()
    too_large = int((true.abs() >= 2 ** (digits * bits - 1)).sum())
    if right:
        assert torch.equal(m.int(), -their_m.int())
    if too_large == 0:
        assert right
        assert torch.equal(m.view(-1)[: len(true)].long(), true)
    if too_large == 1:  # several are missed by bad luck, see the next test
        assert not right


@pytest.mark.parametrize("bits", BITS)
def test_several_differences_that_do_not_fit_are_found_as_well(bits: int) -> None:
    blocks = 2000
    numbers = (2 ** (bits - 2) * noise(blocks * BLOCK, seed=bits)).round()
    too_large = numbers.view(blocks, BLOCK).abs().amax(1) >= 2 ** (bits - 1)
    codec = Codec(bits)
    for some, too in zip(numbers.view(-1, 100 * BLOCK), too_large.view(-1, 100), strict=True):
        for _, right in both_ends(codec, torch.zeros_like(some), some, torch.ones(100), 1):
            assert torch.equal(right, ~too)
    assert bool(too_large.all()), "each has some two dozen of them"


def plain_means(vectors: Tensor, group: Group) -> Tensor:
    """Return what the members take for the mean where fp32 travels."""
    return average(vectors, group)[0]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2)])
def test_blocks_that_do_not_fit_are_sent_as_their_next_bits(bits: int, group: Group) -> None:
    """One element far from the partner's: a step that suits the others holds it with twice the bits."""
    vectors = alike(3, 5000)
    vectors[0, 700] += 50.0
    vectors[1, 4900] -= 50.0  # the last block, which is short
    found, reports = means(vectors, group, bits)
    assert [report.resent_elements for report in reports] == [512 + 392] * len(group)
    assert sum(report.compared_elements for report in reports) == 5000 * (2 if len(group) == 2 else 1)
    true = vectors[list(group)].double().mean(0)
    torch.testing.assert_close(found.double().mean(0), true, rtol=0, atol=2**-18)
    largest_step = 2 * CODES[bits].ranges[0] * 50 / 512**0.5 / 2 ** (bits - 1)
    assert float((found - true).abs().max()) < largest_step
    if len(group) == 2:
        more = 2 * (BLOCK * bits // 8 + 4)
        assert [report.bytes_sent for report in reports] == [message_bytes(5000, bits) + more] * 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2)])
def test_blocks_that_do_not_fit_as_next_bits_are_sent_in_fp32(bits: int, group: Group) -> None:
    """Two elements that cancel in the sketch of their cell."""
    vectors, number = alike(3, 5000), 3
    first, second, *_ = range(700, BLOCK * 2, CELLS)
    signs = signs_of(number)
    vectors[0, first] += 500.0
    vectors[0, second] -= 500.0 * float(signs[first % BLOCK] * signs[second % BLOCK])
    found, exchanges = average(vectors, group, bits, number=number)
    left_over = torch.arange(512, 1024)
    assert torch.equal(found[:, left_over], plain_means(vectors[:, left_over], group))
    (resent,) = {exchange.report.resent_elements for exchange in exchanges}
    assert resent >= 512
    if len(group) == 2:
        sent = message_bytes(5000, bits) + -(-resent // BLOCK) * (BLOCK * bits // 8 + 4) + 4 * len(left_over)
        assert [exchange.report.bytes_sent for exchange in exchanges] == [sent] * 2


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2)])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
def test_a_poisoned_block_is_treated_as_in_fp32(bits: int, group: Group, poison: float) -> None:
    vectors = alike(3, 3000)
    vectors[0, 600:700] = poison  # a hundred of 3e38 have an infinite sketch
    found, reports = means(vectors, group, bits)
    block, others = torch.arange(512, 1024), torch.cat([torch.arange(512), torch.arange(1024, 3000)])
    (resent,) = {report.resent_elements for report in reports}
    assert resent >= BLOCK
    assert torch.equal(found[:, block], plain_means(vectors[:, block], group))
    assert sum(report.poisoned_elements for report in reports) > 0
    assert bool(torch.isfinite(found).all()) or poison == 3e38
    mean = vectors[list(group)][:, others].mean(0)
    assert float((found[:, others] - mean).abs().max()) < 0.02


@pytest.mark.parametrize("group", [(0, 1), (0, 1, 2), tuple(range(8))])
def test_exact_ranges_have_the_mean_of_fp32_bitwise(group: Group) -> None:
    """So do copies of them elsewhere in another rank's vector, whatever is around them."""
    vectors = alike(len(group), 4000)
    exact = [(100, 101), (2000, 2100), (3999, 4000)]
    found, _ = average(vectors, group, 4, bucket=2048, exact=exact)
    plain = plain_means(vectors, group)
    for mean in found:
        for blocks in (slice(0, 512), slice(1536, 2560), slice(3584, 4000)):
            assert torch.equal(mean[blocks], plain[0, blocks])
        assert not torch.equal(mean, plain[0])


# Steps


def test_step_holds_the_range() -> None:
    """Differences spread over a block, in a part of it, and in none."""
    codec, elements = Codec(8), 4000 * BLOCK
    mine = noise(elements, seed=0)
    theirs = mine + 0.1 * noise(elements, seed=1)
    theirs.view(-1, BLOCK)[:, 128:] = mine.view(-1, BLOCK)[:, 128:]
    both = torch.empty(2, blocks_in(elements), CELLS)
    for vector, sketch in zip((mine, theirs), both, strict=True):
        codec.sketch(vector, signs_of(5), sketch)
    steps, swapped = torch.empty(2, len(both[0]))
    codec.find_steps([both[0], both[1]], steps)
    codec.find_steps([both[1], both[0]], swapped)
    assert torch.equal(steps, swapped)
    root_mean_square = 0.1 / 2
    in_range = steps * 127 / root_mean_square
    assert 8 < float(in_range.mean()) < 11
    assert float((in_range > 4).float().mean()) > 0.99
    codec.find_steps([both[0], both[0]], steps)
    assert 0 < float(steps.max()) < 1e-6, "equal vectors: as fine as fp32"


@pytest.mark.parametrize("members", [2, 3])
def test_equal_blocks_whose_sketches_are_zero_keep_their_weights(members: int) -> None:
    """Norms are all 1 at first, and now and then the signs of a sketch cancel in all cells."""
    numbers = (number for number in count(6000) if not signs_of(number).view(-1, CELLS).sum(dim=0).any())
    found, _ = average(torch.ones(members, BLOCK), tuple(range(members)), 4, number=next(numbers))
    assert torch.equal(found, torch.ones(members, BLOCK))


def test_zeros_and_single_elements_have_steps() -> None:
    for bits in BITS:
        found, _ = means(torch.zeros(2, 3), (0, 1), bits)
        assert torch.equal(found, torch.zeros(2, 3))
        found, _ = means(torch.tensor([[1e-30], [3e-30]]), (0, 1), bits)
        torch.testing.assert_close(found.sum(), torch.tensor(4e-30), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("bits", "members", "type_"),
    [
        (4, 3, torch.int8),
        (4, 16, torch.int8),
        (4, 17, torch.int16),
        (8, 256, torch.int16),
        (8, 257, torch.int32),
    ],
)
def test_sums_fit(bits: int, members: int, type_: torch.dtype) -> None:
    assert wide_type(bits, members) == type_
    assert members * 2 ** (bits - 1) <= torch.iinfo(type_).max + 1


def test_sums_that_do_not_fit_are_found() -> None:
    """Sixteen members within 7 steps of the owner of the block; in the second block one is 11 from the mean."""
    numbers = torch.zeros(16, 2, BLOCK)
    numbers[1:, 0] = torch.arange(15.0)[:, None] - 7
    numbers[1:15, 1, 9] = -5
    numbers[15, 1, 9] = 7
    codec, steps = Codec(4), torch.ones(2)
    others = [coded(codec, member.flatten(), steps) for member in numbers[1:]]
    sums = torch.empty(2, BLOCK, dtype=wide_type(4, 16))
    right, *_ = codec.sum_of(all_blocks(numbers[0].flatten(), steps), others, sums)
    assert right.tolist() == [True, False]
    for member in numbers[:, 0]:
        mean = torch.empty(BLOCK)
        codec.average_sums(all_blocks(member, steps[:1]), right[:1], sums[:1], 16, (mean, None))
        assert torch.equal(mean, numbers[:, 0].mean(0))


@pytest.mark.parametrize("bits", [8, 4])
def test_sixteen_members_keep_their_mean(bits: int) -> None:
    vectors = alike(16, 20_000)
    found, reports = means(vectors, tuple(range(16)), bits)
    true = vectors.double().mean(0)
    torch.testing.assert_close(found.double().mean(0), true, rtol=0, atol=2**-20)
    assert (found.double() - true).norm() <= ERRORS[bits] * (vectors.double() - true).norm()
    assert max(report.resent_elements for report in reports) < 5_000


# Messages


@pytest.mark.parametrize(("bits", "per_block"), [(8, 532), (4, 276)])
@pytest.mark.parametrize("elements", [1, 512, 513, 5000])
def test_bytes_of_a_pair(bits: int, per_block: int, elements: int) -> None:
    vectors = noise(elements, seed=0).expand(2, -1)  # differences of 0 fit
    for exchange in average(vectors, (0, 1), bits, bucket=1024)[1]:
        on_the_wire = sum(buffer.nbytes for _, buffer in exchange.transport.sent)
        assert exchange.report.bytes_sent == on_the_wire == message_bytes(elements, bits)
        assert exchange.report.resent_elements == 0
        assert message_bytes(elements, bits) == per_block * math.ceil(elements / 512)


def test_blocks_that_are_to_be_exact_have_no_next_digit() -> None:
    vectors = noise(5000, seed=0).expand(2, -1)
    for exchange in average(vectors, (0, 1), 4, bucket=1024, exact=[(600, 601)])[1]:
        assert exchange.report.bytes_sent == message_bytes(5000, 4) + 4 * BLOCK


@pytest.mark.parametrize(("bits", "wide_bytes"), [(8, 2), (4, 1)])
def test_bytes_of_a_group(bits: int, wide_bytes: int) -> None:
    """Seven blocks among three: the parts have 2, 2 and 3."""
    vectors = noise(7 * BLOCK, seed=0) + 0.01 * noise(3, 7 * BLOCK, seed=1).sign()  # every difference fits
    for report, own in zip(means(vectors, (0, 1, 2), bits)[1], (2, 2, 3), strict=True):
        assert report.resent_elements == 0
        to_owners = (7 - own) * (16 + BLOCK * bits // 8 + 4)
        assert report.bytes_sent == to_owners + 2 * own * (4 + BLOCK * wide_bytes + 1)
