"""The command `plan`, and its arithmetic by hand."""

import json
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatron_noloco.config import RunConfig
from megatron_noloco.config.noloco_block import TrainerSettings
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import table_of
from megatron_noloco.model.stage import build_stage
from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.pipeline import cpu
from megatron_noloco.pipeline.groups import build_groups
from megatron_noloco.plans.topology import Topology
from megatron_noloco.preflight.memory import (
    RankParameters,
    activation_bytes,
    fullest_stage,
    memory_of,
    parameters_of_stages,
)
from megatron_noloco.preflight.plan import plan_of
from megatron_noloco.preflight.schemes import Network, Scheme, exchange_bytes, scheme_of
from megatron_noloco.settings import grouping_of
from tests.kit.architectures import SMALL
from tests.kit.configs import config, edited
from tests.kit.fleet import average, noise
from tests.kit.golden import check
from tests.kit.ranks import output_of, run_ranks

CONFIGS = Path(__file__).parents[2] / "configs"


COMMANDS = (
    "llama_1.3b --gpu A100 --bandwidth 1Gbit --latency 25ms --gpus-per-node 8",
    "quickstart --gpu H100 --bandwidth 1Gbit --gpus 8",
    "quickstart --gpu-memory 24 --gpus 2 --bandwidth 1Gbit",
    # The step of the inner optimizer needs more than activations.
    "llama_6.8b --gpu 4090 --gpu-memory 48GB",
    "federation --step 1s --bandwidth 20Mbit --latency 30ms",
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
    assert (found[1]["fits"], found[2]["fits"]) == (False, False)


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
    assert ways["synchronous"]["local_steps"] == 1
    # 4 microbatches of 8 samples of 128 tokens, 128 numbers of 4 bytes for each, both ways; 7/8 go to others
    routing = ways["routing, beside rounds"]
    assert routing["bytes_per_exchange"] == 2 * (4 * 8 * 128) * 128 * 4 * 7 / 8 / 2, "of each of two stages"
    routed = routing["seconds_per_exchange"]
    assert routed == pytest.approx(packets * routing["bytes_per_exchange"] / 1e6)
    assert routing["share_lost"] == pytest.approx(routed / (routed + 0.5))


def test_replicas_auto_have_the_plan_of_the_fewest() -> None:
    """The fewest that the method can have: a pair, or a whole group. The last line says so."""
    raw = json.loads((CONFIGS / "quickstart.json").read_text())
    link = ("--bandwidth", "100Mbit", "--latency", "30ms", "--step", "0.5s")
    for method, fewest in (({}, 2), ({"group_size": 3}, 3), ({"sites": 3}, 3)):
        method = raw | {"noloco": method}
        shown = {
            replicas: planned(method | {"parallel": {"replicas": replicas}}, *link)
            for replicas in ("auto", fewest)
        }
        said = f'parallel.replicas is "auto": this is for {fewest} replicas; --gpus N plans for N ranks\n'
        assert shown["auto"] == f"{shown[fewest]}\n{said}"


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
            federation={"rendezvous": "file:///x", "key_file": "key"},
            noloco__routing="off",
        )
        topology = run.topology(run.parallel.replica_size)
        architecture = run.architecture(257)
        plans.append(plan_of(run, architecture, topology, Network(1e6, 0.0, 2)))
    alone, staged = plans
    assert alone.schemes[0].bytes_per_exchange == staged.schemes[0].bytes_per_exchange
    assert alone.schemes[0].seconds_per_exchange > 1.9 * staged.schemes[0].seconds_per_exchange
    assert not any("DiLoCo" in way.name for way in alone.schemes)
    whole = 4 * table_of(run.architecture(257)).parameter_count
    synchronous = [(plan.schemes[-1].name, plan.schemes[-1].bytes_per_exchange) for plan in plans]
    assert synchronous == [("synchronous", whole)] * 2


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
    assert memory.device["optimizer"] == (1 + vectors) * 4 * memory.held.owned


def saved(rank: int, world_size: int, architecture: Architecture) -> int:
    """Bytes that torch keeps of two samples from forward to backward, but for weights."""
    cpu.prepare()
    groups = build_groups(Topology(), False, architecture.tied_embeddings)
    compute = Compute(moe_router_load_balancing_type="none" if architecture.num_moe_experts else None)
    chunk = build_stage(architecture, compute, groups, seed=1).chunks[0]
    weights = {weight.untyped_storage().data_ptr() for weight in chunk.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.arange(architecture.seq_length).expand(2, -1)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        chunk(tokens, None, None, labels=tokens)
    return sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - weights)


@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), ("starcoder2", {}), ("mixtral", {"num_moe_experts": 4, "moe_router_topk": 2})],
)
def test_a_layer_keeps_the_activations_that_are_computed(family: str, more: dict[str, int]) -> None:
    """What a second layer keeps beside the first; numbers for each token, such as of a norm, are not counted."""
    size = {"hidden_size": 192, "ffn_hidden_size": 320, "num_attention_heads": 8, "kv_channels": 16}
    size |= {"num_query_groups": 2, "seq_length": 64, "vocab_size": 64, "padded_vocab_size": 64}
    architecture = replace(SMALL, family=family, **size, **more)
    one, two = (run_ranks(1, saved, replace(architecture, num_layers=layers))[0] for layers in (1, 2))
    assert activation_bytes(architecture, "fp32", 1) == pytest.approx((two - one) / (2 * 64), rel=0.03)


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
    ("place", "listen", "counts"),
    [("s3://b/run", "off", True), ("s3://b/run", None, False), ("tcp://first:29600", "off", False)],
)
def test_requests_of_a_round_without_ports(place: str, listen: str | None, counts: bool) -> None:
    raw = json.loads((CONFIGS / "internet.json").read_text())  # a million weights
    raw["federation"] |= {"rendezvous": place, "listen": listen}
    line = "a round through s3://b/run has about 6 writes, 5 reads, and up to 5 lists a second"
    assert (line in planned(raw)) == counts


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
    apart = {"federation": {"rendezvous": "file:///x", "key_file": "key"}}
    found = []
    for changes in ({}, {"noloco__slow_weights": "device"}, {"noloco__slow_weights": "device", **apart}):
        method = {"noloco__overlap_steps": 1, "noloco__payload": payload, "noloco__routing": "off"}
        replicas = {} if "federation" in changes else {"replicas": 2}
        run = config(parallel=replicas, **method, **changes)
        memory = fullest_stage(run, run.architecture(257), run.topology(len(replicas) + 1))
        found.append(memory.device["outer state"] / memory.held.owned)
    assert found == [0, 16 if payload == "int8" else 12, 12]


def test_a_run_fits_if_the_stage_that_needs_most_of_a_gpu_does() -> None:
    """Another may need more together with its outer state, which is in the memory of the host."""
    changes = {
        "train_micro_batch_size_per_gpu": 2,
        "model.num_layers": 15,
        "model.num_attention_heads": 16,
        "model.vocab_size": 128_256,
        "data.tokenizer_model": "a-tokenizer",
        "model.hidden_size": 2048,
        "model.ffn_hidden_size": 5504,
        "model.seq_length": 2048,
        "gradient_accumulation_steps": 8,
        "parallel.pipeline_model_parallel_size": 8,
        "parallel.num_layers_in_first_pipeline_stage": 1,
    }
    run = RunConfig(**edited(changes))
    architecture, topology = run.architecture(), run.topology(32)
    stages = parameters_of_stages(run, architecture, topology)
    of_gpu = [memory_of(run, architecture, topology, held) for held in stages]
    assert fullest_stage(run, architecture, topology).device_bytes == max(one.device_bytes for one in of_gpu)
    with_host = max(of_gpu, key=lambda one: one.device_bytes + one.host)
    assert with_host.device_bytes < max(one.device_bytes for one in of_gpu), (
        "this config shows the difference"
    )
