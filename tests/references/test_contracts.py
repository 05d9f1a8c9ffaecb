"""What we rely on in Megatron-core and DeepSpeed beyond their documented interfaces; an upgrade may move it.

Each test names the room of ours that has to be looked at.
"""

import dataclasses
import inspect
import os
import subprocess
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported

import pytest
import torch
from deepspeed.accelerator import cuda_accelerator
from deepspeed.comm.torch import build_shm_op
from deepspeed.moe.utils import is_moe_param
from deepspeed.ops.adam import FusedAdam
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
from deepspeed.runtime import constants, lr_schedules, precision_config
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.lr_schedules import WarmupCosineLR
from deepspeed.runtime.zero import config as zero_config
from deepspeed.runtime.zero.muon import original_muon
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rotary_pos_embedding, yarn_rotary_pos_embedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import layers, mappings, random
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import get_sliding_window_causal_mask
from pydantic import BaseModel
from transformers import TrainingArguments

from megatron_noloco.config import RunConfig
from megatron_noloco.config.blocks import CheckpointConfig
from megatron_noloco.config.deepspeed_block import (
    Bf16Config,
    DataTypesConfig,
    DeepSpeedConfig,
    Fp16Config,
    ZeroConfig,
)
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES, MuonParams, OptimizerParams
from megatron_noloco.config.programs import DEEPSPEED, HUGGING_FACE, PROGRAMS, hint_of
from megatron_noloco.fields import Settings, fields_of
from megatron_noloco.model.families import ROPE_CONSTANTS
from megatron_noloco.model.layers import window
from megatron_noloco.pipeline.communicator import RoutedCommunicator
from megatron_noloco.pipeline.core_versions import balancing_losses, submodules_of
from megatron_noloco.pipeline.pipeline import take_load_balancing_loss

pytestmark = pytest.mark.contract

ROOT = Path(__file__).parents[2]


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def first_parameters(function: Any, count: int = 2) -> list[str]:
    return list(inspect.signature(function).parameters)[:count]


# What we assign: a name that has gone would be set all the same, and read by nobody
ASSIGNED: list[tuple[Any, str]] = [
    # pipeline/groups.py sets these globals and fills this collection, that of experts in the second line
    (
        vars(parallel_state),
        "_TENSOR_MODEL_PARALLEL_GROUP _TENSOR_MODEL_PARALLEL_GLOBAL_RANKS _PIPELINE_MODEL_PARALLEL_GROUP "
        "_PIPELINE_GLOBAL_RANKS _MODEL_PARALLEL_GROUP _DATA_PARALLEL_GROUP _DATA_PARALLEL_GROUP_WITH_CP "
        "_CONTEXT_PARALLEL_GROUP _TENSOR_AND_CONTEXT_PARALLEL_GROUP _GLOBAL_MEMORY_BUFFER",
    ),
    (
        ProcessGroupCollection.__dataclass_fields__,
        "tp pp mp dp dp_cp cp embd pos_embd "  # and of experts
        "ep tp_cp expt_tp tp_ep expt_dp tp_dp_cp",
    ),
    # engine/initialize.py, engine/gradients.py
    (vars(cuda_accelerator), "pynvml"),
    (vars(DeepSpeedZeroOptimizer), "check_overflow scaled_global_norm unscale_and_clip_grads"),
]


@pytest.mark.parametrize(("there", "names"), ASSIGNED, ids=["globals", "groups", "accelerator", "optimizer"])
def test_it_has_the_names_that_are_assigned(there: Collection[str], names: str) -> None:
    assert set(names.split()) <= set(there)


class TestCpu:
    """pipeline/cpu.py rebinds these names."""

    @pytest.mark.parametrize(
        "module", [schedules, mappings, layers, rotary_pos_embedding, yarn_rotary_pos_embedding]
    )
    def test_the_module_says_torch(self, module: Any) -> None:
        assert "torch" in vars(module)
        source = inspect.getsource(module)
        assert 'device="cuda"' in source or "torch.cuda.current_device()" in source, (
            "no patch needed any more"
        )

    @pytest.mark.parametrize("name", ["_get_cuda_rng_state", "_set_cuda_rng_state"])
    def test_recompute_uses_these_helpers(self, name: str) -> None:
        assert hasattr(random, name)
        # Fewer uses than two would mean that recompute no longer goes through the name we replace.
        assert inspect.getsource(random).count(f"{name}(") >= 2


class TestStartUp:
    """`job` sets the variable."""

    def test_engines_respect_disabled_dynamo(self) -> None:
        code = "import sys, megatron_noloco.training.build; print('torch._inductor.lowering' in sys.modules)"
        loaded = [
            subprocess.check_output(
                [sys.executable, "-W", "ignore", "-c", code], text=True, cwd=ROOT,
                env={**os.environ, "TORCHDYNAMO_DISABLE": off},
            ).split()[-1]
            for off in "01"
        ]  # fmt: skip
        assert loaded == ["True", "False"]


class TestPipeline:
    """pipeline/communicator.py overrides this method."""

    def test_all_messages_of_a_schedule_pass_through_one_method(self) -> None:
        sends = ["self", "tensor_send_next", "tensor_send_prev"]
        wanted = {*sends, "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs"}
        assert (
            parameters(P2PCommunicator._communicate) == wanted == parameters(RoutedCommunicator._communicate)
        )
        senders = {
            name
            for name, method in inspect.getmembers(P2PCommunicator, inspect.isfunction)
            if name.startswith(("send_", "recv_"))
        }
        assert senders >= {
            "recv_forward", "recv_backward", "send_forward", "send_backward",
            "send_forward_recv_backward", "send_backward_recv_forward",
        }  # fmt: skip
        for name in senders:
            assert "self._communicate(" in inspect.getsource(getattr(P2PCommunicator, name)), name

    def test_the_order_of_virtual_stages(self) -> None:
        assert schedules.get_schedule_table(4, 2, 2) == [
            (0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)
        ]  # fmt: skip
        assert first_parameters(schedules.get_forward_backward_func) == ["pp_size", "vp_size"]


class TestStage:
    """model/stage.py builds these."""

    def test_the_local_spec_has_the_places_that_we_fill(self) -> None:
        submodules = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
        assert hasattr(submodules, "input_layernorm")
        assert hasattr(submodules, "pre_mlp_layernorm")
        for name in ("core_attention", "q_layernorm", "k_layernorm"):
            assert hasattr(submodules.self_attention.submodules, name)

    def test_rotary_scaling_is_fixed_but_for_its_factor(self) -> None:
        """model/families/family.py refuses folders with other numbers."""
        constants = ROPE_CONSTANTS["llama3"]
        scaling = inspect.signature(RotaryEmbedding._apply_scaling).parameters
        assert {name: scaling[name].default for name in constants} == constants
        call = inspect.getsource(RotaryEmbedding.__init__).split("self._apply_scaling(")[1].split(")")[0]
        assert call == "self.inv_freq, factor=rope_scaling_factor"

    def test_a_window_counts_the_tokens_before_and_after(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """model/layers.py has the window of core's own attention, which Transformer Engine shares."""
        ones = torch.ones
        monkeypatch.setattr(torch, "ones", lambda *size, device, **options: ones(*size, **options))
        masked = get_sliding_window_causal_mask(6, 6, (2, 0))
        monkeypatch.undo()
        assert torch.equal(~masked, window(6, 2, torch.device("cpu")))

    @pytest.mark.parametrize("function", [get_num_layers_to_build, get_transformer_layer_offset])
    def test_layer_counts_take_stage_and_chunk(self, function: Any) -> None:
        assert first_parameters(function, 3) == ["config", "vp_stage", "pp_rank"]


class TestMixture:
    """model/stage.py builds experts, model/layers.py their router, pipeline/pipeline.py reads what it kept."""

    def test_config_defaults(self) -> None:
        fields = TransformerConfig.__dataclass_fields__
        defaults = {
            "moe_layer_freq": 1,
            "moe_router_pre_softmax": False,
            "moe_router_score_function": "softmax",
            "moe_token_dispatcher_type": "allgather",
            "moe_grouped_gemm": False,
            "moe_expert_capacity_factor": None,
            "moe_z_loss_coeff": None,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": None,  # that of the others
        }
        assert {name: fields[name].default for name in defaults} == defaults

    def test_the_spec_has_a_place_for_a_router(self) -> None:
        spec = get_gpt_layer_local_spec(num_experts=2, normalization="RMSNorm")
        assert submodules_of(spec.submodules.mlp).router is TopKRouter
        assert parameters(TopKRouter.gating) == {"self", "input"}

    def test_every_forward_step_scales_the_loss_that_balances(self) -> None:
        assert "forward_step_calc_loss(" in inspect.getsource(schedules.forward_step)
        config = SimpleNamespace(
            timers=None,
            num_moe_experts=2,
            calculate_per_token_loss=False,
            grad_scale_func=lambda loss: 3 * loss,
        )
        schedules.forward_step_calc_loss(
            None, torch.ones(1), lambda losses: (losses.sum(), None), config, None, False, 4, [], 1, True
        )
        assert float(MoEAuxLossAutoScaler.main_loss_backward_scale) == 3 / 4

    def test_the_log_of_losses_is_kept_without_messages(self) -> None:
        """There is no group of ranks here. Only core's reports, which nothing calls, have collectives."""
        router = SimpleNamespace(
            config=SimpleNamespace(num_layers=4, mtp_num_layers=None),
            layer_number=2,
            is_mtp_layer=False,
            calculate_per_token_loss=False,
        )
        for _ in range(2):
            TopKRouter.attach_and_log_load_balancing_loss(
                router, torch.ones(1), 0.1, torch.tensor(0.3), "a_loss", None
            )
        assert [losses.tolist() for losses in balancing_losses()] == [[0, pytest.approx(6), 0, 0]]
        assert take_load_balancing_loss() == pytest.approx(6)
        assert take_load_balancing_loss() == 0


class TestEngine:
    """engine/initialize.py and engine/gradients.py."""

    def test_the_slow_build_can_be_switched_off(self) -> None:
        looked_up = "deepspeed.ops.__compatible_ops__.get(builder.NAME, False)"
        assert looked_up in inspect.getsource(build_shm_op)
        assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"

    def test_zero_1_takes_the_norm_of_one_group_from_one_place(self) -> None:
        """engine/gradients.py hands it all groups at once."""
        source = inspect.getsource(DeepSpeedZeroOptimizer.scaled_global_norm)
        assert "self.get_grad_norm_direct(self.averaged_gradients[i], self.params_in_partition[i])" in source
        assert "self.scaled_global_norm()" in inspect.getsource(DeepSpeedZeroOptimizer.step)

    def test_experts_are_reduced_over_their_own_ranks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """engine/initialize.py announces their ranks and has the engine look for groups with `moe`."""
        monkeypatch.setitem(groups._get_expert_parallel_group_dict(), "experts", "some")
        monkeypatch.setitem(groups._get_expert_data_parallel_group_dict(), "experts", "others")
        monkeypatch.setattr(groups, "expert_tensor_parallel_world_size", 3)
        assert groups._get_expert_parallel_group("experts") == "some"
        assert groups._get_expert_data_parallel_group("experts") == "others"
        assert groups._get_expert_model_parallel_world_size() == 3
        expert = torch.zeros(1)
        assert not is_moe_param(expert)
        expert.allreduce = False  # type: ignore[attr-defined]
        assert is_moe_param(expert)
        for function in (
            DeepSpeedEngine._configure_optimizer,
            DeepSpeedEngine._configure_zero_optimizer,
            DeepSpeedEngine._configure_bf16_optimizer,
            DeepSpeedEngine.buffered_allreduce_fallback,
        ):
            assert "self.has_moe_layers" in inspect.getsource(function)
        assert "self.has_moe_layers" not in inspect.getsource(DeepSpeedEngine._broadcast_model)

    @pytest.mark.parametrize("optimizer", [DeepSpeedZeroOptimizer, BF16_Optimizer])
    def test_the_ranks_that_divide_a_group_are_known(self, optimizer: type) -> None:
        """engine/state.py asks for them."""
        assert "self.real_dp_process_group = [" in inspect.getsource(optimizer.__init__)

    def test_groups_without_parameters_are_left_out(self) -> None:
        """engine/layout.py does so, too: the numbers of groups are those of DeepSpeed."""
        assert 'if len(pg["params"]) != 0' in inspect.getsource(DeepSpeedEngine._configure_optimizer)

    @pytest.mark.parametrize("optimizer", [DeepSpeedZeroOptimizer, BF16_Optimizer])
    def test_a_tied_weight_counts_once_in_the_norm(self, optimizer: type) -> None:
        """`ds_pipe_replicated` marks the last stage's copy of the embedding."""
        from deepspeed.runtime import utils

        sources = inspect.getsource(inspect.getmodule(optimizer)) + inspect.getsource(utils)
        assert "ds_pipe_replicated" in sources or "PIPE_REPLICATED" in sources

    def test_the_schedule_sets_the_rate_of_the_next_step(self) -> None:
        weight = torch.nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        schedule = WarmupCosineLR(
            optimizer, 10, warmup_num_steps=2, warmup_min_ratio=0.5, warmup_type="linear"
        )
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.5


def names_and_defaults(block: type[BaseModel]) -> dict[str, Any]:
    return {name: field.default for name, field in block.model_fields.items()}


def keyword_defaults(function: Any) -> dict[str, Any]:
    return {name: found.default for name, found in inspect.signature(function).parameters.items()}


class TestConfig:
    """config/ allows keys that DeepSpeed reads, with DeepSpeed's defaults."""

    def test_it_reads_every_allowed_key_of_the_top_level(self) -> None:
        modules = map(vars, (constants, precision_config, zero_config))
        read = {value for names in modules for value in names.values() if isinstance(value, str)}
        assert DeepSpeedConfig.model_fields.keys() <= read
        assert DataTypesConfig.model_fields.keys() <= read
        for block in (DeepSpeedConfig, DataTypesConfig, CheckpointConfig):
            self.check_refusals(block, read)

    @pytest.mark.parametrize(
        ("ours", "theirs"),
        [
            (ZeroConfig, zero_config.DeepSpeedZeroConfig),
            (Bf16Config, precision_config.DeepSpeedBF16Config),
            (Fp16Config, precision_config.DeepSpeedFP16Config),
        ],
    )
    def test_its_blocks_have_every_allowed_key(self, ours: type[Settings], theirs: type[BaseModel]) -> None:
        names = {name: field.default for name, field in theirs.model_fields.items()}
        names |= {field.alias: field.default for field in theirs.model_fields.values() if field.alias}
        self.check_refusals(ours, names)
        allowed = names_and_defaults(ours) | ({"stage": 0} if ours is ZeroConfig else {})
        assert allowed == {name: names[name] for name in allowed}

    @staticmethod
    def check_refusals(block: type[Settings], names: Iterable[str]) -> None:
        """Of DeepSpeed's other keys none is taken for a misspelling of one that is allowed."""
        everywhere = [name for name, _ in fields_of(RunConfig)]
        known = {word for name in everywhere for word in name.split(".")}
        theirs = {word.rpartition(".")[2] for program in PROGRAMS for word in program.words}
        for name in set(names) - known - theirs:
            assert hint_of((name,), block.model_fields, everywhere) == "", name

    def test_each_of_its_settings_has_a_row_for_convert(self) -> None:
        blocks = {
            "zero_optimization": zero_config.DeepSpeedZeroConfig,
            "bf16": precision_config.DeepSpeedBF16Config,
            "fp16": precision_config.DeepSpeedFP16Config,
        }
        names = [f"{block}.{name}" for block, model in blocks.items() for name in model.model_fields]
        assert [name for name in names if DEEPSPEED.row(name) is None] == []

    def test_each_training_argument_has_a_row_for_convert(self) -> None:
        names = [field.name for field in dataclasses.fields(TrainingArguments)]
        assert [name for name in names if HUGGING_FACE.row(name) is None] == []

    @pytest.mark.parametrize("schedule", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
    def test_its_schedules_take_these_parameters(self, schedule: str) -> None:
        found = keyword_defaults(getattr(lr_schedules, schedule).__init__)
        block = SCHEDULES[schedule]
        assert found.keys() - {"self", "optimizer", "last_batch_iteration"} == block.model_fields.keys()
        del found["warmup_max_lr" if "Cosine" not in schedule else "self"]  # ours is the optimizer's rate
        for name, field in block.model_fields.items():
            assert field.is_required() or field.default == found.get(name)

    @pytest.mark.parametrize(
        ("name", "kernels"), [("AdamW", [FusedAdam, torch.optim.AdamW]), ("SGD", [torch.optim.SGD])]
    )
    def test_optimizers_take_these_parameters(self, name: str, kernels: list[type]) -> None:
        """A key too many ends in a traceback."""
        own = OPTIMIZERS[name].model_fields.keys() - OptimizerParams.model_fields.keys() - {"torch_adam"}
        found: dict[str, Any] = {}
        for kernel in kernels:
            found = keyword_defaults(kernel.__init__) | found
        for parameter in own:
            default = OPTIMIZERS[name].model_fields[parameter].default
            assert default == (list(found[parameter]) if parameter == "betas" else found[parameter])


class TestMuon:
    """engine/muon.py uses DeepSpeed's names, defaults and kernels."""

    def test_its_parameters_and_defaults(self) -> None:
        read = {"muon_lr", "adam_lr", *DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS}
        assert read == MuonParams.model_fields.keys() - OptimizerParams.model_fields.keys() | {"weight_decay"}
        weights = torch.nn.Linear(2, 2)
        groups = [
            {"params": [weights.weight], "use_muon": True},
            {"params": [weights.bias], "use_muon": False},
        ]
        muon, adam = original_muon.MuonWithAuxAdam(groups).param_groups
        theirs = {**muon, **adam, "muon_lr": muon["lr"], "adam_lr": adam["lr"], "lr": None}
        theirs["betas"] = list(theirs["betas"])
        ours = names_and_defaults(MuonParams)
        assert {name: theirs[name] for name in read} == {name: ours[name] for name in read}

    @pytest.mark.parametrize("method", sorted(original_muon.NS_METHODS))
    def test_its_kernels_orthogonalise_without_a_compiler(self, method: str) -> None:
        muon = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
        kernel = {
            "gram": original_muon.zeropower_via_gram_newtonschulz,
            "standard": original_muon.zeropower_via_newtonschulz5,
        }[method]
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        with torch.compiler.set_stance("force_eager"):
            values = torch.linalg.svdvals(kernel(muon, steps=5).float())
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
        assert float(values.min()) > 0.6
        assert float(values.max()) < 1.3
