"""The command line of a replica that is slow, or sends what it should not.

`python -m tools.faulty_replica SECONDS FACTOR train ...`: each of its local steps begins with so long a pause, and
it sends vectors multiplied by the factor.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from megatron_noloco.cli.main import run
from megatron_noloco.federation.transport import FederationTransport
from megatron_noloco.transport.protocol import Message
from tools.paced_replica import take


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


if __name__ == "__main__":
    seconds, factor = map(float, sys.argv[1:3])
    del sys.argv[1:3]
    take(seconds)
    send_times(factor)
    run()
