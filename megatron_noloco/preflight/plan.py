"""Costs of a run: memory of a rank, seconds of a local step, bytes and seconds of exchanges on a network."""

import math
from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.outer.payload import BLOCK, blocks_in, message_bytes, wide_type
from megatron_noloco.plans.fragments import fewest_steps
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import (
    WORKING,
    Memory,
    RankParameters,
    fullest_stage,
    parameters_of_stages,
)
from megatron_noloco.settings import NolocoSettings, TrainerSettings, recommended

_NEGLIGIBLE = 0.01  # share of the time
_FP32 = 4
_HEADERS = 1500 / 1448  # of IP and TCP with time stamps, in packets of 1500 bytes
_FIRST_WINDOW = 10 * 1448  # bytes that TCP sends at first, before an answer (RFC 6928)
_GATHERED_PER_SECOND = 2.5e9  # bytes between two ranks of a host, over gloo, as measured on two cores
_LEAST_TIME_OUT = 0.2  # seconds, of Linux; after a pause of so long and a round trip TCP halves its window

# For 10^9 weights, in pairs and in groups of 4, with copies of messages in memory (python -m tools.bench_host).
_CORE_SECONDS = {"fp32": (5.0, 8.0), "int8": (12.0, 13.0), "int4": (13.0, 25.0)}
_CORE_SECONDS_OF_STEPS = 0.1  # where a GPU computes the codes: to find their steps


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
        return max(self.hidden_steps, fewest_steps(waits, step_seconds, _NEGLIGIBLE))


@dataclass(frozen=True)
class Plan:
    """The needs of a run.

    Attributes:
        stage: the pipeline stage whose ranks need most memory.
        held: the parameters of one of these ranks.
        memory: the memory of one of these ranks.
        step_seconds: seconds of a local step without exchanges; None: not known.
        schemes: the config's own scheme, then others in its place; empty where the network is not known.
        routed_bytes: bytes that a replica sends to others in a local step, for routing.
        routed_seconds: seconds of these messages if no computation hides them; None without routing or network.
        round_core_seconds: seconds that a round takes of one core of the host.
        bus_bytes: that a round moves between a GPU and the host: to the host, and to the GPU.
        gathered_bytes: bytes that the other ranks of a replica send to its leader in a round of a federation, and
            that come back.
    """

    topology: Topology
    stage: int
    held: RankParameters
    memory: Memory
    step_seconds: float | None
    schemes: list[Scheme]
    routed_bytes: float
    routed_seconds: float | None
    round_core_seconds: float
    bus_bytes: tuple[int, int]
    gathered_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the plan for scripts."""
        return {
            "ranks": self.topology.world_size,
            "replicas": self.topology.ensemble,
            "stage": self.stage,
            "weights_of_rank": asdict(self.held),
            "memory_bytes": asdict(self.memory),
            "step_seconds": self.step_seconds,
            "core_seconds_per_round": self.round_core_seconds,
            "bus_bytes_per_round": self.bus_bytes,
            "gathered_bytes_per_round": self.gathered_bytes,
            "routed_bytes_per_step": self.routed_bytes,
            "routed_seconds_per_step": self.routed_seconds,
            "ways": [asdict(scheme) | self._lost(scheme) for scheme in self.schemes],
        }

    def _lost(self, scheme: Scheme) -> dict[str, float]:
        step = self.step_seconds
        if step is None:
            return {}
        return {"share_lost": self.share_lost(scheme, step), "enough_steps": scheme.enough_steps(step)}

    def share_lost(self, scheme: Scheme, step_seconds: float) -> float:
        """Return the share of the time in which no local step computes: in exchanges, and in routing."""
        routed = 0.0 if scheme.name == "synchronous" else self.routed_seconds or 0.0
        waits = scheme.share_lost(step_seconds + routed)
        return waits + (1 - waits) * routed / (step_seconds + routed)


def plan_of(
    config: RunConfig,
    architecture: Architecture,
    topology: Topology,
    network: Network | None = None,
    step_seconds: float | None = None,
) -> Plan:
    """Return the plan of a run.

    Args:
        step_seconds: seconds of a local step, if they are known.
    """
    stage, held, memory = fullest_stage(config, architecture, topology)
    largest = max(parameters_of_stages(config, architecture, topology), key=lambda each: each.owned)
    gathered = 0
    if topology.separate_jobs:  # one rank of a replica exchanges for all
        whole = table_of(architecture).exported_count
        gathered = _FP32 * max(0, whole - largest.owned) if topology.replica_size > 1 else 0
        largest = replace(largest, owned=whole, copied=0)
        if network is not None:
            replicas_of_node = max(1, network.ranks_per_node // topology.replica_size)
            network = replace(network, ranks_per_node=replicas_of_node)
    found = [] if network is None else schemes(config, topology, largest, network, step_seconds)
    if gathered:
        least = 2 * gathered / _GATHERED_PER_SECOND  # beside the exchange, and not after it
        found = [replace(one, seconds_per_exchange=max(one.seconds_per_exchange, least)) for one in found]
    sent, seconds = routed_bytes(config, topology), None
    if network is not None and sent:
        # Of the first microbatch forward, of the last one backward.
        trips = 2 * (topology.pp * topology.vpp - 1)
        seconds = network.seconds(sent / topology.replica_size, trips)  # all ranks count as sending the same
    computed, crosses = 0.0, (0, 0)
    if config.noloco.enabled:
        computed = core_seconds(config.noloco, largest.owned, topology.ensemble)
        crosses = bus_bytes(config.noloco, held.owned, topology.ensemble)
    return Plan(
        topology, stage, held, memory, step_seconds, found, sent, seconds, computed, crosses, gathered
    )


def core_seconds(noloco: NolocoSettings, weights: int, replicas: int | None) -> float:
    """Return the seconds of one core in which a rank computes its part of a round of all its weights."""
    in_pairs, in_groups = _CORE_SECONDS[noloco.payload]
    if noloco.codes_on_device(replicas):
        in_pairs = in_groups = _CORE_SECONDS_OF_STEPS
    return weights / 1e9 * (in_pairs if noloco.in_pairs_among(replicas) else in_groups)


def bus_bytes(noloco: NolocoSettings, weights: int, replicas: int | None) -> tuple[int, int]:
    """Return the bytes that a round of all weights of a rank moves from a GPU to the host, and to the GPU."""
    bits = noloco.payload_bits
    if bits is None or not noloco.codes_on_device(replicas):
        return _FP32 * weights, _FP32 * weights
    codes, elements = message_bytes(weights, bits), blocks_in(weights) * BLOCK
    to_host, to_gpu = [], []
    for members in noloco.group_sizes_among(replicas):
        sums = elements * wide_type(bits, members).itemsize if members > 2 else 0
        to_host.append(codes + sums / members)
        to_gpu.append((codes * (1 - 1 / members) if members > 2 else codes) + sums)
    return round(mean(to_host)), round(mean(to_gpu))


def computing_seconds(
    config: RunConfig, architecture: Architecture, tflops: float, utilisation: float
) -> float:
    """Return the seconds of a local step: its floating-point operations, shared by the ranks of a replica.

    Args:
        tflops: peak of a rank's device.
        utilisation: share of the peak that is reached (MFU).
    """
    flops = config.replica_batch * training_flops(architecture)
    return flops / (config.parallel.replica_size * tflops * 1e12 * utilisation)


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
    starts with, or two. With `most_waiting` each has the local steps that its
    run would choose.

    The time of DiLoCo is that of this trainer's exchange among all replicas, in two phases. Synchronous training
    averages gradients in each local step, in the working precision, by a reduce-scatter and an all-gather of
    halves, quarters and so on (Rabenseifner): 2 log2 R messages one after the other.
    """
    replicas, noloco = topology.ensemble, config.noloco
    if replicas == 1:
        return []

    sites, number = noloco.sites_among(replicas), replicas or max(2, config.federation.start_with)

    def scheme(name: str, block: TrainerSettings) -> Scheme:
        found = scheme_of(name, block, largest, topology, network, step_seconds)
        if block.most_waiting is not None and step_seconds is not None:
            # As `training.choices.LocalStepsChoice` chooses by the seconds of the first rounds.
            steps = fewest_steps(found.seconds_per_exchange, step_seconds, block.most_waiting)
            steps = max(steps, block.fragments, block.first_overlap_steps)
            chosen = block.replace(local_steps=min(steps, config.training.train_iters))
            found = scheme_of(name, chosen, largest, topology, network, step_seconds)
        if sites is None:
            return found
        # Drawn from all alike, a member of a group is at another site so often.
        share = 1 / sites.interval if block.sites else (number - sites.size) / (number - 1)
        sent = share * found.bytes_per_exchange * sites.size * topology.replica_size
        return replace(found, bytes_across=round(sent))

    def variant(**fields: Any) -> TrainerSettings:
        return noloco.replace(**{"enabled": True, "overlap_steps": 0, "sites": None, **fields})

    pairs = {"method": "noloco", "group_size": 2}
    found = [scheme("this config", noloco)] if noloco.enabled else []
    found += [
        scheme("NoLoCo in pairs, fp32", variant(**pairs, payload="fp32")),
        scheme("NoLoCo in pairs, int8", variant(**pairs, payload="int8")),
        scheme("NoLoCo in pairs, int8, overlap", variant(**pairs, payload="int8", overlap_steps="auto")),
    ]
    if not topology.separate_jobs:
        if number > 8:
            advised = recommended(number)
            name = f"NoLoCo in groups of {advised['group_size']}, {advised['payload']}"
            found.append(scheme(name, variant(method="noloco", **advised)))
        found += [
            scheme("DiLoCo, fp32", variant(method="diloco", payload="fp32")),
            scheme("DiLoCo, int8", variant(method="diloco", payload="int8")),
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
    sizes, coded = noloco.group_sizes_among(topology.ensemble), noloco.payload != "fp32"
    trips = 2.0 + coded  # a receiver says that it is ready; sketches go before codes
    if topology.separate_jobs:  # separate jobs ask for messages, and say that they have them
        trips += 3 + 3 * coded
    parts = noloco.fragments  # each of which is exchanged by itself
    pause = math.inf if step_seconds is None else noloco.local_steps / parts * step_seconds
    bytes_of_rounds, seconds_of_rounds = [], []
    for members in sizes:
        sent = exchange_bytes(noloco, held, members, topology.dp)
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

    With a code, elements that are sent again are not counted, blocks count as whole, and the data-parallel ranks
    as sharing copies evenly.
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
    # An owner hands out sums, the step of each block, and a verdict (`outer.coded_exchange`).
    sums = blocks_in(held.owned) * (BLOCK * wide_type(noloco.payload_bits, members).itemsize + 4 + 1)
    return round(to_others * (coded + sums + 2 * exact))


def routed_bytes(config: RunConfig, topology: Topology) -> float:
    """Return the bytes that a replica sends to others in a local step, on average, for routed microbatches.

    Between two stages activations go forward and gradients backward; 1 - 1/R of them go to another replica.
    """
    if not config.routing(topology).active:
        return 0.0
    tokens = topology.dp * config.microbatches * config.micro_batch_size * config.model.seq_length
    copies = 1 if topology.sequence_parallel else topology.tp
    hops = 2 * (topology.pp * topology.vpp - 1)
    message = tokens * config.model.hidden_size * WORKING[config.precision]
    return (1 - 1 / topology.replicas) * hops * copies * message
