"""Builds a DeepSpeed engine whose world is one replica."""

import re
import socket
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import cuda_accelerator, get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups as deepspeed_groups

from megatron_noloco.engine.gradients import read_norm_once
from megatron_noloco.engine.layout import EXPERTS, parameter_groups
from megatron_noloco.engine.muon import Muon
from megatron_noloco.engine.schedules import build_schedule
from megatron_noloco.errors import UserError
from megatron_noloco.job.agreement import gather_from_all_ranks
from megatron_noloco.job.start_up import quiet
from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups, ProcessGroup

# Of a compiler, nvcc, a linker or a shell.
_COMPLAINT = re.compile(r"\berror:|\bfatal\b|cannot find|not found")


def build_deepspeed(stage: Stage, groups: Groups, ds_config: Mapping[str, Any]) -> DeepSpeedEngine:
    """Build a DeepSpeed engine whose world is this replica.

    Calls the constructor, since `deepspeed.initialize` chooses the engine and its arguments itself.
    """
    if not torch.cuda.is_available():
        # DeepSpeed would first compile a shared-memory all-reduce: a minute, with a C++ compiler. An access
        # to its table of kernels would try the compiler on each of them; `vars` does not.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    else:
        # With NVML, DeepSpeed parses UUIDs in CUDA_VISIBLE_DEVICES as numbers; without NVML it asks torch.
        cuda_accelerator.pynvml = None
    if deepspeed.comm.comm.cdb is None:
        deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
    mpu = replica_mpu(groups)
    if groups.topology.ep > 1:
        _announce_experts(stage, groups)
    settings = deepspeed_settings(ds_config)
    # DeepSpeed's buffer for gradients has as many elements, however small the model.
    elements, zero = sum(parameter.numel() for parameter in stage.parameters()), settings["zero_optimization"]
    zero["reduce_bucket_size"] = min(elements, zero["reduce_bucket_size"])
    parameters, optimizer = _parameters_and_optimizer(stage, groups, settings["optimizer"])
    schedule = settings.get("scheduler")
    with quiet():
        engine = ReplicaDeepSpeed(
            args=SimpleNamespace(device_rank=torch.cuda.current_device() if torch.cuda.is_available() else 0),
            model=stage,
            optimizer=optimizer,
            model_parameters=parameters,
            lr_scheduler=partial(build_schedule, schedule) if schedule else None,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        read_norm_once(engine.optimizer)
        # At its lowest scale DeepSpeed's scaler of fp16 would raise; `Health` counts the skipped steps.
        engine.optimizer.loss_scaler.raise_error_at_min_scale = False
    # One call of step() per batch: the schedule has already run all microbatches.
    engine.set_gradient_accumulation_boundary(True)
    return engine


def _parameters_and_optimizer(
    stage: Stage, groups: Groups, block: dict[str, Any]
) -> tuple[list[dict[str, Any]], Muon | None]:
    """Return the parameter groups, and their optimizer where DeepSpeed does not build it (Muon)."""
    muon = block["type"] == "Muon"
    parameters = parameter_groups(stage.named_rows(), muon, groups.topology.ep)
    if not muon:
        return parameters, None
    rows = {parameter: row for row, parameter in stage.named_rows()}
    return parameters, Muon(parameters, rows, block["params"], groups)


class ReplicaDeepSpeed(DeepSpeedEngine):
    """DeepSpeed's engine, which knows of itself only its own layers with experts."""

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[dict[str, Any]]) -> None:
        self.has_moe_layers = any(group["moe"] for group in model_parameters)
        super()._configure_optimizer(client_optimizer, model_parameters)


def _announce_experts(stage: Stage, groups: Groups) -> None:
    """Mark the experts for DeepSpeed, which then reduces and divides them over the ranks that have the same ones.

    Their gradients are the sum over the tokens of all `ep` ranks, so DeepSpeed divides the sum over the
    expert-data-parallel ranks by the number of all data-parallel ranks, as that of all other gradients. Its own
    functions for making these groups would make groups across replicas.
    """
    deepspeed_groups._get_expert_parallel_group_dict()[EXPERTS] = groups.ep
    deepspeed_groups._get_expert_data_parallel_group_dict()[EXPERTS] = groups.expert_dp
    deepspeed_groups.expert_tensor_parallel_world_size = (
        groups.topology.tp
    )  # over which it adds up their norm
    for row, parameter in stage.named_rows():
        if row.expert is not None:
            parameter.allreduce = False  # type: ignore[attr-defined]
            parameter.group_name = EXPERTS  # type: ignore[attr-defined]


def deepspeed_settings(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ds_config with what depends on the precision and on the machine.

    - For gradients that accumulate in fp32 beside weights in bf16 DeepSpeed needs one more setting.
    - Adam is DeepSpeed's fused kernel where it loads, else torch's, fused on a GPU; unless the file has
      `torch_adam`.
    """
    settings = dict(ds_config)
    if (
        settings.get("bf16", {}).get("enabled", False)
        and settings["data_types"]["grad_accum_dtype"] == "fp32"
    ):
        settings["bf16"] = {"immediate_grad_update": True, **settings["bf16"]}
    optimizer = settings["optimizer"]
    parameters = dict(optimizer["params"])
    if optimizer["type"] in ("Adam", "AdamW") and "torch_adam" not in parameters:
        parameters["torch_adam"] = not all_have_fused_adam()
        if parameters["torch_adam"] and torch.cuda.is_available():
            parameters["fused"] = True
    settings["optimizer"] = {**optimizer, "params": parameters}
    return settings


def fused_adam_loads() -> bool:
    """Return whether DeepSpeed's fused Adam loads on a GPU."""
    if not torch.cuda.is_available():  # on a CPU it would take minutes and a compiler
        return False
    try:
        load_kernel("FusedAdamBuilder")
    except UserError:
        return False
    return True


def all_have_fused_adam() -> bool:
    """Return whether all ranks of the job have DeepSpeed's fused Adam: ranks of a replica must round alike.

    A collective on GPUs. The first rank of a host compiles it, if need be, while the others wait.
    """
    if not torch.cuda.is_available():
        return False
    host, rank = socket.gethostname(), dist.get_rank() if dist.is_initialized() else 0
    first = gather_from_all_ranks(host).index(host) == rank
    gather_from_all_ranks(first and fused_adam_loads())
    return all(gather_from_all_ranks(fused_adam_loads()))


def load_kernel(builder: str) -> None:
    """Load a kernel of DeepSpeed by the name of its builder. Raises UserError where it cannot be had.

    Where it is not built yet, DeepSpeed compiles it, which needs ninja, a compiler (for a GPU the CUDA toolkit)
    and a minute.
    """
    try:
        get_accelerator().create_op_builder(builder).load(verbose=False)
    except Exception as error:  # from a compiler, its absence, or a CUDA toolkit that does not match torch
        first, *others = str(error).splitlines() or [type(error).__name__]
        # Between ninja's commands, of which the first line has one as well.
        reason = next(filter(_COMPLAINT.search, others), first.partition(": [")[0]).strip()
        raise UserError(
            f"DeepSpeed compiles its kernel, which failed ({reason}): install ninja and a compiler, for a GPU the "
            "CUDA toolkit"
        ) from None


def replica_mpu(groups: Groups) -> SimpleNamespace:
    """Return the "model parallel unit" (mpu) for DeepSpeed, which confines its data parallelism to this replica.

    No gradient all-reduce, broadcast, overflow check or ZeRO partition reaches another replica. The
    model-parallel group holds the stages and tp ranks of one dp rank, over which DeepSpeed adds up the squared
    gradient norm; a parameter that all tp ranks hold in full (a norm) counts on tp rank 0 of its stage only.
    The mpu must not have `get_sequence_*` or `initialize_sequence_parallel`: DeepSpeed would switch to Ulysses.
    """
    return SimpleNamespace(
        **_functions_of("data_parallel", groups.dp),
        **_functions_of("model_parallel", groups.mp),
        **_functions_of("tensor_model_parallel", groups.tp),
        **_functions_of("pipeline_model_parallel", groups.pp),
    )


def _functions_of(kind: str, group: ProcessGroup) -> dict[str, Callable[[], Any]]:
    return {
        f"get_{kind}_group": lambda: group,
        f"get_{kind}_world_size": group.size,
        f"get_{kind}_rank": group.rank,
    }
