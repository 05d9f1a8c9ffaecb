"""The command line of a replica that is slow, or sends what it should not.

`python -m tools.faulty_replica SECONDS FACTOR train ...`: each of its local steps takes so long at least, and it
sends vectors multiplied by the factor.
"""

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from megatron_noloco.cli.main import run
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.start_up import before_engines
from megatron_noloco.transport.protocol import Message


def send_times(factor: float) -> None:
    """From here on this process sends all vectors multiplied; its own weights are sound."""
    original = FederationTransport.post

    def post(self: FederationTransport, sends: Sequence[Message], *more: Any) -> Any:
        spoiled = [
            Message(message.rank, message.buffer * factor)
            if message.buffer.dtype == torch.float32
            else message
            for message in sends
        ]
        return original(self, spoiled, *more)

    FederationTransport.post = post  # type: ignore[assignment, method-assign]


def take(seconds: float) -> None:
    """From here on each local step of this process takes so long at least."""
    before_engines()
    from megatron_noloco.engine.replica import ReplicaEngine

    original = ReplicaEngine.train_batch

    def train_batch(self: ReplicaEngine, *arguments: Any) -> Any:
        end = time.monotonic() + seconds
        losses = original(self, *arguments)
        time.sleep(max(0.0, end - time.monotonic()))
        return losses

    ReplicaEngine.train_batch = train_batch  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    seconds, factor = map(float, sys.argv[1:3])
    del sys.argv[1:3]
    take(seconds)
    send_times(factor)
    run()
