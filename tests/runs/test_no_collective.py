"""What the method promises, recorded: messages between replicas go to partners and along the routes only."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.plans.fragments import fragment_after
from megatron_noloco.plans.grouping import Grouping
from megatron_noloco.plans.routing import Routing
from megatron_noloco.plans.topology import Position, Topology
from tests.kit.ranks import run_mpi, run_ranks, said, slow
from tests.kit.spied_run import spied_rank
from tests.kit.tiny import FAMILY_MODELS, metrics, sizes, tiny, write_config, write_text

STEPS, LOCAL_STEPS, MICROBATCHES, SEED = 15, 3, 2, 1234
STAGED = Topology(replicas=4, pp=2)

NO_MORE: dict[str, Any] = {}
Ranks = list[dict[str, Any]]  # what the spy of every rank recorded


def config(
    folder: Path, topology: Topology, interval: str, model: Mapping[str, Any] = NO_MORE, **noloco: Any
) -> dict[str, Any]:
    return tiny(
        {
            "gradient_accumulation_steps": MICROBATCHES,
            "noloco": {"local_steps": LOCAL_STEPS, "routing": interval, **noloco},
            "parallel": sizes(replicas=topology.replicas, pp=topology.pp, dp=topology.dp, ep=topology.ep),
            "model": {"num_layers": 2, **model},
            "data": {"text": write_text(folder)},
            "training": {"train_iters": STEPS, "log_interval": 5, "output_dir": str(folder)},
        }
    )


def over_torch(
    folder: Path,
    interval: str,
    model: Mapping[str, Any] = NO_MORE,
    topology: Topology = STAGED,
    **noloco: Any,
) -> Ranks:
    path = write_config(folder, config(folder, topology, interval, model, transport="torch", **noloco))
    return run_ranks(topology.world_size, spied_rank, path)


def over_mpi(folder: Path, topology: Topology, **noloco: Any) -> Ranks:
    path = write_config(folder, config(folder, topology, "round", transport="mpi", **noloco))
    finished = run_mpi(topology.world_size, "tests.kit.spied_run", [path], timeout=300)
    return sorted(said(finished), key=lambda line: line["rank"])


def is_exchange(call: dict[str, Any], hops: list[str]) -> bool:
    return call["peer"] is not None and call["group"] not in hops


def assert_no_collective_spans_replicas(ranks: Ranks, topology: Topology = STAGED) -> None:
    """From the building of the engines on; before it ranks agree on what to resume, and MPI is set up."""
    inside = 0
    for rank, seen in enumerate(ranks):
        for call in seen["calls"]:
            if call["peer"] is None and call["step"] >= 0:
                replicas = {topology.position(member).replica for member in call["ranks"]}
                assert replicas == {topology.position(rank).replica}, call
                inside += call["step"] > 0
    assert inside, "the spy misses calls: inside a replica there are collectives"


def assert_exchanges_go_to_partners(ranks: Ranks, topology: Topology = STAGED, fragments: int = 1) -> None:
    grouping = Grouping(topology.replicas, 2, SEED)
    due = {done: fragment_after(done, LOCAL_STEPS, fragments) for done in range(1, STEPS + 1)}
    rounds = {done: one for done, one in due.items() if one}
    for rank, seen in enumerate(ranks):
        partners: defaultdict[int, set[int]] = defaultdict(set)
        connected: list[tuple[int, int]] = []  # by MPI, with the first message
        for call in seen["calls"]:
            if is_exchange(call, seen["hops"]):
                if due.get(call["step"]):
                    partners[call["step"]].add(call["peer"])
                else:
                    assert call["library"] == "mpi", f"an exchange outside of a round: {call}"
                    connected.append((call["step"], call["peer"]))
        expected = {}
        for done, (index, fragment) in rounds.items():
            group = grouping.group(topology.position(rank).replica, index, fragment=fragment)
            expected[done] = {topology.place(rank).rank_of(other) for other in group} - {rank}
        assert partners == expected, f"rank {rank}: by local step"
        for step, peer in connected:
            assert peer in expected[min(done for done in rounds if done > step)], "only the next partner"
        assert len({peer for _, peer in connected}) == len(connected), f"once: {connected}"
    drawn = {tuple(grouping.groups(index, fragment=fragment)) for index, fragment in rounds.values()}
    assert len(drawn) > 1, "partners do change"


def hop_peers(seen: dict[str, Any], name: str, direction: int) -> list[tuple[int, int]]:
    """(step, peer) of every send or receive along the routes, in order."""
    group = seen["hops"][direction]
    calls = [call for call in seen["calls"] if call["group"] == group and call["peer"] is not None]
    return [(call["step"] - 1, call["peer"]) for call in calls if call["name"] == name]


def assert_hops_follow_the_routes(ranks: Ranks, interval: Any) -> int:
    """Every hop, in order, is the one that the routes name. Returns how many left their replica."""
    routing = Routing(STAGED.replicas, MICROBATCHES, SEED, interval)
    left = 0
    for rank, seen in enumerate(ranks):
        at = STAGED.position(rank)
        expected = []
        for step in range(STEPS):
            routes = routing.routes(step, step // LOCAL_STEPS)
            hop = routes.next_replica if at.stage == 0 else routes.previous_replica
            for index in range(MICROBATCHES):
                replica = hop(0, at.replica, index)
                left += replica != at.replica
                expected.append((step, STAGED.rank(Position(replica, 1 - at.stage, 0, 0))))
        forward, backward = ("send", "recv") if at.stage == 0 else ("recv", "send")
        assert hop_peers(seen, forward, 0) == expected, f"activations of rank {rank}"
        assert hop_peers(seen, backward, 1) == expected, f"gradients of rank {rank}"
        assert not hop_peers(seen, forward, 1)
        assert not hop_peers(seen, backward, 0)
    return left


# "off" is in those of experts and without a method as well.
@pytest.mark.parametrize(
    ("interval", "options"),
    [
        ("microbatch", {}),
        slow("off", {}),
        slow("round", {}),
        *(slow("round", {"overlap_steps": steps}) for steps in (1, LOCAL_STEPS)),
        ("round", {"overlap_steps": "auto"}),
        slow("round", {"fragments": 3, "overlap_steps": 0}),
        ("round", {"fragments": 3, "overlap_steps": LOCAL_STEPS}),
    ],
    ids=str,
)
def test_messages_over_torch_go_to_partners_and_along_routes(
    tmp_path: Path, interval: str, options: dict[str, Any]
) -> None:
    """However late the outcome is merged, however the delay is chosen; partners of each fragment are its own."""
    ranks = over_torch(tmp_path, interval, **options)
    assert_no_collective_spans_replicas(ranks)
    assert_exchanges_go_to_partners(ranks, fragments=options.get("fragments", 1))
    assert bool(assert_hops_follow_the_routes(ranks, interval)) == (interval != "off")


@pytest.mark.parametrize(
    ("topology", "options"),
    [(Topology(replicas=4), {}), slow(STAGED, {}), slow(Topology(replicas=4), {"overlap_steps": 2})],
    ids=["4x1", "4x2", "overlap"],
)
def test_messages_over_mpi_go_to_partners_and_along_routes(
    tmp_path: Path, topology: Topology, options: dict[str, Any]
) -> None:
    """Hops are messages of torch whatever the transport; eight processes take most of a minute on two cores.

    To ask whether messages have arrived is no collective, nor is what MPI does meanwhile.
    """
    ranks = over_mpi(tmp_path, topology, **options)
    assert_no_collective_spans_replicas(ranks, topology)
    assert_exchanges_go_to_partners(ranks, topology)
    for seen in ranks:
        assert {call["library"] for call in seen["calls"] if is_exchange(call, seen["hops"])} == {"mpi"}
    if topology.pp > 1:
        assert assert_hops_follow_the_routes(ranks, "round")


def test_experts_stay_inside_a_replica(tmp_path: Path) -> None:
    """Tokens go to experts of the same replica, an expert is averaged with itself.

    Core keeps the loss that balances experts for a log of its own, which it would all-reduce.
    """
    topology = Topology(replicas=4, dp=2, ep=2)
    ranks = over_torch(tmp_path, "off", FAMILY_MODELS["mixtral"], topology)
    assert_no_collective_spans_replicas(ranks, topology)
    assert_exchanges_go_to_partners(ranks, topology)
    for rows in metrics(tmp_path):
        assert [row["train/load_balancing_loss"] >= 0.99 for row in rows] == [True] * (STEPS // 5)


def test_without_a_method_and_routes_no_message_leaves_a_replica(tmp_path: Path) -> None:
    """But for a barrier of all ranks that was planted behind the last step, which the spy records."""
    topology = Topology(replicas=2, pp=2)
    raw = config(tmp_path, topology, "off", enabled=False, transport="torch")
    ranks = run_ranks(4, spied_rank, write_config(tmp_path, raw), True)
    with pytest.raises(AssertionError, match="barrier"):
        assert_no_collective_spans_replicas(ranks, topology)
    for seen in ranks:
        assert seen["calls"].pop()["name"] == "barrier"
    assert_no_collective_spans_replicas(ranks, topology)
    for rank, seen in enumerate(ranks):
        peers = {call["peer"] for call in seen["calls"]} - {None}
        assert {topology.position(peer).replica for peer in peers} == {topology.position(rank).replica}
