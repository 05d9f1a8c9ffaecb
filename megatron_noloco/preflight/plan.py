"""Costs of a run: memory of a rank, seconds of a local step, exchanges in one scheme and others, departures."""

from dataclasses import asdict, dataclass, replace
from statistics import mean
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.config.round_memory import bytes_of_state
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of, training_flops
from megatron_noloco.outer.payload import message_bytes, sum_bytes
from megatron_noloco.plans.payloads import PAYLOADS
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import (
    WORKING,
    Memory,
    fullest_stage,
    parameters_of_stages,
)
from megatron_noloco.preflight.schemes import Network, Scheme, schemes
from megatron_noloco.settings import NolocoSettings

_FP32 = 4
_GATHERED_PER_SECOND = 2.5e9  # bytes between two ranks of a host, over gloo, as measured on two cores

_CORE_SECONDS_OF_STEPS = 0.6  # where a GPU computes the codes: finds steps, queues kernels (H100, int8)


@dataclass(frozen=True)
class Plan:
    """The needs of a run.

    Attributes:
        memory: the memory of a rank of the pipeline stage whose ranks need most.
        step_seconds: seconds of a local step without exchanges; None: not known.
        schemes: the config's own scheme, then others in its place; empty where the network is not known.
        routed_bytes: bytes that a replica sends to others in a local step, for routing.
        routed_seconds: seconds of these messages if no computation hides them; None without routing or network.
        round_core_seconds: seconds that a round takes of one core of the host.
        bus_bytes: that a round moves between a GPU and the host: to the host, and to the GPU.
        network: the links between nodes; None: not known.
        gathered_bytes: bytes that the other ranks of a replica send to its leader in a round of a federation, and
            that come back.
    """

    topology: Topology
    memory: Memory
    step_seconds: float | None
    schemes: list[Scheme]
    routed_bytes: float
    routed_seconds: float | None
    round_core_seconds: float
    bus_bytes: tuple[int, int]
    network: Network | None
    gathered_bytes: int

    def as_json(self) -> dict[str, Any]:
        """Return the plan for scripts."""
        memory = asdict(self.memory)
        return {
            "ranks": self.topology.world_size,
            "replicas": self.topology.total_replicas,
            "stage": self.memory.held.stage,
            "weights_of_rank": memory.pop("held"),
            "memory_bytes": memory,
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


@dataclass(frozen=True)
class PreemptionCost:
    """What departures cost, all replicas together.

    Attributes:
        lost_steps: local steps of one departure that no other replica has, on average over the moments of a round.
        share_lost: of all local steps.
        state_bytes: that a replica takes over which comes back without its disk.
    """

    lost_steps: float
    share_lost: float
    state_bytes: int


def architecture_of_run(config: RunConfig) -> Architecture:
    """Return the model of a config; the tokenizer is read only where its vocabulary decides. Raises UserError."""
    known = config.model.vocab_size is not None
    return config.architecture(0 if known else build_tokenizer(config.data.tokenizer).vocab_size)


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
    memory = fullest_stage(config, architecture, topology)
    largest = max(parameters_of_stages(config, architecture, topology), key=lambda each: each.owned)
    gathered, given = 0, network
    if topology.separate_jobs:  # one rank of a replica exchanges for all
        whole = table_of(architecture).exported_count
        gathered = _FP32 * max(0, whole - largest.owned)
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
        computed = core_seconds(config.noloco, largest.owned, topology)
        crosses = bus_bytes(config.noloco, memory.held.owned, topology)
    return Plan(
        topology=topology,
        memory=memory,
        step_seconds=step_seconds,
        schemes=found,
        routed_bytes=sent,
        routed_seconds=seconds,
        round_core_seconds=computed,
        bus_bytes=crosses,
        network=given,
        gathered_bytes=gathered,
    )


def core_seconds(noloco: NolocoSettings, weights: int, topology: Topology) -> float:
    """Return the seconds of one core in which a rank computes its part of a round of all its weights."""
    in_pairs, in_groups = PAYLOADS[noloco.payload].core_seconds
    if noloco.codes_on_device(topology.separate_jobs):
        in_pairs = in_groups = _CORE_SECONDS_OF_STEPS
    return weights / 1e9 * (in_pairs if noloco.among(topology.total_replicas).in_pairs else in_groups)


def bus_bytes(noloco: NolocoSettings, weights: int, topology: Topology) -> tuple[int, int]:
    """Return the bytes that a round of all weights of a rank moves from a GPU to the host, and to the GPU."""
    bits = noloco.payload_bits
    if bits is None or not noloco.codes_on_device(topology.separate_jobs):
        return _FP32 * weights, _FP32 * weights
    codes = message_bytes(weights, bits)
    to_host, to_gpu = [], []
    for members in noloco.among(topology.total_replicas).sizes:
        sums = sum_bytes(weights, bits, members)
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


def departures_of(
    config: RunConfig,
    architecture: Architecture,
    step_seconds: float,
    per_second: float,
    notice_seconds: float,
) -> PreemptionCost:
    """Return the costs of so many departures per second, of all replicas together."""
    noloco, replicas = config.noloco, max(2, config.federation.start_with)
    seconds = min(notice_seconds, config.federation.leave_seconds)
    lost = lost_steps(noloco.local_steps, step_seconds, seconds)
    kept = _FP32 * (1 + config.optimizer.moments) + sum(bytes_of_state(noloco, replicas).values())
    return PreemptionCost(
        lost, lost * per_second * step_seconds / replicas, round(table_of(architecture).exported_count * kept)
    )


def lost_steps(local_steps: int, step_seconds: float, notice_seconds: float) -> float:
    """Return the local steps since the last round that a replica takes with it, on average over its moments.

    A replica that leaves after j of k steps exchanges once more where its partner comes to the round in time,
    k - j local steps later.
    """
    late = (j for j in range(local_steps) if (local_steps - j) * step_seconds > notice_seconds)
    return sum(late) / local_steps
