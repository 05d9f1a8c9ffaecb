"""A DeepSpeed engine whose world is one replica."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.ops.op_builder import FusedAdamBuilder
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from megatron_noloco.engine.mpu import ReplicaMpu
from megatron_noloco.engine.muon import Muon
from megatron_noloco.engine.quiet import quiet
from megatron_noloco.engine.schedule import build_schedule
from megatron_noloco.model.stage import Stage
from megatron_noloco.pipeline.groups import Groups


def build_deepspeed(stage: Stage, groups: Groups, ds_config: Mapping[str, Any]) -> DeepSpeedEngine:
    """A DeepSpeed engine whose world is this replica.

    `deepspeed.initialize` hard-codes which engine it builds and how; the constructor takes what we need.
    """
    if not torch.cuda.is_available():
        # DeepSpeed would compile a shared-memory all-reduce (a minute, and a C++ compiler) before it talks.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if deepspeed.comm.comm.cdb is None:
        deepspeed.comm.init_distributed(dist_init_required=False, verbose=False)
    mpu = ReplicaMpu(groups)
    settings = deepspeed_settings(ds_config)
    muon = settings["optimizer"]["type"].lower() == "muon"
    optimizer = Muon(stage.named_rows(), settings["optimizer"]["params"], groups) if muon else None
    schedule = settings.get("scheduler")
    with quiet():
        engine = DeepSpeedEngine(
            args=None,
            model=stage,
            optimizer=optimizer,
            lr_scheduler=partial(build_schedule, schedule) if schedule else None,
            mpu=mpu,
            config=settings,
            config_class=DeepSpeedConfig(settings, mpu),
            dist_init_required=False,
        )
    # One call of step() per batch: the schedule has already gone through every microbatch.
    engine.set_gradient_accumulation_boundary(True)
    return engine


def deepspeed_settings(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The user's ds_config, completed.

    ZeRO stage 0 is run as stage 1: with outside backward passes DeepSpeed's stage-0 optimizers clip by a wrong
    norm (fp32) or take a step in their constructor (bf16, fp16), stage 1 gives the exact numbers with less memory.
    In bf16, gradients accumulate in fp32 over the microbatches as they do in Megatron, unless the file asks for
    another `data_types.grad_accum_dtype`; DeepSpeed then needs two more settings to be right.
    Adam is DeepSpeed's fused kernel where it can be had, else torch's; `torch_adam` in the file decides itself.
    """
    settings = dict(ds_config)
    if settings.get("bf16", {}).get("enabled", False):
        settings["data_types"] = {"grad_accum_dtype": "fp32", **settings.get("data_types", {})}
        if settings["data_types"]["grad_accum_dtype"] == "fp32":
            settings["bf16"] = {"immediate_grad_update": True, **settings["bf16"]}
            settings.setdefault("communication_data_type", "fp32")
    settings["zero_optimization"] = {**settings.get("zero_optimization", {}), "stage": 1}
    optimizer = settings["optimizer"]
    if optimizer["type"].lower() in ("adam", "adamw"):
        parameters = {"torch_adam": not _fused_adam_loads(), **optimizer.get("params", {})}
        settings["optimizer"] = {**optimizer, "params": parameters}
    return settings


def _fused_adam_loads() -> bool:
    """Where it is not installed, DeepSpeed compiles it, which needs ninja and the CUDA toolkit."""
    if not torch.cuda.is_available():  # on a CPU it could be had, too, but takes minutes and a compiler
        return False
    try:
        FusedAdamBuilder().load(verbose=False)
    except Exception:  # of the compiler, of its absence, of a toolkit that does not fit torch
        return False
    return True
