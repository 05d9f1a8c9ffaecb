"""All ranks of a job step with the same kernel of Adam; where it cannot be had, a line says why."""

import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from megatron_noloco.engine import initialize
from megatron_noloco.errors import UserError
from tests.kit.ranks import run_ranks


def asked(rank: int, world_size: int, hosts: str, has_it: list[bool]) -> tuple[bool, int]:
    """Return the choice of a rank on a GPU, and how often it asked for the kernel."""
    calls = []

    def loads() -> bool:
        calls.append(rank)
        return has_it[rank]

    torch.cuda.is_available = lambda: True
    socket.gethostname = lambda: hosts[rank]
    initialize.fused_adam_loads = loads
    chosen = initialize.all_have_fused_adam()
    dist.barrier()
    return chosen, len(calls)


@pytest.mark.parametrize("has_it", [[True] * 4, [True, True, False, True]], ids=["all", "all but one"])
def test_fused_adam_is_for_all_ranks_or_for_none(has_it: list[bool]) -> None:
    """The first rank of each host asks first, when it may have to compile it."""
    found = run_ranks(4, asked, "abab", has_it)
    assert [chosen for chosen, _ in found] == [all(has_it)] * 4
    assert [calls for _, calls in found] == [2, 2, 1, 1]


BUILD = """Error building extension 'fused_adam': [1/3] c++ -c fused_adam_frontend.cpp -o fused_adam_frontend.o
[2/3] nvcc -c multi_tensor_adam.cu -o multi_tensor_adam.cuda.o
[3/3] c++ fused_adam_frontend.o -shared -lcudart -o fused_adam.so
FAILED: [code=1] fused_adam.so"""


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (
            f"{BUILD}\n{{}}\ncollect2: error: ld",
            "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        ),
        (
            f"{BUILD}\n{{}}\n",
            "multi_tensor_adam.cu:13:10: fatal error: cusparse.h: No such file or directory",
        ),
        (f"{BUILD}\n{{}}\n", "nvcc fatal   : Unsupported gpu architecture 'compute_90'"),
        (BUILD, "Error building extension 'fused_adam'"),
        ("{}", "libcudart.so.13: cannot open shared object file"),
        ("", "RuntimeError"),
    ],
)
def test_a_kernel_that_cannot_be_had_says_why(
    said: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Mock(side_effect=RuntimeError(said.format(reason)))
    accelerator = SimpleNamespace(create_op_builder=lambda name: SimpleNamespace(load=load))
    monkeypatch.setattr(initialize, "get_accelerator", lambda: accelerator)
    with pytest.raises(UserError) as raised:
        initialize.load_kernel("FusedAdamBuilder")
    assert f"failed ({reason}): install" in str(raised.value)
