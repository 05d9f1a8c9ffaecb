"""The command `plan`, and its arithmetic by hand."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
import torch

from megatron_noloco.config import load_config
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight import fit
from megatron_noloco.preflight.memory import RankParameters, fullest_stage, parameters_of_stages
from megatron_noloco.preflight.plan import lost_steps, plan_of
from megatron_noloco.preflight.schemes import Network, Scheme, exchange_bytes, scheme_of
from megatron_noloco.settings import grouping_of
from tests.harness import call_here, output_of, refusal_of
from tests.unit.configs import config
from tests.unit.fleet import average, noise
from tests.unit.golden import check

CONFIGS = Path(__file__).parents[2] / "configs"


COMMANDS = (
    "llama_1.3b --gpu A100 --bandwidth 1Gbit --latency 25ms",
    "quickstart --gpu H100 --bandwidth 1Gbit",
    # Fewer activations help only where they need more than the step of the inner optimizer.
    "llama_1.3b --gpu 4090",
    "llama_6.8b --gpu 4090",
    "federation --step 1s --bandwidth 20Mbit --latency 30ms --preemptions 6/h --notice 3s",
)


def planned(config: str | dict[str, Any], *options: str) -> str:
    """Return what `plan` shows of a config that the package has, or of another one."""
    if isinstance(config, str):
        return output_of("plan", CONFIGS / f"{config}.json", *options)
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(config))
        file.flush()
        return output_of("plan", file.name, *options)


def test_what_plan_shows() -> None:
    check("plan", ((f"plan {command}", planned(*command.split())) for command in COMMANDS))


def test_experts_are_divided_over_ranks() -> None:
    """Two ranks have half the experts each, and each the fp32 weights of as many as without."""
    experts = 2 * 8 * 3 * 4096 * 14336  # layers of a stage, experts, matrices
    raw = json.loads((CONFIGS / "llama_6.8b.json").read_text())
    raw["model"] |= {"family": "mixtral", "num_layers": 8, "hidden_size": 4096, "ffn_hidden_size": 14336}
    raw["model"] |= {"num_query_groups": 8, "num_moe_experts": 8, "moe_router_topk": 2}
    raw["parallel"] |= {"pipeline_model_parallel_size": 4, "data_parallel_size": 2}
    found = {}
    for ep in (1, 2):
        raw["parallel"] |= {"expert_model_parallel_size": ep}
        found[ep] = json.loads(planned(raw, "--gpu", "4090", "--json"))
    whole, half = (found[ep]["weights_of_rank"] for ep in (1, 2))
    assert whole["parameters"] - half["parameters"] == experts / 2
    assert whole["owned"] == half["owned"]
    raw["parallel"] |= {"expert_model_parallel_size": 1}
    shown = planned(raw, "--gpu", "4090")
    assert "parallel.data_parallel_size 2, parallel.expert_model_parallel_size 2" in shown
    assert found[1]["fits"] is ("fits 4090" in shown) is False


def test_the_json_of_plan_has_bytes_and_seconds_of_each_method() -> None:
    """8 replicas of 2 stages; pairs send each rank's weights once, most the last stage with the norm of 128."""
    options = ["--json", "--bandwidth", "8Mbit", "--step", "0.5s", "--gpus", "16"]
    plan = json.loads(planned("routing", *options))
    assert (plan["ranks"], plan["replicas"], plan["step_seconds"]) == (16, 8, 0.5)
    ways = {way["name"]: way for way in plan["ways"]}
    pairs = ways["NoLoCo in pairs, fp32"]["bytes_per_exchange"]
    assert pairs == 4 * (plan["weights_of_rank"]["owned"] + 128)
    packets = 1500 / 1448
    assert ways["NoLoCo in pairs, fp32"]["seconds_per_exchange"] == pytest.approx(packets * pairs / 1e6)
    assert ways["DiLoCo, fp32"]["bytes_per_exchange"] == pytest.approx(2 * 7 / 8 * pairs)
    assert ways["DiLoCo, int4"]["bytes_per_exchange"] < ways["DiLoCo, fp32"]["bytes_per_exchange"] / 2
    assert ways["synchronous"]["local_steps"] == 1
    # 4 microbatches of 8 samples of 128 tokens, 128 numbers of 4 bytes for each, both ways; 7/8 go to others
    assert plan["routed_bytes_per_step"] == 2 * (4 * 8 * 128) * 128 * 4 * 7 / 8
    from_both_stages_at_once = packets * plan["routed_bytes_per_step"] / 2 / 1e6
    routed = plan["routed_seconds_per_step"]
    assert routed == pytest.approx(from_both_stages_at_once)
    own = ways["this config"]
    seconds = own["seconds_per_exchange"] + own["local_steps"] * (0.5 + routed)
    assert own["share_lost"] == pytest.approx(1 - own["local_steps"] * 0.5 / seconds)


def test_what_departures_cost_with_and_without_a_notice() -> None:
    """k = 5, steps of 1 s: a notice of 3 s is enough from the second step on."""
    assert lost_steps(5, 1.0, 0.0) == (0 + 1 + 2 + 3 + 4) / 5
    assert lost_steps(5, 1.0, 3.0) == (0 + 1) / 5
    assert lost_steps(5, 1.0, 5.0) == 0
    command = ["plan", CONFIGS / "federation.json", "--step", "1s"]
    departures = ["--preemptions", "6/h", "--notice", "3s"]
    plan = json.loads(output_of(*command, *departures, "--json"))
    assert plan["without_notice"]["share_lost"] == pytest.approx(2 * 6 / 3600 / 3)
    assert plan["with_notice"]["lost_steps"] == 0.2
    vectors = 4  # fast and slow weights, two moments of AdamW
    assert plan["with_notice"]["state_bytes"] == vectors * 4 * 139_712
    for wrong in ([*command, "--notice", "3s"], [*command[:2], *departures]):
        assert refusal_of(*wrong)
    assert call_here(*command, "--preemptions", "often")[0] == 2


def test_exchanges_are_those_of_the_rank_with_most_weights() -> None:
    """Here of the second stage, though the first needs more memory, since two microbatches are under way there."""
    run = config(model__num_layers=12, model__seq_length=2048, parallel__num_layers_in_first_pipeline_stage=5)
    architecture, topology = run.architecture(257), run.topology(8)
    plan = plan_of(run, architecture, topology, Network(1e6, 0.0, 1))
    first, second = (each.owned for each in parameters_of_stages(run, architecture, topology))
    ways = {way.name: way.bytes_per_exchange for way in plan.schemes}
    assert (plan.memory.held.owned, ways["NoLoCo in pairs, fp32"]) == (first, 4 * second)
    assert first < second


def test_federation_leader_sends_all_weights() -> None:
    """Its link is shared with the leaders of other replicas on the node, not with the ranks of its own."""
    plans = []
    for stages in (1, 2):
        run = config(
            parallel={"pipeline_model_parallel_size": stages},
            federation={"rendezvous": "file:///x", "encryption": "none"},
            noloco__routing="off",
        )
        topology = run.topology(run.parallel.replica_size)
        architecture = run.architecture(257)
        plans.append(plan_of(run, architecture, topology, Network(1e6, 0.0, 2)))
    alone, staged = plans
    assert alone.schemes[0].bytes_per_exchange == staged.schemes[0].bytes_per_exchange
    assert alone.schemes[0].seconds_per_exchange > 1.9 * staged.schemes[0].seconds_per_exchange
    assert (alone.gathered_bytes > 0, staged.gathered_bytes > 0) == (False, True)
    assert not any("DiLoCo" in way.name for way in alone.schemes)


@pytest.mark.parametrize("steps", ["auto", 1])
def test_int3_where_it_permits_more_rounds(steps: str | int) -> None:
    """Which steps permit: chosen by themselves, or enough for 1 % of the time. Later rounds are in int4."""
    run = config(noloco__local_steps=steps, noloco__routing="off")
    architecture, topology = run.architecture(257), run.topology(8)
    shown = set[int]()
    for rate in np.geomspace(3e4, 3e7, 100):
        plan = plan_of(run, architecture, topology, Network(rate, 0.0, 1), step_seconds=1.0)
        fewest = {
            way.name[-4:]: way.local_steps if steps == "auto" else way.enough_steps(1.0)
            for way in plan.schemes
            if way.name in ("NoLoCo in pairs, int3", "NoLoCo in pairs, int4")
        }
        if "int3" in fewest:
            assert fewest["int3"] < fewest["int4"]
            shown.add(fewest["int3"])
    assert shown == {1, 2}


@pytest.mark.parametrize(("replicas", "members"), [(8, 0), (16, 8), (32, 16)])
def test_larger_groups_where_there_are_more_than_8_replicas(replicas: int, members: int) -> None:
    """A member sends codes, sums of twice as many bits, and receives as much."""
    options = ["--json", "--bandwidth", "8Mbit", "--step", "0.5s", "--gpus", str(2 * replicas)]
    plan = json.loads(planned("quickstart", *options))
    ways = {way["name"]: way for way in plan["ways"]}
    found = [way for name, way in ways.items() if "groups of" in name]
    assert [way["name"] for way in found] == [f"NoLoCo in groups of {members}, int4"] * bool(members)
    for way in found:
        share = way["bytes_per_exchange"] / plan["weights_of_rank"]["owned"] / (1 - 1 / members)
        assert share == pytest.approx(1.6, rel=0.05)
        assert way["bytes_per_exchange"] < ways["DiLoCo, int4"]["bytes_per_exchange"]


def test_the_bytes_between_sites() -> None:
    """8 replicas at each of two sites; without sites 8 of the 15 others of a replica are at the other one."""
    config = json.loads((CONFIGS / "quickstart.json").read_text())
    config["noloco"] |= {"sites": 2, "site_interval": 5}
    plan = json.loads(planned(config, "--json", "--bandwidth", "8Mbit", "--gpus", "32"))
    ways = {way["name"]: way for way in plan["ways"]}
    of_site = {name: 16 * way["bytes_per_exchange"] for name, way in ways.items()}  # of 8 x 2 ranks
    shares = {name: way["bytes_across"] / of_site[name] for name, way in ways.items() if way["bytes_across"]}
    assert shares.pop("this config") == pytest.approx(1 / 5)
    assert shares == pytest.approx(dict.fromkeys(ways.keys() - {"this config", "synchronous"}, 8 / 15))


_FULL = {"recompute_granularity": "full"}


@pytest.mark.parametrize(
    ("recomputation", "gigabytes"),
    [
        ({}, 0.89),
        (_FULL | {"recompute_method": "uniform", "recompute_num_layers": 1}, 0.17),
        (_FULL | {"recompute_method": "uniform", "recompute_num_layers": 12}, 0.89),
        (_FULL | {"recompute_method": "block", "recompute_num_layers": 1}, 0.82),
        (_FULL | {"recompute_method": "block", "recompute_num_layers": 12}, 0.17),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 0.43),
        ({"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}, 0.89),
    ],
    ids=str,
)
def test_the_memory_of_activations(recomputation: dict[str, Any], gigabytes: float) -> None:
    """As measured on a CPU: a unit of all layers saves nothing, a block of one layer a twelfth."""
    size = {"num_layers": 12, "hidden_size": 128, "ffn_hidden_size": 512, "seq_length": 128}
    run = config(
        model={"num_attention_heads": 4, **size, **recomputation},
        parallel={"replicas": 1},
        noloco={"local_steps": 1},
        train_micro_batch_size_per_gpu=32,
    )
    memory = fullest_stage(run, run.architecture(257), run.topology(1))
    assert memory.device_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)


@pytest.mark.parametrize(
    ("optimizer", "vectors"),
    [({"type": "AdamW"}, 2), ({"type": "SGD"}, 0), ({"type": "SGD", "params": {"momentum": 0.9}}, 1)],
    ids=str,
)
def test_the_memory_of_an_optimizer(optimizer: dict[str, Any], vectors: int) -> None:
    run = config(optimizer=optimizer)
    memory = fullest_stage(run, run.architecture(257), run.topology(8))
    assert memory.device["inner optimizer"] == vectors * 4 * memory.held.owned


def test_memory_that_is_short_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 ranks, each with what `plan` says and the libraries; beside a GPU, copies for a checkpoint instead."""
    path = CONFIGS / "quickstart.json"
    run = load_config(path)
    architecture, topology = run.architecture(257), run.topology(8)
    planned = fullest_stage(run, architecture, topology)
    enough = 8 * (planned.device_bytes + planned.host_bytes + fit.LIBRARIES_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fit, "available_bytes", lambda: enough)
    assert fit.shortage_of_all(run, architecture, topology) is None
    monkeypatch.setattr(fit, "available_bytes", lambda: enough - 1)
    gb = f"{enough / 1e9:.1f} GB"
    line = f"memory for 8 ranks on this host: about {gb} needed, {gb} available; the kernel may kill a rank"
    assert (fit.shortage_of_all(run, architecture, topology) or "").startswith(line)
    assert fit.shortage(run, architecture, topology, 8, started=True) is None, "the libraries are there"
    assert f"\nall on this machine: {line}" in output_of("config", "--check", path)

    on_host = planned.host_bytes + planned.saved_bytes + fit.LIBRARIES_BYTES
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * planned.gpu_bytes - 1, 0))
    monkeypatch.setattr(fit, "available_bytes", lambda: 2 * on_host)
    assert fit.shortage(run, architecture, topology, 2) is None
    assert "memory for 2 ranks on a GPU: " in (fit.shortage(run, architecture, topology, 2, 2) or "")
    assert "memory for 3 ranks on this host: " in (fit.shortage(run, architecture, topology, 3) or "")


def test_the_limit_of_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the group itself, or of one around it; files that the system can drop are not in use."""
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    inner = tmp_path / "job" / own
    inner.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(fit, "_CGROUPS", tmp_path / "job")
    assert fit.available_bytes() > 1000
    for name, text in (("max", "3000"), ("current", "2500"), ("stat", "anon 2000\ninactive_file 500\n")):
        (tmp_path / "job" / f"memory.{name}").write_text(text)
    assert fit.available_bytes() == 1000
    (tmp_path / "job" / "memory.max").write_text("max\n")
    assert fit.available_bytes() > 1000


def test_the_seconds_of_an_exchange() -> None:
    """1 MB of packets by each of two ranks of a node, at 1 MB/s, two messages one after the other."""
    payload = 1e6 * 1448 / 1500
    near = Network(bytes_per_second=1e6, latency=0.001, ranks_per_node=2)
    behind = 2 * 2 * 0.001  # two round trips in which acknowledgements wait behind data
    assert near.seconds(payload, trips=2) == pytest.approx(2 + behind + 2 * 0.001), (
        "one window fills the link"
    )
    far = replace(near, latency=0.05)
    windows = [14_480, 28_960]  # that leave a link of 0.5 MB/s idle in a round trip of 0.1 s
    slow_start = sum(0.1 - window / 0.5e6 for window in windows)
    behind = 2 * 0.1
    assert far.seconds(payload, trips=2) == pytest.approx(2 + slow_start + behind + 2 * 0.05)
    at_once = pytest.approx(2 + behind + 2 * 0.05)
    assert far.seconds(payload, trips=2, partners=4) == at_once, "windows of four"
    halved = pytest.approx(2 + 0.05 + behind + 2 * 0.05)
    assert far.seconds(payload, trips=2, pause=0.3) == halved, "half of the window that filled the link"
    little = 10_000 * 1500 / 1448 / 0.5e6
    assert far.seconds(10_000, trips=1) == pytest.approx(1.25 * little + 0.05), "less than a window"


def test_the_share_of_time_that_exchanges_cost() -> None:
    """An exchange of 2.5 s after 10 local steps: 2.5 s of 10 + 2.5."""
    waits = Scheme("", 1_000_000, 2.5, local_steps=10)
    assert waits.share_lost(step_seconds=1) == 0.2
    assert Scheme("", 0, 2.5, waits.enough_steps(1)).share_lost(1) <= 0.01
    assert Scheme("", 0, 2.5, waits.enough_steps(1) - 1).share_lost(1) > 0.01
    overlaps = Scheme("", 1_000_000, 2.5, local_steps=10, hidden_steps=10, chooses_overlap=True)
    assert (overlaps.share_lost(1), overlaps.enough_steps(1)) == (0, 3)
    delayed = Scheme(
        "", 1_000_000, 2.5, local_steps=10, hidden_steps=1
    )  # 1.5 s are not hidden, whatever k is
    enough = delayed.enough_steps(1)
    assert replace(delayed, local_steps=enough).share_lost(1) <= 0.01
    assert replace(delayed, local_steps=enough - 1).share_lost(1) > 0.01
    assert replace(delayed, hidden_steps=5).enough_steps(1) == 5, "a delay is at most local_steps"


def test_the_exchange_of_each_fragment_is_hidden_by_itself() -> None:
    """An exchange of 4 s in 8 local steps of 1 s, each merged a step after it began; messages take 0.1 s each."""
    held = RankParameters(0, 10**6, 10**6, 0, 0)
    network = Network(1e6 * 1500 / 1448, 0.1, 1)

    def of(fragments: int) -> Scheme:
        block = TrainerSettings(local_steps=8, overlap_steps=1, fragments=fragments, payload="fp32")
        return scheme_of("", block, held, Topology(2), network)

    whole, quarters = of(1), of(4)
    assert quarters.bytes_per_exchange == whole.bytes_per_exchange
    assert quarters.seconds_per_exchange > whole.seconds_per_exchange + 3 * 2 * 0.1
    assert (whole.hidden_steps, quarters.hidden_steps, of(8).hidden_steps) == (1, 4, 8)
    assert quarters.share_lost(1.0) < whole.share_lost(1.0)


def test_plan_shows_the_local_steps_that_auto_would_choose() -> None:
    """The fewest with which an exchange, as it is with a round every step, takes at most a tenth of the time."""
    raw = json.loads((CONFIGS / "quickstart.json").read_text())

    def of(local_steps: Any, *options: str) -> str:
        return planned(raw | {"noloco": {"local_steps": local_steps}}, "--bandwidth", "10Mbit", *options)

    ways = [json.loads(of(steps, "--json", "--step", "50ms"))["ways"][0] for steps in (1, "auto")]
    assert ways[1]["local_steps"] == -(-ways[0]["seconds_per_exchange"] * 9 // 0.05) > 1
    longest = json.loads(of("auto", "--json", "--step", "1us"))["ways"][0]
    assert longest["local_steps"] == raw["training"]["train_iters"]
    assert "--step or --gpu shows what a run would choose" in of("auto")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--gpu", "A100"], "2 ranks share a node's link"),  # a replica has 2 ranks
        (["--gpu", "A100", "--gpus", "16"], "8 ranks share a node's link"),
        (["--gpu", "A100", "--gpus-per-node", "4"], "4 ranks share a node's link"),
        (["--gpus", "2"], "nothing is exchanged: there is one replica"),
    ],
)
def test_how_many_gpus_share_a_link(options: list[str], shown: str) -> None:
    """A job of 8 GPUs that exchanges over a link is not on one node."""
    assert shown in planned("quickstart", "--bandwidth", "1Gbit", *options)


@pytest.mark.parametrize(
    ("place", "listen", "counts"),
    [("s3://b/run", "off", True), ("s3://b/run", None, False), ("tcp://first:29600", "off", False)],
)
def test_requests_of_a_round_without_ports(place: str, listen: str | None, counts: bool) -> None:
    raw = json.loads((CONFIGS / "internet.json").read_text())  # a million weights
    raw["federation"] |= {"rendezvous": place, "listen": listen}
    line = "a round through s3://b/run has about 8 writes, 10 reads, and up to 10 lists a second"
    assert (line in planned(raw)) == counts


@pytest.mark.parametrize(("size", "halved"), [(4, True), (3, False), (1, False)])
def test_a_change_that_saves_keeps_the_batch(size: int, halved: bool) -> None:
    """Half of an odd micro batch, with twice the accumulation, would be another one."""
    run = config(train_micro_batch_size_per_gpu=size, model__seq_length=4096)
    architecture, topology = run.architecture(257), run.topology(8)
    changes = [change for change, *_ in fit.changes_that_save(run, architecture, topology)]
    assert any(change.startswith("train_micro_batch_size_per_gpu") for change in changes) == halved


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "Voodoo"], "--gpu Voodoo: not known; known are H100 PCIe"),
        (["--latency", "25ms"], "--latency: give --bandwidth as well"),
    ],
)
def test_a_wrong_option_of_plan_is_one_line(arguments: list[str], problem: str) -> None:
    code, out, err = call_here("plan", CONFIGS / "quickstart.json", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert problem in err


@pytest.mark.parametrize(
    "method",
    [
        {"method": "diloco", "payload": "fp32"},
        {"method": "diloco", "payload": "int4"},
        {"group_size": 4, "pairing": "random", "payload": "int4"},
        {"group_size": 8, "pairing": "cycle", "payload": "int8"},
    ],
    ids=str,
)
def test_the_bytes_of_larger_groups_and_cycles(method: dict[str, Any]) -> None:
    """To the byte, where nothing is sent again: differences of 0 fit any code."""
    settings, elements, replicas = TrainerSettings(**method), 48 * BLOCK, 8
    group = grouping_of(settings, replicas, seed=0).group(0, 0)
    _, exchanges = average(noise(elements, seed=1).expand(replicas, -1), group, settings.payload_bits)
    assert not any(exchange.report.resent_elements for exchange in exchanges)
    held = RankParameters(0, elements, elements, 0, 0)
    assert len(group) == settings.among(replicas).sizes[0]
    planned = exchange_bytes(settings, held, len(group), dp=1)
    assert {exchange.report.bytes_sent for exchange in exchanges} == {planned}


@pytest.mark.parametrize("payload", ["fp32", "int8"])
def test_a_device_that_keeps_slow_weights_keeps_c_as_well(payload: str) -> None:
    """The snapshot lies beside slow weights and momentum. Codes are made where the combined vector lies."""
    apart = {"federation": {"rendezvous": "file:///x", "encryption": "none"}}
    found = []
    for changes in ({}, {"noloco__slow_weights": "device"}, {"noloco__slow_weights": "device", **apart}):
        method = {"noloco__overlap_steps": 1, "noloco__payload": payload, "noloco__routing": "off"}
        replicas = {} if "federation" in changes else {"replicas": 2}
        run = config(parallel=replicas, **method, **changes)
        architecture, topology = run.architecture(257), run.topology(len(replicas) + 1)
        plan = plan_of(run, architecture, topology)
        kept = {"slow weights and outer momentum", "rounds"}
        there = (
            sum(size for part, size in plan.memory.device.items() if part in kept) / plan.memory.held.owned
        )
        found.append((round(there, 3), plan.bus_bytes[0] / plan.memory.held.owned, plan.round_core_seconds))
    host, device, federation = found
    assert (host[0], federation[0]) == (0, 12)
    if payload == "fp32":
        assert device == (12, 4, host[2])
    else:
        assert device[:2] == (20, pytest.approx(1.04, rel=0.01)), (
            "and means, of a vector this short for all of it"
        )
        assert device[2] < host[2] / 10
    assert host[1] == federation[1] == 4
