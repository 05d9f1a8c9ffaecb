"""Whatever happens on the leader, all ranks come to the end of a transfer."""

import asyncio

import pytest
import torch

from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from tests.unit.test_movement import movements

HOLDINGS = [Holding([Block(0, Matrix(0, 1, 10), 0, 5 * rank, 1, 5)]) for rank in range(2)]


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_followers_come_to_the_end_of_a_transfer_that_its_leader_leaves(asked: int) -> None:
    gives, gets = torch.arange(10.0).view(2, 5), torch.ones(2, 5)
    transfers = [
        Gather(movement).whole(gives[rank], gets[rank])
        for rank, movement in enumerate(movements(HOLDINGS, [range(10)], slab=4))
    ]
    leader = transfers[0]
    assert isinstance(leader, Leader)

    async def conversation() -> None:
        for at in range(asked):
            content = await leader.content(at)
            assert torch.equal(content, torch.arange(10.0)[4 * at : 4 * at + 4])
            await leader.hand_out(at, torch.add(content, 1, out=leader.result(at)))

    asyncio.run(conversation())
    for transfer in transfers:
        transfer.wait()
    done = min(4 * asked, 10)
    assert torch.equal(gets.view(-1)[:done], torch.arange(1.0, done + 1))
