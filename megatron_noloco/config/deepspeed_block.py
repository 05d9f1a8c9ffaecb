"""DeepSpeed's part of the file: checked, with every "auto" and every missing batch number worked out."""

import copy
from dataclasses import dataclass, field
from typing import Any

from megatron_noloco.config import deepspeed_keys as keys
from megatron_noloco.config.wording import Problem, shown, unknown_key, wrong_value

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
AUTO = "auto"


@dataclass
class _Resolver:
    """Works on a copy of the user's keys, and collects problems instead of stopping at the first."""

    values: dict[str, Any]
    dp: int | None  # None: the parallel block is itself in error
    train_iters: int | None
    problems: list[Problem] = field(default_factory=list)

    def complain(self, key: str, text: str) -> None:
        self.problems.append(Problem((key,), text))

    def shapes(self) -> None:
        """Blocks that are not objects would make every later question fail: they are reported and dropped."""
        zero = self.values.get("zero_optimization")
        if isinstance(zero, bool):  # DeepSpeed's old spelling
            self.values["zero_optimization"] = {"stage": int(zero)}
        if "bfloat16" in self.values:  # DeepSpeed's old name
            if "bf16" in self.values:
                self.complain("bfloat16", "bf16 and bfloat16 are two names for one setting; give one of them")
            self.values.setdefault("bf16", self.values.pop("bfloat16"))
        for block, known in keys.SUB_BLOCKS.items():
            value = self.values.get(block, {})
            if isinstance(value, dict):
                self.problems += [unknown_key((block, name), known) for name in value if name not in known]
            elif value != AUTO:
                self.problems.append(wrong_value((block,), "an object", value))
                del self.values[block]
            else:
                del self.values[block]

    def autos(self) -> None:
        """ "auto" means DeepSpeed's default, except where DeepSpeed has none that suits."""
        if self.values.get("gradient_clipping") == AUTO:
            self.values["gradient_clipping"] = 1.0
        scheduler = self.values.get("scheduler", {}).get("params")
        if isinstance(scheduler, dict) and scheduler.get("total_num_steps") == AUTO and self.train_iters:
            scheduler["total_num_steps"] = self.train_iters
        for block in ("optimizer", "scheduler"):
            params = self.values.get(block, {}).get("params")
            for name, value in params.items() if isinstance(params, dict) else ():
                if value == AUTO:
                    self.complain(block, f'{block}.params.{name}: "auto" has no meaning here; give a number')
        for block in ("bf16", "fp16", "zero_optimization"):
            if block in self.values:
                self.values[block] = {k: v for k, v in self.values[block].items() if v != AUTO}
        for key in [key for key, value in self.values.items() if value == AUTO]:
            del self.values[key]

    def batch(self) -> None:
        """DeepSpeed's rule, per replica: train_batch_size = micro batch x accumulation steps x dp."""
        given: dict[str, int] = {}
        for key in (TRAIN, MICRO, STEPS):
            if key not in self.values:
                continue
            if type(self.values[key]) is not int or self.values[key] < 1:
                self.problems.append(wrong_value((key,), 'an integer >= 1 or "auto"', self.values[key]))
                return
            given[key] = self.values[key]
        if TRAIN not in given and MICRO not in given:
            self.complain(
                MICRO, f"{MICRO} or {TRAIN} is missing (samples per replica; one of them is needed)"
            )
        elif self.dp is not None:
            self._derive_batch(given, self.dp)

    def _derive_batch(self, given: dict[str, int], dp_size: int) -> None:
        if len(given) == 1:  # as DeepSpeed does
            given[STEPS] = 1
        if TRAIN not in given:
            given[TRAIN] = given[MICRO] * given[STEPS] * dp_size
        for missing, other in ((MICRO, STEPS), (STEPS, MICRO)):
            if missing not in given:
                parts = given[other] * dp_size
                if given[TRAIN] % parts:
                    self.complain(
                        TRAIN,
                        f"{TRAIN} {given[TRAIN]} does not divide by {other} {given[other]} x "
                        f"parallel.data_parallel_size {dp_size} = {parts} (per replica), so there is no {missing}",
                    )
                    return
                given[missing] = given[TRAIN] // parts
        product = given[MICRO] * given[STEPS] * dp_size
        if product != given[TRAIN]:
            self.complain(
                TRAIN,
                f"{TRAIN} {given[TRAIN]} is not {MICRO} {given[MICRO]} x {STEPS} {given[STEPS]} x "
                f"parallel.data_parallel_size {dp_size} = {product} (per replica)",
            )
        self.values.update(given)

    def precision(self) -> None:
        for block in ("bf16", "fp16"):
            enabled = self.values.get(block, {}).get("enabled", False)
            if type(enabled) is not bool:
                self.problems.append(wrong_value((block, "enabled"), 'true, false or "auto"', enabled))
        bf16, fp16 = self.values.get("bf16", {}), self.values.get("fp16", {})
        if bf16.get("enabled") is True and fp16.get("enabled") is True:
            self.complain("fp16", "bf16 and fp16 are both enabled; choose one of them")
        scale = fp16.get("loss_scale", 0)
        if not _is_size(scale):
            self.problems.append(wrong_value(("fp16", "loss_scale"), "a number >= 0 (0 is dynamic)", scale))
        accumulate = self.values.get("data_types", {}).get("grad_accum_dtype")
        if (
            bf16.get("enabled") is True
            and accumulate == "fp32"
            and bf16.get("immediate_grad_update") is False
        ):
            self.complain(
                "data_types",
                'data_types.grad_accum_dtype "fp32" needs bf16.immediate_grad_update: true (the default here)',
            )

    def zero(self) -> None:
        """Stage 0 is run as 1: the same numbers, and DeepSpeed's own stage 0 clips wrongly with stages."""
        zero = self.values.setdefault("zero_optimization", {})
        stage = zero.get("stage", 1)
        if type(stage) is not int or not 0 <= stage <= 3:
            self.problems.append(wrong_value(("zero_optimization", "stage"), "0 or 1", stage))
        elif stage >= 2:
            self.complain(
                "zero_optimization",
                f"zero_optimization.stage {stage} is not supported, use 0 or 1: 2 and 3 need DeepSpeed's own "
                "backward, and Megatron-core's schedule runs the backward outside of DeepSpeed",
            )
        for key in ("round_robin_gradients", "parameter_alignment"):
            if zero.get(key):
                self.complain(
                    "zero_optimization",
                    f"zero_optimization.{key} changes the order of the flat weights, which checkpoints and "
                    "exports rely on; leave it out",
                )
        for key in ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"):
            if zero.get(key):
                self.complain(
                    "zero_optimization",
                    f"zero_optimization.{key} is not supported: the inner optimizer works where the model is; "
                    'the outer one\'s weights are in host memory already (noloco.slow_weights "host")',
                )
        if zero.get("compute_grad_norm") is False:
            self.complain(
                "zero_optimization",
                "zero_optimization.compute_grad_norm: the norm is logged, and clipped by; leave it out",
            )
        for key in ("reduce_bucket_size", "allgather_bucket_size"):
            if key in zero and not _is_size(zero[key]):
                self.problems.append(wrong_value(("zero_optimization", key), "a number >= 0", zero[key]))
        zero["stage"] = 1

    def optimizer(self) -> None:
        if "optimizer" not in self.values:
            if not any(problem.path == ("optimizer",) for problem in self.problems):
                self.complain(
                    "optimizer", 'optimizer is missing (such as {"type": "AdamW", "params": {"lr": 3e-4}})'
                )
            return
        params = self._typed("optimizer")
        name = self.values["optimizer"].get("type")
        known = keys.DEEPSPEED_OPTIMIZERS | keys.TORCH_OPTIMIZERS
        if isinstance(name, str) and not {name, name.lower()} & known:
            self._unknown_type("optimizer", name, ["AdamW", "Adam", "Lion", *sorted(keys.TORCH_OPTIMIZERS)])
        if name in keys.TORCH_OPTIMIZERS:
            self.values["zero_allow_untested_optimizer"] = True  # as it calls all but Adam and Lion
        if "max_grad_norm" in params:
            self.complain("optimizer", "optimizer.params.max_grad_norm: use the top-level gradient_clipping")
        allowed = keys.OPTIMIZER_PARAMS.get(str(name).lower(), frozenset(params)) | {"max_grad_norm"}
        for key, value in params.items():
            path = ("optimizer", "params", key)
            if key not in allowed:
                self.problems.append(unknown_key(path, allowed))
            elif key == "max_grad_norm" or value == AUTO:
                continue  # told already
            elif key == "betas":
                if not _are_betas(value):
                    self.problems.append(wrong_value(path, "two numbers from 0 to below 1", value))
            elif key in keys.OPTIMIZER_SWITCHES:
                if type(value) is not bool:
                    self.problems.append(wrong_value(path, "true or false", value))
            elif not _is_size(value):
                self.problems.append(wrong_value(path, "a number >= 0", value))

    def scheduler(self) -> None:
        if "scheduler" not in self.values:
            return
        params = self._typed("scheduler")
        self.values["scheduler"].setdefault("params", {})  # DeepSpeed unpacks it, also when it is missing
        name = self.values["scheduler"].get("type")
        if not isinstance(name, str):
            return
        if name in keys.SCHEDULES:
            known = keys.SCHEDULES[name]
            for key, value in params.items():
                path = ("scheduler", "params", key)
                if key not in known:
                    self.problems.append(unknown_key(path, known))
                elif key != "warmup_type" and value != AUTO and type(value) not in (int, float, bool):
                    self.problems.append(wrong_value(path, "a number", value))
            if "total_num_steps" in known and "total_num_steps" not in params:
                self.complain("scheduler", 'scheduler.params.total_num_steps is missing (a number or "auto")')
        else:
            self._unknown_type("scheduler", name, list(keys.SCHEDULES))

    def _typed(self, block: str) -> dict[str, Any]:
        """Checks the form {type, params} and returns params."""
        value = self.values[block]
        if "type" not in value:
            self.complain(block, f"{block}.type is missing (text)")
        elif not isinstance(value["type"], str):
            self.problems.append(wrong_value((block, "type"), "text", value["type"]))
        params = value.get("params", {})
        if not isinstance(params, dict):
            self.problems.append(wrong_value((block, "params"), "an object", params))
            return {}
        return params

    def _unknown_type(self, block: str, name: str, known: list[str]) -> None:
        near = unknown_key((name,), known).text.partition("; ")[2]
        hint = near or "known are " + ", ".join(known)
        self.complain(block, f"{block}.type: {shown(name)} is not a known {block}; {hint}")

    def clipping(self) -> None:
        clipping = self.values.get("gradient_clipping", 0.0)
        if not _is_size(clipping):
            self.problems.append(wrong_value(("gradient_clipping",), 'a number >= 0 or "auto"', clipping))


def _is_size(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < float("inf")


def _are_betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(_is_size(beta) and beta < 1 for beta in value)


def resolve(
    raw: dict[str, Any], dp_size: int | None, train_iters: int | None
) -> tuple[dict[str, Any], list[Problem]]:
    """What DeepSpeed is given for the user's top-level keys, and what is wrong with them.

    Args:
        raw: the top-level keys that are not one of our blocks and are known to DeepSpeed.
        dp_size: DeepSpeed's world size, since a replica is a whole DeepSpeed world; None when it is not known.
        train_iters: the meaning of scheduler.params.total_num_steps "auto".
    """
    resolver = _Resolver(copy.deepcopy(raw), dp_size, train_iters)
    resolver.shapes()
    resolver.autos()
    resolver.batch()
    resolver.clipping()
    resolver.optimizer()
    resolver.scheduler()
    resolver.precision()
    resolver.zero()
    return resolver.values, resolver.problems


def check_top_level(raw: dict[str, Any], blocks: tuple[str, ...]) -> list[Problem]:
    """Keys that nobody would read, or that nothing here would obey."""
    problems = []
    for key in raw:
        if key in keys.REMOVED:
            problems.append(Problem((key,), f"{key} was removed from DeepSpeed 0.19; delete it"))
        elif key in keys.NOT_HERE:
            problems.append(Problem((key,), f"{key} has no effect here: {keys.NOT_HERE[key]}"))
        elif key not in keys.TOP_LEVEL and key not in blocks:
            problems.append(unknown_key((key,), [*blocks, *(keys.TOP_LEVEL - keys.NOT_HERE.keys())]))
    return problems
