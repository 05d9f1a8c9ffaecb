"""Costs of ways to average replicas: bytes and seconds of their exchanges on a network."""

import math
from dataclasses import dataclass
from statistics import mean

from megatron_noloco.config import RunConfig
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.model.architecture import Precision
from megatron_noloco.outer.payload import blocks_in, message_bytes, sum_bytes
from megatron_noloco.plans.fragments import fewest_steps
from megatron_noloco.plans.payloads import PAYLOADS
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import FP32, WORKING, RankParameters

NEGLIGIBLE = 0.01  # share of the time
_HEADERS = 1500 / 1448  # of IP and TCP with time stamps, in packets of 1500 bytes
_FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at first, before an answer (RFC 6928)
_PAIRS = {"enabled": True, "method": "noloco", "group_size": 2, "overlap_steps": 0, "sites": None}


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
    ranks_per_node: int = 1

    def seconds(self, bytes_per_rank: float, trips: float, partners: int = 1) -> float:
        """Return the seconds of an exchange over TCP, in which all send and receive at the same time.

        TCP starts slowly: its window doubles in each round trip until it fills the link.

        Args:
            bytes_per_rank: sent by each rank, to all its partners together.
            trips: messages that are sent one after the other.
            partners: ranks to which each rank sends at the same time.
        """
        rate, there_and_back = self.bytes_per_second / self.ranks_per_node, 2 * self.latency
        left, window = bytes_per_rank * _HEADERS, float(partners * _FIRST_WINDOW)
        # Acknowledgements wait behind data, up to two round trips (python -m tools.peers plan).
        behind = min(2 * there_and_back, 0.25 * left / rate)
        seconds = left / rate + behind + trips * self.latency
        while window < min(left, rate * there_and_back):
            seconds += there_and_back - window / rate
            left -= window
            window *= 2
        return seconds


@dataclass(frozen=True)
class Scheme:
    """The costs of one way to average replicas, or of routing.

    Attributes:
        name: what it is.
        bytes_per_exchange: bytes sent by the rank with most weights; in a federation, by the leader of a replica.
        seconds_per_exchange: time on the network, of all fragments together.
        local_steps: number of local steps from one exchange to the next.
        hidden_steps: number of local steps that go on during an exchange, or during those of all fragments.
        chooses_overlap: whether these are as many as an exchange takes, at most `local_steps`.
    """

    name: str
    bytes_per_exchange: int
    seconds_per_exchange: float
    local_steps: int
    hidden_steps: int = 0
    chooses_overlap: bool = False

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
    """Return the costs of the config's own scheme, of NoLoCo in pairs, DiLoCo, synchronous training, and routing.

    Separate jobs have no DiLoCo; synchronous training is among the replicas that a federation starts with, or two.
    With `most_waiting` each has the local steps that its run would choose. A rank averages gradients in each local
    step by a reduce-scatter and an all-gather of halves, quarters and so on (Rabenseifner): 2 log2 R messages one
    after the other.
    """
    noloco, replicas = config.noloco, topology.total_replicas
    if replicas == 1:
        return []
    ways = {"this config": noloco} if noloco.enabled else {}
    ways |= {f"NoLoCo in pairs, {code}": noloco.replace(**_PAIRS, payload=code) for code in ("fp32", "int4")}
    overlap = _PAIRS | {"payload": "int4", "overlap_steps": "auto"}
    ways["NoLoCo in pairs, int4, overlap"] = noloco.replace(**overlap)
    if not topology.separate_jobs:
        ways["DiLoCo, fp32"] = noloco.replace(**_PAIRS | {"method": "diloco", "payload": "fp32"})
    found = []
    for name, block in ways.items():
        scheme = scheme_of(name, block, largest, topology, network)
        if block.most_waiting is not None and step_seconds is not None:
            # As `training.choices.LocalStepsChoice` chooses by the seconds of the first rounds.
            least, most = max(block.fragments, block.first_overlap_steps), config.training.train_iters
            exchange = scheme.seconds_per_exchange
            chosen = fewest_steps(exchange, step_seconds, block.most_waiting, least, most)
            scheme = scheme_of(name, block.replace(local_steps=chosen), largest, topology, network)
        found.append(scheme)
    number = replicas or max(2, config.federation.start_with)
    gradients = round(all_reduce_bytes(config.precision, largest.parameters, number))
    found.append(Scheme("synchronous", gradients, network.seconds(gradients, 2 * math.log2(number)), 1))
    if routed := _routed_bytes(config, topology):
        trips = 2 * (topology.pp * topology.vpp - 1)  # the first microbatch forward, the last one backward
        found.append(Scheme("routing, beside rounds", routed, network.seconds(routed, trips), 1))
    return found


def all_reduce_bytes(precision: Precision, weights: int, replicas: int) -> float:
    """Return the bytes that a rank sends to average the gradients of its weights over so many replicas."""
    return 2 * (replicas - 1) / replicas * WORKING[precision] * weights


def scheme_of(
    name: str, noloco: TrainerSettings, held: RankParameters, topology: Topology, network: Network
) -> Scheme:
    """Return the costs of one scheme for the rank that holds most."""
    sizes, coded = noloco.among(topology.total_replicas).sizes, noloco.payload != "fp32"
    trips = 2.0 + coded  # a receiver says that it is ready; sketches go before codes
    if topology.separate_jobs:  # pieces are asked for, and the round is agreed on before and after
        trips = 5.0 + 2 * coded
    parts = noloco.fragments  # each of which is exchanged by itself
    bytes_of_rounds, seconds_of_rounds = [], []
    for members in sizes:
        sent = exchange_bytes(noloco, held, members, topology.dp) * PAYLOADS[noloco.payload].bytes
        phases = 1 if members <= 2 else 2  # parts of the vector are added up, then the sums are sent to all
        each = network.seconds(sent / parts / phases, trips, members - 1)
        bytes_of_rounds.append(sent)
        seconds_of_rounds.append(parts * phases * each)
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
        vector = float(FP32 * held.owned)
        return round(vector if members == 2 else vector * 2 * to_others)
    coded = message_bytes(held.owned, noloco.payload_bits)
    exact = FP32 * held.copied / dp
    if members == 2:
        return round(coded + exact)
    # An owner hands out sums, the step of each block, and a verdict (`outer.bucket_exchange`).
    sums = sum_bytes(held.owned, noloco.payload_bits, members) + blocks_in(held.owned) * (4 + 1)
    return round(to_others * (coded + sums + 2 * exact))


def _routed_bytes(config: RunConfig, topology: Topology) -> int:
    """Return the bytes that a rank sends to other replicas in a local step, on average, for routed microbatches.

    Between two stages activations go forward and gradients backward; 1 - 1/R of them go to another replica. All
    ranks count as sending the same.
    """
    if not config.routing(topology).active:
        return 0
    tokens = topology.dp * config.microbatches * config.micro_batch_size * config.model.seq_length
    copies = 1 if topology.sequence_parallel else topology.tp
    hops = 2 * (topology.pp * topology.vpp - 1)
    message = tokens * config.model.hidden_size * WORKING[config.precision]
    return round((1 - 1 / topology.replicas) * hops * copies * message / topology.replica_size)
