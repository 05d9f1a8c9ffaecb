"""Expert parallelism: each expert is averaged with itself. tests/layouts has the training itself."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_noloco.checkpoint.ensemble import Ensemble
from megatron_noloco.checkpoint.reader import CheckpointReader
from megatron_noloco.plans.topology import Topology
from tests.kit.disturbed import Run
from tests.kit.ranks import slow
from tests.kit.saved_runs import SAVED, layout, saved_run
from tests.kit.tiny import FAMILY_MODELS

MODEL = {**FAMILY_MODELS["mixtral"], "num_layers": 2, "init_method_std": 0.1}
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"


@pytest.mark.parametrize("topology", [Topology(4, 2, 4, 2, ep=2), Topology(2, 1, 6, 1, ep=3)], ids=str)
def test_partners_have_the_same_experts(topology: Topology) -> None:
    for rank in range(topology.world_size):
        at, place = topology.position(rank), topology.place(rank)
        for replica in topology.numbers:
            partner = topology.position(place.rank_of(replica))
            assert (partner.replica, partner.stage, partner.tp) == (replica, at.stage, at.tp)
            assert topology.experts(partner.dp, 12) == topology.experts(at.dp, 12)
            assert topology.owners(partner.dp, experts=True) == topology.owners(at.dp, experts=True)
    together = [topology.experts(dp, 12) for dp in range(topology.ep)]
    assert sorted(expert for own in together for expert in own) == list(range(12))


def weights(run: Run, replica: int, vector: str) -> dict[str, Tensor]:
    reader = CheckpointReader(Ensemble.read([run.step_folder(SAVED)]))
    return {row.name: reader.read(row.name, [replica], vector).clone() for row in reader.table}


@pytest.mark.parametrize(("pp", "interval"), [(1, "off"), slow(2, "microbatch")])
def test_rounds_are_those_without_it(pp: int, interval: str, tmp_path: Path) -> None:
    """Two replicas, two rounds: both runs end with the same weights, read from checkpoints of both layouts."""
    mixture = [{"noloco": {"local_steps": 2, "routing": interval}}, {"model": {**MODEL, "num_layers": 4}}]
    without = saved_run(tmp_path / "without", [*mixture, layout(pp, dp=2)])
    apart = saved_run(tmp_path / "apart", [*mixture, layout(pp, dp=2, ep=2)])
    for vector in ("slow_weights", "fast_weights"):
        for replica in range(2):
            found, expected = weights(apart, replica, vector), weights(without, replica, vector)
            for name, tensor in expected.items():
                torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5, msg=name)
    experts = [weights(without, replica, "fast_weights")[EXPERT] for replica in range(2)]
    assert float((experts[0] - experts[1]).abs().max()) > 1e-3, "what an expert is averaged with is seen"
