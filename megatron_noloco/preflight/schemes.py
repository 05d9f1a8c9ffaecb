"""Costs of ways to average replicas: bytes and seconds of their exchanges on a network."""

import math
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.config.noloco_block import TrainerSettings, recommended
from megatron_noloco.outer.payload import blocks_in, message_bytes, sum_bytes
from megatron_noloco.plans.fragments import fewest_steps
from megatron_noloco.plans.payloads import PAYLOADS
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import WORKING, RankParameters

NEGLIGIBLE = 0.01  # share of the time
# Local steps per round up to which int3 loses less than int4 with a step more (python -m tools.tables bits).
_MOST_INT3 = 2
_FP32 = 4
_HEADERS = 1500 / 1448  # of IP and TCP with time stamps, in packets of 1500 bytes
_FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at first, before an answer (RFC 6928)
_LEAST_TIME_OUT = 0.2  # seconds, of Linux; after a pause of so long and a round trip TCP halves its window


@dataclass(frozen=True)
class Network:
    """The links between nodes.

    Attributes:
        bytes_per_second: rate of a node's link, each way; the ranks of a node share it.
        latency: seconds from one node to another.
        ranks_per_node: number of ranks of a node that exchange at the same time.
    """

    bytes_per_second: float
    latency: float
    ranks_per_node: int

    def seconds(
        self, bytes_per_rank: float, trips: float, partners: int = 1, pause: float = math.inf
    ) -> float:
        """Return the seconds of an exchange over TCP, in which all send and receive at the same time.

        Args:
            bytes_per_rank: sent by each rank, to all its partners together.
            trips: messages that are sent one after the other.
            partners: ranks to which each rank sends at the same time.
            pause: seconds since the exchange before.
        """
        sent = bytes_per_rank * _HEADERS
        rate = self.bytes_per_second / self.ranks_per_node
        there_and_back = 2 * self.latency
        # Acknowledgements wait behind data, up to two round trips (python -m tools.peers plan).
        behind = min(2 * there_and_back, 0.25 * sent / rate)
        window = self._first_window(min(sent, rate * there_and_back), partners, pause)
        return sent / rate + self._slow_start(window, sent, rate) + behind + trips * self.latency

    def _first_window(self, last: float, partners: int, pause: float) -> float:
        """Return the bytes that TCP sends at first: half of the last window for each time-out that has passed."""
        time_outs = pause / (_LEAST_TIME_OUT + 2 * self.latency)
        return max(partners * _FIRST_WINDOW, last * 0.5 ** min(time_outs, 60.0))

    def _slow_start(self, window: float, sent: float, rate: float) -> float:
        """Return the seconds in which TCP waits for answers, while its windows double in each round trip."""
        waited, there_and_back = 0.0, 2 * self.latency
        while window < min(sent, rate * there_and_back):
            waited += there_and_back - window / rate
            sent -= window
            window *= 2
        return waited


@dataclass(frozen=True)
class Scheme:
    """The costs of one scheme of averaging replicas.

    Attributes:
        name: what it is.
        bytes_per_exchange: bytes sent by the rank with most weights; in a federation, by the leader of a replica.
        seconds_per_exchange: time on the network, of all fragments together; in a federation at least that of
            gathering inside the replica.
        local_steps: number of local steps from one exchange to the next.
        hidden_steps: number of local steps that go on during an exchange, or during those of all fragments.
        chooses_overlap: whether these are as many as an exchange takes, at most `local_steps`.
        bytes_across: bytes that a site sends to others in a round, mean of the rounds; None: sites are not known.
    """

    name: str
    bytes_per_exchange: int
    seconds_per_exchange: float
    local_steps: int
    hidden_steps: int = 0
    chooses_overlap: bool = False
    bytes_across: int | None = None

    def share_lost(self, step_seconds: float) -> float:
        """Return the share of the time that training waits for exchanges."""
        wait = max(0.0, self.seconds_per_exchange - self.hidden_steps * step_seconds)
        return wait / (wait + self.local_steps * step_seconds)

    def enough_steps(self, step_seconds: float) -> int:
        """Return the fewest local steps per round, from `hidden_steps` on, so that exchanges take less than 1 %.

        Where the overlap is chosen, the fewest that hide an exchange.
        """
        if self.chooses_overlap:
            return max(1, math.ceil(self.seconds_per_exchange / step_seconds))
        waits = self.seconds_per_exchange - self.hidden_steps * step_seconds
        return max(self.hidden_steps, fewest_steps(waits, step_seconds, NEGLIGIBLE))


def schemes(
    config: RunConfig,
    topology: Topology,
    largest: RankParameters,
    network: Network,
    step_seconds: float | None = None,
) -> list[Scheme]:
    """Return the costs of the config's own scheme, of NoLoCo, of DiLoCo, and of synchronous training.

    NoLoCo is in pairs, and with more than 8 replicas also in the groups that docs/evidence.md recommends for them;
    separate jobs exchange in pairs only, and have no DiLoCo; synchronous training is among those that a federation
    starts with, or two. With `most_waiting` each has the local steps that its run would choose. Pairs in int3 are
    there where they permit so many more rounds than int4 that they lose less.

    The time of DiLoCo is that of this trainer's exchange among all replicas, in two phases. Synchronous training
    averages gradients in each local step, in the working precision, by a reduce-scatter and an all-gather of
    halves, quarters and so on (Rabenseifner): 2 log2 R messages one after the other.
    """
    replicas, noloco = topology.total_replicas, config.noloco
    if replicas == 1:
        return []

    sites, number = noloco.among(replicas).sites, replicas or max(2, config.federation.start_with)

    def scheme(name: str, block: TrainerSettings) -> Scheme:
        found = scheme_of(name, block, largest, topology, network, step_seconds)
        if block.most_waiting is not None and step_seconds is not None:
            # As `training.choices.LocalStepsChoice` chooses by the seconds of the first rounds.
            least, most = max(block.fragments, block.first_overlap_steps), config.training.train_iters
            exchange = found.seconds_per_exchange
            chosen = fewest_steps(exchange, step_seconds, block.most_waiting, least, most)
            block = block.replace(local_steps=chosen)
            found = scheme_of(name, block, largest, topology, network, step_seconds)
        if sites is None:
            return found
        # Drawn from all alike, a member of a group is at another site so often.
        share = 1 / sites.interval if block.sites else (number - sites.size) / (number - 1)
        sent = share * found.bytes_per_exchange * sites.size * topology.replica_size
        return replace(found, bytes_across=round(sent))

    def variant(**fields: Any) -> TrainerSettings:
        return noloco.replace(**{"enabled": True, "overlap_steps": 0, "sites": None, **fields})

    def fewest(found: Scheme) -> float:
        if step_seconds is None:
            return math.inf
        return found.local_steps if noloco.most_waiting is not None else found.enough_steps(step_seconds)

    pairs = {"method": "noloco", "group_size": 2}
    found = [scheme("this config", noloco)] if noloco.enabled else []
    fp32, int4, int3 = (
        scheme(f"NoLoCo in pairs, {payload}", variant(**pairs, payload=payload))
        for payload in ("fp32", "int4", "int3")
    )
    found += [fp32, int4]
    if fewest(int3) < fewest(int4) and fewest(int3) <= _MOST_INT3:
        found.append(int3)
    found.append(
        scheme("NoLoCo in pairs, int4, overlap", variant(**pairs, payload="int4", overlap_steps="auto"))
    )
    if not topology.separate_jobs:
        if number > 8:
            advised = recommended(number)
            name = f"NoLoCo in groups of {advised['group_size']}, {advised['payload']}"
            found.append(scheme(name, variant(method="noloco", **advised)))
        found += [
            scheme("DiLoCo, fp32", variant(method="diloco", payload="fp32")),
            scheme("DiLoCo, int4", variant(method="diloco", payload="int4")),
        ]
    gradients = round(WORKING[config.precision] * largest.parameters * 2 * (number - 1) / number)
    seconds = network.seconds(gradients, 2 * math.log2(number))
    return [*found, Scheme("synchronous", gradients, seconds, 1)]


def scheme_of(
    name: str,
    noloco: TrainerSettings,
    held: RankParameters,
    topology: Topology,
    network: Network,
    step_seconds: float | None = None,
) -> Scheme:
    """Return the costs of one scheme for the rank that holds most; `step_seconds` of a local step, if known."""
    sizes, coded = noloco.among(topology.total_replicas).sizes, noloco.payload != "fp32"
    trips = 2.0 + coded  # a receiver says that it is ready; sketches go before codes
    if topology.separate_jobs:  # a stream is opened, answered, and both are prepared (`federation.rounds`)
        trips = 3.0 + 2 * coded
    parts = noloco.fragments  # each of which is exchanged by itself
    pause = math.inf if step_seconds is None else noloco.local_steps / parts * step_seconds
    bytes_of_rounds, seconds_of_rounds = [], []
    for members in sizes:
        sent = exchange_bytes(noloco, held, members, topology.dp) * PAYLOADS[noloco.payload].bytes
        phases = 1 if members <= 2 else 2  # parts of the vector are added up, then the sums are sent to all
        seconds = network.seconds(sent / parts / phases, trips, members - 1, pause)
        if phases == 2:
            seconds += network.seconds(sent / parts / phases, 2, members - 1, pause=0)
        bytes_of_rounds.append(sent)
        seconds_of_rounds.append(parts * seconds)
    return Scheme(
        name,
        round(mean(bytes_of_rounds)),
        mean(seconds_of_rounds),
        noloco.local_steps,
        min(parts * noloco.longest_overlap_steps, noloco.local_steps),
        noloco.overlap_steps == "auto",
    )


def exchange_bytes(noloco: TrainerSettings, held: RankParameters, members: int, dp: int) -> int:
    """Return the bytes that a rank sends when all its weights are exchanged once, in a group of `members`.

    With a code, next bits are not counted, blocks count as whole, and the data-parallel ranks as sharing copies
    evenly.
    """
    if members <= 1:
        return 0
    to_others = (members - 1) / members
    if noloco.payload_bits is None:
        vector = float(_FP32 * held.owned)
        return round(vector if members == 2 else vector * 2 * to_others)
    coded = message_bytes(held.owned, noloco.payload_bits)
    exact = _FP32 * held.copied / dp
    if members == 2:
        return round(coded + exact)
    # An owner hands out sums, the step of each block, and a verdict (`outer.bucket_exchange`).
    sums = sum_bytes(held.owned, noloco.payload_bits, members) + blocks_in(held.owned) * (4 + 1)
    return round(to_others * (coded + sums + 2 * exact))
