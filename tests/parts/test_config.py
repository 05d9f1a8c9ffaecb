"""What a configuration stands for: batch numbers, precision, topology, architecture, what DeepSpeed is given."""

import copy
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from megatron_noloco.config import RunConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.deepspeed_block import DeepSpeedConfig, ZeroConfig
from megatron_noloco.config.optimizer_block import OPTIMIZERS
from megatron_noloco.config.run_config import BLOCKS
from megatron_noloco.data.sources import IndexedSource, Split, TextSource
from megatron_noloco.data.tokenizer import ByteTokenizer, TokenizerChoice
from megatron_noloco.errors import UserError
from megatron_noloco.fields import Settings
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.plans.topology import Place, Topology
from megatron_noloco.training import prepare
from tests.kit.configs import FEDERATION, GOOD, MISSING, SMALLEST, config, edited
from tests.kit.ranks import call_here

COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}


def test_texts_blends_and_paths_of_each_split_are_read() -> None:
    assert config().data.source == TextSource("python-stdlib", Split(0.949, 0.05, 0.001))
    assert config(data__split="3,1").data.source == TextSource("python-stdlib", Split(0.75, 0.25, 0.0))
    blend = (("a", 0.25), ("b", 0.75))
    indexed = config(data={"data_path": ["0.3", "a", 0.9, "b"], "split": "1,1"})
    assert indexed.data.source == IndexedSource(blend, None, Split(0.5, 0.5, 0.0))
    whole = {"train_data_path": "a", "valid_data_path": ["a"]}
    single = (("a", 1.0),)
    assert config(data=whole).data.source == IndexedSource(single, single, None)


def test_a_tilde_is_the_home_folder_in_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    paths = {
        "training": ("output_dir", "pretrained"),
        "checkpoint": ("load",),
        "federation": ("key_file",),
        "data": ("text", "data_path", "train_data_path", "sft_data_path"),
    }
    for block, names in paths.items():
        for name in names:
            given = {name: "~/a"} | ({"train_iters": 1} if block == "training" else {})
            assert getattr(BLOCKS[block](**given), name) == "/home/me/a"
    assert DataConfig(train_data_path="b", valid_data_path="~/a").valid_data_path == "/home/me/a"
    assert DataConfig(text="b", tokenizer_model="~/a").tokenizer_model == "/home/me/a"
    blend = DataConfig(data_path=["0.3", "~/a", 0.7, "b~"])
    assert blend.data_path == ["0.3", "/home/me/a", 0.7, "b~"]


def test_the_tokenizer_is_bytes_or_that_of_a_folder() -> None:
    assert config().data.tokenizer == TokenizerChoice()
    choice = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "folder"}
    for given in (choice, {"tokenizer_model": "folder"}):
        found = config(data={"text": "t", **given})
        assert found.data.tokenizer == TokenizerChoice("folder")
        assert found.to_dict()["data"]["tokenizer_type"] == "HuggingFaceTokenizer", "as a checkpoint says it"


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ((4, 2, None), (4, 2, 24)),
        ((4, None, 24), (4, 2, 24)),
        ((None, 2, 24), (4, 2, 24)),
        ((4, None, None), (4, 1, 12)),
        ((None, None, 24), (8, 1, 24)),
        ((4, "auto", 24), (4, 2, 24)),
        ((4, 2, 24), (4, 2, 24)),
    ],
)
def test_two_numbers_of_a_batch_give_the_third(given: tuple[Any, ...], numbers: tuple[int, ...]) -> None:
    """With 3 data-parallel ranks."""
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    raw = edited({"parallel.data_parallel_size": 3, names[0]: MISSING, names[1]: MISSING})
    raw |= {name: number for name, number in zip(names, given, strict=True) if number}
    run = RunConfig(**raw)
    assert (run.micro_batch_size, run.microbatches, run.replica_batch) == numbers
    assert tuple(run.as_deepspeed()[name] for name in names) == numbers


def test_every_auto_is_resolved() -> None:
    run = config(
        gradient_clipping="auto",
        fp16={"enabled": False, "loss_scale": "auto"},
        zero_optimization={"stage": "auto", "reduce_bucket_size": "auto"},
        scheduler={"type": "WarmupCosineLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}},
    )
    assert "auto" not in json.dumps(run.as_deepspeed())
    assert run.as_deepspeed()["gradient_clipping"] == 1.0
    assert run.as_deepspeed()["zero_optimization"] == ZeroConfig().model_dump()
    assert run.as_deepspeed()["scheduler"]["params"]["total_num_steps"] == 10
    assert run.precision == "fp32"


def test_deepspeed_is_given_every_default() -> None:
    """Or the default that a person reads would not be the value that runs: its own clips gradients at 1."""
    given = RunConfig(**SMALLEST).as_deepspeed()
    for name, one in DeepSpeedConfig.model_fields.items():
        default = one.get_default()
        if name not in SMALLEST and default not in (None, PydanticUndefined):
            if isinstance(default, Settings):
                assert given[name].items() >= default.model_dump(exclude_none=True).items()
            else:
                assert given[name] == default
    assert (given["gradient_clipping"], given["data_types"]) == (0.0, {"grad_accum_dtype": "fp32"})


def test_auto_beside_a_recipe_stays() -> None:
    """The recipe "paper" would choose 50 local steps."""
    run = RunConfig(**edited({"noloco": {"recipe": "paper", "local_steps": "auto"}}))
    chosen = run.noloco.local_steps, run.noloco.most_waiting
    assert chosen[0] == 1
    for again in (run.replace(noloco=run.noloco.replace()), RunConfig(**run.given())):
        assert (again.noloco.local_steps, again.noloco.most_waiting) == chosen


@pytest.mark.parametrize(
    ("noloco", "steps"), [({}, 1), ({"recipe": "paper"}, 50), ({"local_steps": "auto", "fragments": 3}, 3)]
)
def test_what_a_file_leaves_out_stays_left_out(noloco: dict[str, Any], steps: int) -> None:
    """Also where a recipe or another field gives the value, which the written file then decides again."""
    data = {"text": "a", "tokenizer_model": "b"}
    run = RunConfig(**SMALLEST | {"noloco": noloco, "data": data, "training": {"train_iters": 50}})
    written = {name: value for name, value in noloco.items() if value != "auto"}
    for again in (run, run.replace(noloco=run.noloco.replace()), RunConfig(**run.given())):
        assert (again.given()["noloco"], again.given()["data"]) == (written, data)
        assert again == run
        assert (again.noloco.local_steps, again.data.tokenizer_type) == (steps, "HuggingFaceTokenizer")


def test_deepspeed_s_own_spellings_pass() -> None:
    """Whole numbers as its users write them; names of its optimizers in any case; null."""
    run = config(
        zero_optimization={"reduce_bucket_size": 5e8},
        fp16={"enabled": True, "loss_scale": 128},
        optimizer={"type": "adamw", "params": {"lr": 1}},
        scheduler=None,
    )
    assert run.optimizer.type == "AdamW"
    assert run.as_deepspeed()["zero_optimization"]["reduce_bucket_size"] == 5e8
    assert run.as_deepspeed()["fp16"]["loss_scale"] == 128
    assert "scheduler" not in run.as_deepspeed()


@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 1}, {}, True, False])
def test_zero_0_is_run_as_1(zero: Any) -> None:
    assert config(zero_optimization=zero).as_deepspeed()["zero_optimization"]["stage"] == 1


def test_zero_2_divides_gradients() -> None:
    assert config(zero_optimization__stage=2, parallel__pipeline_model_parallel_size=1).zero_stage == 2


def test_the_precision_is_that_of_the_enabled_block() -> None:
    assert config(bf16__enabled=True).precision == "bf16"
    assert config(bfloat16__enabled=True).precision == "bf16"
    assert config(fp16={"enabled": True, "loss_scale": 128}).precision == "fp16"
    assert config(fp16__enabled=True, noloco__routing="off").precision == "fp16"
    assert config(fp16__enabled=True, parallel__replicas=1).precision == "fp16"
    assert config().precision == "fp32"


def test_tensorboard_wandb_and_checkpoint_are_ours_alone() -> None:
    run = config(tensorboard={"enabled": False}, wandb={"enabled": True}, checkpoint={"save_interval": 5})
    assert not run.tensorboard.enabled
    assert config().tensorboard.enabled
    assert not {"tensorboard", "wandb", "checkpoint"} & run.as_deepspeed().keys()


def test_wandb_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^wandb.enabled: the package wandb is not installed; pip install"):
        prepare.check_start(config(wandb={"enabled": True}))
    prepare.check_start(config(wandb={"enabled": False}))


def test_topology_follows_block_parallel_and_ranks() -> None:
    assert config().topology(8) == Topology(replicas=4, pp=2)
    auto = config(parallel__replicas="auto", parallel__data_parallel_size=3)
    assert auto.topology(12) == Topology(replicas=2, pp=2, dp=3)
    assert auto.topology(6) == Topology(replicas=1, pp=2, dp=3)
    sizes = dict.fromkeys(("pipeline", "virtual_pipeline", "tensor"), 2)
    parallel = {f"{name}_model_parallel_size": size for name, size in sizes.items()}
    whole = config(parallel=parallel | {"sequence_parallel": True})
    assert whole.topology(8) == Topology(replicas=2, pp=2, tp=2, vpp=2, sequence_parallel=True)
    assert (whole.world_size, config().world_size) == (None, 8)


def test_routing_needs_several_replicas_and_stages() -> None:
    assert config().routing(Topology(4, 2)).active
    assert not config().routing(Topology(1, 2)).active
    assert not config(parallel__pipeline_model_parallel_size=1).routing(Topology(4, 1)).active
    assert not config(noloco__routing="off").routing(Topology(4, 2)).active


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    def sizes(run: RunConfig, tokenizer_vocab: int = 0) -> tuple[int, int]:
        architecture = run.architecture(tokenizer_vocab)
        return architecture.vocab_size, architecture.padded_vocab_size

    assert sizes(config(), 257) == (257, 384)
    assert sizes(config(model__vocab_size=1000)) == (1000, 1024)
    assert sizes(config(model__vocab_size=1000, parallel__tensor_model_parallel_size=2), 300) == (1000, 1024)


def test_the_architecture_and_how_it_is_computed() -> None:
    run = config(
        model__untie_embeddings_and_output_weights=False,
        model__num_query_groups=2,
        model__hidden_dropout=0.1,
        bf16__enabled=True,
    )
    assert run.architecture(257) == Architecture(
        family="llama",
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        seq_length=32,
        vocab_size=257,
        padded_vocab_size=384,
        rotary_base=10000.0,
        norm_epsilon=1e-5,
        tied_embeddings=True,
        init_method_std=0.02,
    )
    assert config().architecture(257).num_query_groups == 4
    assert run.compute == Compute(precision="bf16", hidden_dropout=0.1)
    assert config(data={"text": "a", "reset_attention_mask": True}).compute == Compute(
        separate_documents=True
    )


def test_a_config_is_frozen_and_reads_itself_back() -> None:
    run = config(scheduler=COSINE, train_batch_size="auto")
    with pytest.raises(ValidationError, match="frozen"):
        run.data = run.data
    with pytest.raises(ValidationError, match="frozen"):
        run.training.seed = 1
    assert RunConfig(**json.loads(json.dumps(run.to_dict()))).to_dict() == run.to_dict()


def test_auto_local_steps_begin_with_one() -> None:
    found = RunConfig(**edited({"noloco.local_steps": "auto", "noloco.routing": "off"}))
    assert (found.noloco.local_steps, found.noloco.most_waiting) == (1, 0.1)
    assert RunConfig(**found.to_dict()).to_dict() == found.to_dict()


def test_the_user_s_dict_is_left_alone() -> None:
    raw = edited({"gradient_clipping": "auto", "zero_optimization.stage": 0, "bfloat16.enabled": False})
    before = copy.deepcopy(raw)
    RunConfig(**raw)
    assert raw == before


def test_family_fields_come_from_file_or_family() -> None:
    found = config(model__family="mixtral", model__moe_router_topk=3, model__sliding_window=16)
    architecture = found.architecture(257)
    assert (architecture.num_moe_experts, architecture.moe_router_topk) == (8, 3)
    assert (architecture.sliding_window, architecture.rope_scaling_factor) == (16, None)
    compute = found.compute
    assert (compute.moe_router_load_balancing_type, compute.moe_aux_loss_coeff) == ("aux_loss", 0.01)
    assert RunConfig(**json.loads(json.dumps(found.to_dict()))).to_dict() == found.to_dict()
    assert config().compute.moe_router_load_balancing_type is None


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_decays_by_default(name: str) -> None:
    run = config(optimizer={"type": name, "params": {"lr": 0.01}})
    assert run.as_deepspeed()["optimizer"]["params"]["weight_decay"] == 0.0


def test_muon_is_completed_by_deepspeeds_defaults() -> None:
    rest = {"momentum": 0.95, "ns_method": "gram", "betas": [0.9, 0.95], "eps": 1e-10, "weight_decay": 0.0}
    for given, rates in (
        ({}, {"muon_lr": 0.02, "adam_lr": 3e-4}),
        ({"lr": 0.01}, {"muon_lr": 0.01, "adam_lr": 0.01}),
        ({"lr": 0.01, "adam_lr": 0.001}, {"muon_lr": 0.01, "adam_lr": 0.001}),
    ):
        muon = config(optimizer={"type": "Muon", "params": given}).as_deepspeed()["optimizer"]
        assert muon["params"] == rates | rest
    one_rate = {"type": "Muon", "params": {"lr": 0.01}}
    warm_up = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01}}
    assert config(optimizer=one_rate, scheduler=warm_up).as_deepspeed()["zero_allow_untested_optimizer"]


def test_betas_are_given_to_torch_as_floats() -> None:
    """It refuses an integer beside a float."""
    adam = config(optimizer={"type": "AdamW", "params": {"betas": [0, 0.95]}}).as_deepspeed()["optimizer"]
    assert list(map(type, adam["params"]["betas"])) == [float, float]


def test_a_job_of_a_federation_is_one_replica() -> None:
    run = RunConfig(**edited(FEDERATION))
    topology = run.topology(2, slot=3)
    assert topology == Topology(pp=2, slot=3, separate_jobs=True)
    assert [topology.position(rank).replica for rank in range(2)] == [3, 3]
    assert topology.place(1) == Place(replica=3, replicas=None, rank=7, ranks_per_replica=2)
    assert topology.total_replicas is None


def test_config_check_says_what_the_run_is_or_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, path = ["config", "--check", tmp_path / "run.json"], tmp_path / "run.json"
    path.write_text(json.dumps(GOOD))
    monkeypatch.setattr(prepare, "check_start", lambda run: (ByteTokenizer(), run.architecture(257)))
    code, out, _ = call_here(*check, "--world-size", "8")
    assert code == 0
    assert out.startswith(f"{path}: ok\nparallel: 4 replicas x pipeline 2 x data 1 x tensor 1 = 8 ranks\n")
    path.write_text(json.dumps(edited({"parallel.replicas": "auto"})))
    code, out, err = call_here(*check)
    assert (code, err) == (0, "")
    assert out.startswith(f"{path}: ok\nparallel: 2 replicas x pipeline 2 x data 1 x tensor 1 = 4 ranks\n")
    said = 'parallel.replicas is "auto": this is for 2 replicas; --world-size N is for N ranks'
    assert out.endswith(f"\n{said}\n")
    path.write_text(json.dumps(GOOD))
    monkeypatch.setattr(prepare, "check_start", Mock(side_effect=UserError("no data\nno folder")))
    code, out, err = call_here(*check)
    assert (code, err) == (2, f"{path}: no data\n{path}: no folder\n")
    assert out.startswith("parallel: 4 replicas"), "what the file says is still worth knowing"
