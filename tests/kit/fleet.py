"""Replicas for tests: threads that hold nothing but weights and exchange them through a loopback."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megatron_noloco.outer import Exchange, OuterOptimizer, RoundReport, TorchWeights
from megatron_noloco.outer.payload import Blocks
from megatron_noloco.outer.vectors import BUCKET, Ranges
from megatron_noloco.plans.grouping import Group, Grouping
from megatron_noloco.plans.topology import Place
from megatron_noloco.settings import PAPER, NolocoSettings
from megatron_noloco.transport.interface import Flight, Message
from tests.kit.loopback import LoopbackTransport, loopback_world

K = 4  # local steps between two rounds
ELEMENTS = 37
SECONDS = 60.0  # a deadline that no test reaches


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_blocks(vector: Tensor, steps: Tensor) -> Blocks:
    """Return the blocks of a vector, which has these steps."""
    return Blocks(vector, torch.arange(len(steps)), steps)


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=tolerance, atol=tolerance)


class Listening:
    """A loopback transport that remembers what was sent, to whom, and the tags."""

    connects_lazily = False

    def __init__(self, inner: LoopbackTransport) -> None:
        self.rank, self.world_size, self.inner = inner.rank, inner.world_size, inner
        self.sent: list[tuple[int, Tensor]] = []
        self.tags: list[int] = []

    def post(self, sends: Sequence[Message], receives: Sequence[Message], tag: int) -> Flight:
        self.tags.append(tag)
        self.sent += [(message.rank, message.buffer.clone()) for message in sends]
        return self.inner.post(sends, receives, tag)


class Fleet:
    """Replicas, each with its weights in two tensors; the updates of their local steps are given from outside."""

    def __init__(self, start: Tensor, group_size: int = 2, *, seed: int = 0, **method: Any) -> None:
        """Make them from the weights of each, shape [replicas, elements]."""
        self.replicas = len(start)
        self.done = 0  # local steps
        self.settings = NolocoSettings(
            **PAPER
            | {"local_steps": K, "deadline_seconds": SECONDS, "group_size": max(2, group_size), **method}
        )
        self.grouping = Grouping(self.replicas, group_size, seed)
        self.transports = [Listening(inner) for inner in loopback_world(self.replicas)]
        self.parameters = [[part.clone() for part in row.tensor_split([5])] for row in start]
        self.outer = [
            OuterOptimizer(TorchWeights(own), transport, Place(rank, self.replicas), self.settings, seed)
            for rank, (own, transport) in enumerate(zip(self.parameters, self.transports, strict=True))
        ]
        for outer in self.outer:
            outer.grouping = self.grouping  # also groups of 1, which no setting asks for

    def train(self, theta: Tensor) -> None:
        """Set the fast weights, shape [replicas, elements]."""
        for own, row in zip(self.parameters, theta, strict=True):
            for part, value in zip(own, row.tensor_split([5]), strict=True):
                part.copy_(value)

    def each(self, call: Callable[[OuterOptimizer], Any]) -> list[Any]:
        """Call a function with the outer optimizer of each replica, all at once."""
        with ThreadPoolExecutor(self.replicas) as threads:
            return list(threads.map(call, self.outer))

    def exchange(self, round_index: int) -> list[RoundReport]:
        """Run one round, whatever the local step."""
        return self.each(lambda outer: outer.run_round(round_index))

    def step(self, updates: Tensor) -> list[list[RoundReport]]:
        """Take a local step that adds `updates`, shape [replicas, elements]; returns the reports of each."""
        self.train(self.theta + updates)
        self.done += 1
        return self.each(lambda outer: outer.after_local_step(self.done))

    def run(self, steps: int) -> list[list[list[RoundReport]]]:
        """Take local steps whose updates depend on the step alone."""
        return [self.step(0.1 * noise(*self.theta.shape, seed=self.done)) for _ in range(steps)]

    def wait(self) -> None:
        """Complete the exchanges that are under way, without merging their rounds."""
        self.each(OuterOptimizer.wait)

    def states(self) -> list[dict[str, Tensor]]:
        """Return what a checkpoint would hold now."""
        found = self.each(OuterOptimizer.state)
        return [{name: tensor.clone() for name, tensor in state.items()} for state in found]

    @property
    def theta(self) -> Tensor:
        return torch.stack([torch.cat(own) for own in self.parameters])

    @property
    def phi(self) -> Tensor:
        return torch.stack([outer.slow_weights for outer in self.outer])

    @property
    def delta(self) -> Tensor:
        return torch.stack([outer.momentum for outer in self.outer])

    @property
    def rounding(self) -> Tensor:
        """What codes left out and is kept; zeros where nothing is."""
        kept = [outer.rounding for outer in self.outer]
        return torch.stack([torch.zeros_like(self.phi[0]) if one is None else one for one in kept])

    @property
    def memory(self) -> list[Tensor]:
        """What the outer optimizers keep, without messages."""
        vectors = [tensor for one in self._rounds for tensor in one._buffers._held.values()]
        of_outer = [(outer.slow_weights, outer.momentum, outer.rounding) for outer in self.outer]
        return vectors + [one for kept in of_outer for one in kept if one is not None]

    @property
    def messages(self) -> list[Tensor]:
        """The memory of messages, but not what depends on how many codes did not fit."""
        varies = () if self.settings.payload == "fp32" else ("sums 2", "left over", "theirs", "parts")
        kept = [buffers._held for one in self._rounds for buffers in one._exchange._buffers]
        return [tensor for held in kept for name, tensor in held.items() if name not in varies]

    @property
    def _rounds(self) -> list[Any]:
        return [one for outer in self.outer for one in (*outer._idle, *outer._under_way)]


def fleet_of(replicas: int, group_size: int = 2, elements: int = ELEMENTS, **method: Any) -> Fleet:
    """Return replicas that start from equal weights."""
    return Fleet(noise(elements, seed=1).expand(replicas, -1), group_size, **method)


def assert_equal(one: Fleet, other: Fleet) -> None:
    """Compare all weights of two fleets bit by bit."""
    for name in ("theta", "phi", "delta", "rounding"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


def finish(exchange: Exchange, elements: int) -> Tensor:
    """Return the mean of an exchange that has begun."""
    mean = torch.full((elements,), torch.nan)
    for start, stop, piece in exchange.finish():
        mean[start:stop] = piece
    return mean


def made(
    transport: Any, replicas: int, bits: int | None = None, seconds: float = SECONDS, bucket: int = BUCKET
) -> Any:
    """Return an exchange in fp32, or in codes of so many bits."""
    exchange = Exchange(transport, Place(transport.rank, replicas), 5, seconds, bits)
    exchange.bucket = bucket
    return exchange


def average(
    vectors: Tensor,
    group: Group,
    bits: int | None = None,
    *,
    bucket: int = BUCKET,
    exact: Ranges = (),
    number: int = 3,
) -> tuple[Tensor, list[Exchange]]:
    """Return what each member of the group takes for the mean of their rows of `vectors`, and their exchanges."""
    transports = [Listening(inner) for inner in loopback_world(len(vectors))]

    def member(replica: int) -> tuple[Tensor, Exchange]:
        exchange = made(transports[replica], len(vectors), bits, bucket=bucket)
        rounding = torch.empty(vectors.shape[1])
        exchange.begin(vectors[replica].clone(), group, number, "a test", exact, rounding)
        return finish(exchange, vectors.shape[1]), exchange

    with ThreadPoolExecutor(len(group)) as threads:
        means, exchanges = zip(*threads.map(member, group), strict=True)
    return torch.stack(means), list(exchanges)
