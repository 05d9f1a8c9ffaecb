"""Bytes and seconds of what replicas send each other, for each method."""

import math
from dataclasses import dataclass
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.config.noloco_block import NolocoConfig, OverlapConfig
from megatron_noloco.outer.payload import message_bytes
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.held import Held
from megatron_noloco.preflight.memory import WORKING

MATTERS = 0.01  # of the training time: less than this does not matter

_FP32 = 4


@dataclass(frozen=True)
class Network:
    """The links between nodes.

    Attributes:
        bytes_per_second: of a node's link, each way; the ranks of a node share it.
        latency: seconds from one node to another.
        ranks_per_node: that exchange at the same time.
    """

    bytes_per_second: float
    latency: float
    ranks_per_node: int

    def seconds(self, bytes_per_rank: float, trips: float) -> float:
        """For messages that follow each other `trips` times."""
        return bytes_per_rank * self.ranks_per_node / self.bytes_per_second + trips * self.latency


@dataclass(frozen=True)
class Way:
    """One way to keep replicas together.

    Attributes:
        name: what it is.
        bytes_per_exchange: that the rank with most weights sends.
        seconds_per_exchange: on the network.
        local_steps: from one exchange to the next.
        hidden_steps: local steps that go on while an exchange is under way.
    """

    name: str
    bytes_per_exchange: int
    seconds_per_exchange: float
    local_steps: int
    hidden_steps: float = 0

    def share_lost(self, step_seconds: float) -> float:
        """Of the time, what training waits for exchanges."""
        wait = max(0.0, self.seconds_per_exchange - self.hidden_steps * step_seconds)
        return wait / (wait + self.local_steps * step_seconds)

    def enough_steps(self, step_seconds: float) -> int:
        """The smallest number of local steps from which on exchanges take less than 1 % of the time.

        With overlap: in which an exchange is hidden.
        """
        if self.hidden_steps:
            return max(1, math.ceil(self.seconds_per_exchange / step_seconds))
        return max(1, math.ceil(self.seconds_per_exchange * (1 - MATTERS) / (MATTERS * step_seconds)))


def exchange_bytes(noloco: NolocoConfig, held: Held, replicas: int, dp: int) -> int:
    """That a rank sends when all its weights are exchanged once, in a pair or a larger group.

    With a code, elements that are sent again are not counted, and copies are shared evenly by the data-parallel
    ranks.
    """
    n = noloco.group_size_among(replicas)
    if n <= 1:
        return 0
    if noloco.payload == "fp32":
        vector = float(_FP32 * held.owned)
        return round(vector if n == 2 else vector * 2 * (n - 1) / n)
    bits = int(noloco.payload.removeprefix("int"))
    coded = message_bytes(held.owned, bits)
    exact = _FP32 * held.copied / dp
    return round(coded + exact if n == 2 else 3 * (n - 1) / n * coded + 2 * (n - 1) / n * exact)


def ways(config: RunConfig, topology: Topology, fullest: Held, network: Network) -> list[Way]:
    """The config's own way first, then others in its place.

    The time of DiLoCo is that of this trainer's exchange among all, in two phases. Synchronous training averages
    gradients in each local step, in the working precision, by a reduce-scatter and an all-gather of halves,
    quarters and so on (Rabenseifner): 2 log2 R messages after each other.
    """
    replicas, noloco = topology.ensemble, config.noloco
    if replicas == 1:
        return []
    found = [_way("this config", noloco, topology, fullest, network)] if noloco.enabled else []
    for payload, overlaps in (("fp32", False), ("int8", False), ("int8", True)):
        name = f"NoLoCo in pairs, {payload}" + ", overlap" * overlaps
        changed = _changed(noloco, method="noloco", group_size=2, payload=payload, overlaps=overlaps)
        found.append(_way(name, changed, topology, fullest, network))
    diloco = _changed(noloco, method="diloco", payload="fp32", overlaps=False)
    found.append(_way("DiLoCo, fp32", diloco, topology, fullest, network))
    gradients = round(WORKING[config.precision] * fullest.parameters * 2 * (replicas - 1) / replicas)
    seconds = network.seconds(gradients, 2 * math.log2(replicas))
    found.append(Way("synchronous", gradients, seconds, 1))
    return found


def routed_bytes(config: RunConfig, topology: Topology) -> float:
    """What a replica sends to others in a local step because microbatches change replicas, on average.

    Between two stages activations go forth and gradients back, for every microbatch; 1 - 1/R of them leave.
    """
    if not config.routing(topology).active:
        return 0.0
    tokens = topology.dp * config.microbatches * config.micro_batch_size * config.model.seq_length
    copies = 1 if topology.sequence_parallel else topology.tp
    hops = 2 * (topology.pp * topology.vpp - 1)
    message = tokens * config.model.hidden_size * WORKING[config.precision]
    return (1 - 1 / topology.replicas) * hops * copies * message


def routed_seconds(sent: float, topology: Topology, network: Network) -> float:
    """What a local step's messages between replicas take on the network, if computing hides none of it.

    Args:
        sent: by a replica; see `routed_bytes`. All its ranks are taken to send as much.
    """
    trips = 2 * (topology.pp * topology.vpp - 1)  # of the first microbatch forth, and of the last back
    return network.seconds(sent / topology.replica_size, trips)


def _changed(noloco: NolocoConfig, overlaps: bool, **fields: Any) -> NolocoConfig:
    overlap = OverlapConfig(mode="delayed", delay_steps="auto") if overlaps else OverlapConfig()
    return noloco.model_copy(update={"enabled": True, "overlap": overlap, **fields})


def _way(name: str, noloco: NolocoConfig, topology: Topology, held: Held, network: Network) -> Way:
    sent = exchange_bytes(noloco, held, topology.ensemble, topology.dp)
    phases = 1 if noloco.group_size_among(topology.ensemble) <= 2 else 2
    trips = phases + (noloco.payload != "fp32")  # sketches go before codes
    hidden = noloco.local_steps if noloco.chooses_delay else noloco.delay_steps
    return Way(name, sent, network.seconds(sent, trips), noloco.local_steps, hidden)
