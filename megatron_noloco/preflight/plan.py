"""What a config needs, in one value."""

from dataclasses import asdict, dataclass
from typing import Any

from megatron_noloco.config import RunConfig
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.flops import training_flops
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.held import Held
from megatron_noloco.preflight.memory import Memory, fullest_stage
from megatron_noloco.preflight.traffic import Network, Way, routed_bytes, routed_seconds, ways


@dataclass(frozen=True)
class Plan:
    """The needs of a run.

    Attributes:
        stage: the pipeline stage whose ranks need most memory.
        held, memory: of one of these.
        step_seconds: of a local step without exchanges; None: not known.
        ways: see `traffic.ways`; none where the network is not known.
        routed_bytes, routed_seconds: see there; the seconds are None where the network is not known.
    """

    topology: Topology
    stage: int
    held: Held
    memory: Memory
    step_seconds: float | None
    ways: list[Way]
    routed_bytes: float
    routed_seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "ranks": self.topology.world_size,
            "replicas": self.topology.ensemble,
            "stage": self.stage,
            "weights_of_rank": asdict(self.held),
            "memory_bytes": {"device": self.memory.device, "host": self.memory.host},
            "step_seconds": self.step_seconds,
            "routed_bytes_per_step": self.routed_bytes,
            "routed_seconds_per_step": self.routed_seconds,
            "ways": [asdict(way) | self._lost(way) for way in self.ways],
        }

    def _lost(self, way: Way) -> dict[str, float]:
        step = self.step_seconds
        if step is None:
            return {}
        return {"share_lost": way.share_lost(step), "enough_steps": way.enough_steps(step)}


def plan_of(
    config: RunConfig,
    architecture: Architecture,
    topology: Topology,
    network: Network | None = None,
    step_seconds: float | None = None,
) -> Plan:
    stage, held, memory = fullest_stage(config, architecture, topology)
    found = [] if network is None else ways(config, topology, held, network)
    sent = routed_bytes(config, topology)
    seconds = routed_seconds(sent, topology, network) if network is not None and sent else None
    return Plan(topology, stage, held, memory, step_seconds, found, sent, seconds)


def computing_seconds(
    config: RunConfig, architecture: Architecture, tflops: float, utilisation: float
) -> float:
    """Of a local step: its floating-point operations, shared by the ranks of a replica.

    Args:
        tflops: of a rank's device at most.
        utilisation: the part of them that is reached (MFU).
    """
    flops = config.replica_batch * training_flops(architecture)
    return flops / (config.replica_size * tflops * 1e12 * utilisation)
