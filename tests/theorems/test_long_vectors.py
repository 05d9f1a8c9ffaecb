"""Vectors of more than 2^32 elements: places, blocks, buckets and files, without the memory for one.

Where only places count, a vector is on torch's device "meta", which has shapes and no memory. Where elements
count, it is a sparse file that is mapped into memory: only the pages that a test touches take space.
"""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_noloco.checkpoint.reader import read_into
from megatron_noloco.data.indexed import read_indexed
from megatron_noloco.data.samples import ShuffledSamples
from megatron_noloco.data.sources import Needs
from megatron_noloco.federation.codes import bytes_of
from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.federation.movement import alone
from megatron_noloco.outer import TorchWeights
from megatron_noloco.outer.bucket_exchange import Members
from megatron_noloco.outer.channels import CHANNELS, WINDOW, tag_of
from megatron_noloco.outer.host_codec import HostCodec, codec_for
from megatron_noloco.outer.payload import BLOCK, Blocks, in_blocks, message_bytes
from megatron_noloco.outer.round import cut as fragments_of
from megatron_noloco.transport.interface import EXCHANGE_TAGS

LONG = 2**32 + 1000


def shape_only(elements: int) -> Tensor:
    return torch.empty(elements, device="meta")


@pytest.fixture
def sparse(tmp_path: Path) -> Tensor:
    """Return LONG zeros in fp32."""
    return torch.from_file(str(tmp_path / "vector"), shared=True, size=LONG, dtype=torch.float32)


def test_blocks_of_a_code_are_numbered_to_the_end() -> None:
    rows = in_blocks(shape_only(LONG))
    assert rows.shape == (-(-LONG // BLOCK), BLOCK)
    assert message_bytes(LONG, 8) == 532 * len(rows)


def test_the_last_block_is_coded_and_its_mean_written(sparse: Tensor) -> None:
    codec, numbers, last = codec_for(8), torch.arange(1.0, 9.0), LONG // BLOCK
    if not isinstance(codec, HostCodec):
        pytest.skip("no C compiler")
    sparse[-8:] = numbers
    codes, checksums = torch.empty(1, BLOCK, dtype=torch.uint8), torch.empty(1, dtype=torch.int32)
    blocks = Blocks(sparse, torch.tensor([last]), torch.ones(1))
    codec.encode(blocks, 0, (codes, checksums))
    rest = LONG % BLOCK
    assert codes[0, rest - 8 : rest].tolist() == numbers.tolist()
    sparse[-8:] = 3 * numbers
    assert codec.average(blocks, ([codes], checksums), sparse).right.item()
    assert torch.equal(sparse[-8:], 2 * numbers)


def test_members_of_a_group_divide_all_elements() -> None:
    members: Any = SimpleNamespace(ranks=[0, 1, 2])
    parts = [*Members.divide(members, LONG).values()]
    assert (parts[0].start, parts[-1].stop) == (0, LONG)
    assert all(before.stop == after.start for before, after in pairwise(parts))


@pytest.mark.parametrize("copied", [(), [(5, 10), (2**31 - 3, 2**31 + 4), (LONG - 2, LONG)]])
def test_fragments_hold_each_element_once(copied: Any) -> None:
    fragments = fragments_of(LONG, copied, 3)
    ranges = sorted(place for fragment in fragments for place in fragment.ranges)
    assert (ranges[0][0], ranges[-1][1]) == (0, LONG)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert sum(fragment.length for fragment in fragments) == LONG
    last = fragments[-1]
    ((within, place),) = last.within(last.length - 1, last.length)
    assert (within.stop, place.stop) == (last.length, last.ranges[-1][1])


def test_weights_beyond_int32_are_read_and_written(sparse: Tensor) -> None:
    weights, numbers = TorchWeights([sparse, torch.zeros(5)]), torch.arange(1.0, 9.0)
    assert weights.length == LONG + 5
    with weights.writing() as write:
        write(LONG - 3, numbers)
        write(2**31 - 4, numbers)
    for start in (LONG - 3, 2**31 - 4):
        weights.read_into(found := torch.empty(8), start)
        assert torch.equal(found, numbers)
    assert sparse[LONG - 3 :].tolist() == [1, 2, 3]
    assert sparse[2**31 + 3].item() == 8


def test_fragments_gather_and_scatter_beyond_2_to_the_31(sparse: Tensor) -> None:
    first, *_ = fragments_of(LONG, [(2**31 - 2, 2**31 + 2), (LONG - 4, LONG)], 2)
    sparse[2**31 - 2 : 2**31 + 2], sparse[-4:] = torch.tensor([[1.0], [2.0]]).expand(2, 4)
    copies = type(first)(first.ranges[:2])
    found = copies.gather(sparse, torch.empty(8))
    assert found.tolist() == [1.0] * 4 + [2.0] * 4
    copies.scatter(2 * found, sparse)
    assert (sparse[2**31 + 1].item(), sparse[-1].item()) == (2, 4)


# Buckets of a federation


def test_buckets_cover_a_vector_and_lie_where_they_say(sparse: Tensor) -> None:
    """Of the gives of a leader, nothing is copied."""
    transfer, numbers = Gather(alone(LONG)).whole(sparse, sparse), torch.arange(1.0, 9.0)
    assert isinstance(transfer, Leader)
    assert (transfer.buckets[0].start, transfer.buckets[-1].stop) == (0, LONG)
    assert all(before.stop == after.start for before, after in pairwise(transfer.buckets))
    last = len(transfer.buckets) - 1
    sparse[-8:] = numbers
    assert torch.equal(transfer.content(last)[-8:], numbers)
    transfer.result(last)[-8:] = 2 * numbers
    assert torch.equal(sparse[-8:], 2 * numbers)
    assert bytes_of(sparse).nbytes == sparse.nbytes


def test_tags_of_late_exchanges_are_distinct() -> None:
    numbers = [early + number for early in (0, 2**31, 2**50) for number in (0, 1)]
    tags = [
        [tag_of(number, channel) + bucket for channel in range(CHANNELS) for bucket in range(WINDOW)]
        for number in numbers
    ]
    assert len({tag for of_number in tags for tag in of_number}) == len(numbers) * EXCHANGE_TAGS
    for first, second in zip(tags[::2], tags[1::2], strict=True):
        together = {tag % 2**31 for tag in first + second}
        assert len(together) == 2 * EXCHANGE_TAGS, "as torch.distributed and MPI shorten them"


# Files


def test_a_checkpoint_is_read_beyond_2_to_the_32(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    entry = {"slow_weights.0": {"dtype": "F32", "shape": [LONG], "data_offsets": [0, 4 * LONG]}}
    header = json.dumps(entry).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.seek(4 * (LONG - 3), 1)
        file.write(np.array([1, 2, 3], np.float32).tobytes())
    read_into(found := torch.empty(5), path, "slow_weights.0", LONG - 5)
    assert found.tolist() == [0, 0, 1, 2, 3]


def test_samples_are_cut_from_more_than_2_to_the_32_tokens(tmp_path: Path) -> None:
    """Of three sequences, each as long as the format permits, and a short one, whose tokens alone are not 0."""
    lengths = np.array([2**31 - 1] * 3 + [40], np.int32)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    with (tmp_path / "long.bin").open("wb") as file:
        file.seek(2 * int(begins[-1]))
        file.write(np.arange(1, 41, dtype=np.uint16).tobytes())
    header = b"MMIDIDX\x00\x00" + np.array(1, "<u8").tobytes() + b"\x08" + np.array([4, 5], "<u8").tobytes()
    bounds = np.arange(5, dtype=np.int64)
    (tmp_path / "long.idx").write_bytes(
        header + b"".join(part.tobytes() for part in (lengths, 2 * begins, bounds))
    )
    indexed = read_indexed(str(tmp_path / "long"))
    assert indexed.part(3, 4).tokens.tolist() == list(range(1, 41))
    dataset = ShuffledSamples(indexed.part(0, 4), needs(seq_length=8))
    found = {int(token) for index in around_the_short_one(dataset) for token in dataset[index].tokens}
    assert found >= set(range(2, 40))


def needs(seq_length: int) -> Needs:
    return Needs(vocab_size=50, seq_length=seq_length)


def around_the_short_one(dataset: ShuffledSamples) -> Iterator[int]:
    """Yield the samples that have tokens of the last sequence, wherever the shuffled order put it."""
    place = dataset._order.at(np.arange(4)).tolist().index(3) * (2**31 - 1)
    yield from range(place // dataset.seq_length, (place + 40) // dataset.seq_length + 1)
