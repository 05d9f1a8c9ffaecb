"""Whatever happens on the leader, all ranks come to the end of a transfer."""

import threading

import pytest
import torch

from megatron_noloco.federation.gather import Gather, Leader
from megatron_noloco.plans.canonical import Block, Holding, Matrix
from tests.kit.layouts import movements

HOLDINGS = [Holding([Block(0, Matrix(0, 1, 10), 0, 5 * rank, 1, 5)]) for rank in range(2)]


@pytest.mark.parametrize("asked", [0, 1, 3])
def test_followers_end_transfer_of_failed_leader(asked: int) -> None:
    gives, gets = torch.arange(10.0).view(2, 5), torch.ones(2, 5)
    transfers = [
        Gather(movement).whole(gives[rank], gets[rank])
        for rank, movement in enumerate(movements(HOLDINGS, [range(10)], bucket=4))
    ]
    leader = transfers[0]
    assert isinstance(leader, Leader)

    for at in range(asked):
        content = leader.content(at)
        assert torch.equal(content, torch.arange(10.0)[4 * at : 4 * at + 4])
        leader.hand_out(at, torch.add(content, 1, out=leader.result(at)))
    for transfer in transfers:
        transfer.wait()
    done = min(4 * asked, 10)
    assert torch.equal(gets.view(-1)[:done], torch.arange(1.0, done + 1))
    assert not workers()


def test_a_lone_leader_has_no_thread() -> None:
    """Its weights lie in another order than the canonical one."""
    whole = Matrix(0, 1, 10)
    turned = Holding([Block(0, whole, 0, 5, 1, 5), Block(5, whole, 0, 0, 1, 5)])
    gives, gets = torch.arange(10.0), torch.ones(10)
    (movement,) = movements([turned], [range(10)], bucket=10)
    leader = Gather(movement).whole(gives, gets)
    assert isinstance(leader, Leader)
    content = leader.content(0)
    assert content.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    leader.hand_out(0, leader.result(0).copy_(content))
    assert not workers()
    leader.wait()
    assert torch.equal(gets, gives)


def workers() -> list[str]:
    """Return the threads of transfers; a thread that frees tensors at the end of Python aborts the process."""
    return [thread.name for thread in threading.enumerate() if thread.name == "noloco-gather"]
