"""Converts units of other programs to those of a config: ranks, batches, lengths, schedules, intervals.

Each function puts the fields of one subject. Raises UserError, in one line.
"""

import math
from collections.abc import Iterable

from megatron_noloco.config.deepspeed_block import MICRO, STEPS
from megatron_noloco.convert.draft import Draft
from megatron_noloco.errors import UserError

_SCHEDULE = ("warmup_steps", "warmup_share", "warmup_samples", "warmup_tokens")
_HORIZON = ("schedule_steps", "schedule_samples", "schedule_tokens")
_DECAY = ("decay_steps", "decay_samples", "decay_share", "decay_type")


def settle_layout(draft: Draft, world_size: int | None, replicas: int | None) -> int | None:
    """Divide the ranks into replicas, and return the data-parallel ranks of all replicas; None: not known.

    The all-reduce between data-parallel ranks becomes rounds between replicas: of nodes where there are several,
    else of the data-parallel ranks themselves.
    """
    facts = draft.facts
    tp, pp, ep = (
        draft.get(f"parallel.{name}_model_parallel_size", 1) for name in ("tensor", "pipeline", "expert")
    )
    if not all(isinstance(size, int) and size > 0 for size in (tp, pp, ep)):
        return None  # the check of the config says what is wrong
    if facts.virtual_layers and isinstance(layers := draft.get("model.num_layers"), int):
        chunks = max(1, layers // (pp * facts.virtual_layers))
        draft.put("parallel.virtual_pipeline_model_parallel_size", chunks, "virtual_layers")
    if tp == 1:
        draft.drop("parallel.sequence_parallel", "it has a meaning only with tensor parallelism")
    nodes = facts.nodes or 1
    ranks = world_size or facts.ranks or (nodes * facts.ranks_per_node if facts.ranks_per_node else None)
    dp = _data_parallel_ranks(draft, ranks, tp * pp)
    if dp is None:
        inside = draft.get("parallel.data_parallel_size", ep)
        number = replicas or draft.get("parallel.replicas", "auto")
        draft.put("parallel.data_parallel_size", inside)
        draft.put("parallel.replicas", number)
        return number * inside if isinstance(number, int) and isinstance(inside, int) else None
    copies = facts.replicate if (facts.replicate or 1) > 1 else nodes if nodes > 1 else dp
    if dp % ep or (replicas and dp % (replicas * ep)):
        inside = f" x {ep} ranks that divide the experts" if ep > 1 else ""
        raise UserError(
            f"{dp} data-parallel ranks do not divide into {replicas or 1} replicas{inside}; give another "
            f"{'--replicas' if replicas else '--world-size'}"
        )
    wanted = min(replicas or copies, dp // ep)
    fitting = next(number for number in range(wanted, 0, -1) if dp % (number * ep) == 0)
    names = ("nodes", "ranks_per_node", "ranks", "replicate", "shard")
    draft.put("parallel.replicas", fitting, *names)
    draft.put("parallel.data_parallel_size", dp // fitting, *names)
    return dp


def _data_parallel_ranks(draft: Draft, ranks: int | None, size: int) -> int | None:
    facts = draft.facts
    if ranks:
        if ranks % size:
            raise UserError(
                f"{ranks} ranks do not divide by tensor x pipeline parallel sizes = {size}; "
                "give another --world-size"
            )
        return ranks // size
    if facts.shard and facts.shard > 0:
        return (facts.replicate or 1) * facts.shard
    micro, steps = draft.get(MICRO), draft.get(STEPS)
    if facts.global_batch_size and isinstance(micro, int) and isinstance(steps, int) and micro * steps:
        return max(1, facts.global_batch_size // (micro * steps))
    return None


def settle_batch(draft: Draft, dp: int | None) -> int | None:
    """Put the batch of a replica, and return the samples of all replicas in a local step; None: not known."""
    whole, micro, steps = draft.facts.global_batch_size, draft.get(MICRO), draft.get(STEPS)
    if not all(size is None or (isinstance(size, int) and size > 0) for size in (micro, steps)):
        return None  # the check of the config says what is wrong
    if whole is None:
        if micro is not None and steps is None:
            draft.put(STEPS, 1)
        return micro * (steps or 1) * dp if micro and dp else None
    if dp is None:
        raise UserError(
            f"{draft.where('facts.global_batch_size')}: {whole} samples are those of all ranks, and nothing says "
            "how many ranks there are; add --world-size N"
        )
    parts = dp * (micro or steps or 1)
    of_parts = f"{dp} data-parallel ranks" + (f" x {micro or steps}" if micro or steps else "")
    if whole % parts or (micro and steps and whole != parts * steps):
        raise UserError(
            f"{draft.where('facts.global_batch_size')}: {whole} samples are not divided by {of_parts} = {parts}"
            + (f" into {steps} microbatches" if micro and steps else "")
            + "; give another --world-size, or change the batch"
        )
    draft.put(MICRO, micro or whole // parts, "global_batch_size")
    draft.put(STEPS, steps or (whole // parts if micro else 1), "global_batch_size")
    return whole


def settle_length(draft: Draft, batch: int | None, train_iters: int | None) -> int | None:
    """Put the length of the run, and return its local steps; `train_iters` where the files do not say it."""
    facts = draft.facts
    if "training.train_iters" not in draft.fields:
        if facts.train_tokens:
            steps = _in_steps(draft, "train_tokens", facts.train_tokens, batch, tokens=True)
            draft.put("training.train_iters", steps, "train_tokens", "train_samples")
        elif facts.train_samples:
            steps = _in_steps(draft, "train_samples", facts.train_samples, batch)
            draft.put("training.train_iters", steps, "train_samples")
    found = draft.get("training.train_iters", train_iters)
    return found if isinstance(found, int) and found > 0 else None


def _in_steps(draft: Draft, fact: str, amount: int, batch: int | None, tokens: bool = False) -> int:
    """Return an amount of samples, or of tokens, in local steps."""
    length = draft.get("model.seq_length") if tokens else 1
    if batch is None or not isinstance(length, int):
        what = "tokens" if tokens else "samples"
        raise UserError(
            f"{draft.where(f'facts.{fact}')}: {what} become local steps by the batch of all ranks, which is not "
            "known; give --world-size N, and the length of samples"
        )
    return max(1, amount // (batch * length))


def settle_optimizer(draft: Draft) -> None:
    """Put the parameters that the type of optimizer has."""
    facts = draft.facts
    if not any(name.startswith("optimizer.") for name in draft.fields):
        return
    draft.put("optimizer.type", kind := draft.get("optimizer.type", "AdamW"))
    params = "optimizer.params"
    if kind == "SGD":
        draft.put(f"{params}.momentum", facts.sgd_momentum or 0.0, "sgd_momentum")
        draft.drop(f"{params}.eps", "SGD has none")
        return
    if kind == "Muon" and facts.muon_momentum is not None:
        draft.put(f"{params}.momentum", facts.muon_momentum, "muon_momentum")
    if facts.beta1 is not None or facts.beta2 is not None:
        betas = [0.9 if facts.beta1 is None else facts.beta1, 0.999 if facts.beta2 is None else facts.beta2]
        draft.put(f"{params}.betas", betas, "beta1", "beta2")


def settle_schedule(draft: Draft, steps: int | None, batch: int | None) -> None:
    """Put the schedule of the learning rate."""
    facts = draft.facts
    if "scheduler.type" in draft.fields:
        _fill_deepspeed_schedule(draft, steps, batch)
        for name in ("schedule", *_SCHEDULE, *_HORIZON, *_DECAY, "min_lr", "min_ratio"):
            draft.drop(f"facts.{name}", "the scheduler of DeepSpeed's JSON holds")
        return
    if not (facts.schedule or facts.decay_type or facts.decay_share):
        return
    total = _amount(draft, _HORIZON, batch) or steps
    if total is None:
        raise UserError(
            "training.train_iters is missing, which the schedule needs; add --config FILE with it"
        )
    warmup = _warmup(draft, total, batch)
    if facts.schedule == "constant":
        constant = {"type": "WarmupLR", "params": {"warmup_num_steps": warmup, "warmup_type": "linear"}}
        draft.put("scheduler", constant if warmup else None, "schedule", *_SCHEDULE)
        return
    names = ["schedule", *_SCHEDULE, *_HORIZON, "min_lr", "min_ratio"]
    decay, kind = total - warmup, str(facts.schedule)
    if kind not in ("linear", "cosine"):
        names += _DECAY
        decay = min(_decay(draft, total, batch), decay)
        kind = facts.decay_type or "linear"
    if decay < 1:
        raise UserError(
            f"{_first(draft, _SCHEDULE)}: a warm-up of {warmup} local steps leaves none of the schedule's {total}"
        )
    params = {
        "total_num_steps": "auto" if total == steps and not _amount(draft, _HORIZON, batch) else total,
        "warmup_num_steps": warmup,
        "decay_num_steps": decay,
        "decay_type": kind,
        "min_ratio": _lowest(draft),
    }
    draft.put("scheduler", {"type": "WSD", "params": params}, *names)


def _decay(draft: Draft, total: int, batch: int | None) -> int:
    """Return the local steps in which the rate decays after a stable phase."""
    facts = draft.facts
    steps = _amount(draft, ("decay_steps", "decay_samples"), batch)
    if facts.schedule == "WSD" and (steps is None or facts.decay_type is None):
        raise UserError(
            f"{draft.where('facts.schedule')}: WSD needs the steps of its decay, and its kind: linear, cosine or "
            "1 - sqrt; Megatron-LM's exponential default has no equal here"
        )
    return steps or (total if facts.decay_share is None else round(total * facts.decay_share))


def _amount(draft: Draft, names: Iterable[str], batch: int | None) -> int | None:
    """Return in local steps what one of these facts gives, in steps, samples or tokens."""
    for name in names:
        if (amount := getattr(draft.facts, name)) is not None:
            if name.endswith("_steps"):
                return int(amount)
            if amount:
                return _in_steps(draft, name, amount, batch, tokens=name.endswith("_tokens"))
    return None


def _warmup(draft: Draft, total: int, batch: int | None) -> int:
    if (share := draft.facts.warmup_share) is not None:
        return math.ceil(share * total)
    return _amount(draft, ("warmup_samples", "warmup_tokens"), batch) or draft.facts.warmup_steps or 0


def _lowest(draft: Draft) -> float:
    """Return the lowest rate as a share of the peak."""
    lowest, peak = draft.facts.min_lr, draft.get("optimizer.params.lr")
    if not lowest:
        return draft.facts.min_ratio or 0.0
    if not isinstance(peak, float | int) or not 0 < lowest <= peak:
        raise UserError(
            f"{draft.where('facts.min_lr')}: {lowest:g} is not a share of the peak, which is {peak}"
        )
    return float(f"{lowest / peak:.12g}")


def _fill_deepspeed_schedule(draft: Draft, steps: int | None, batch: int | None) -> None:
    """Put what DeepSpeed's JSON leaves to the TrainingArguments by "auto"."""
    missing = "scheduler.params.warmup_num_steps" not in draft.fields
    if missing and steps and (warmup := _warmup(draft, steps, batch)):
        draft.put("scheduler.params.warmup_num_steps", warmup, *_SCHEDULE)
    if draft.get("scheduler.type") != "WarmupLR" and "scheduler.params.total_num_steps" not in draft.fields:
        draft.put("scheduler.params.total_num_steps", "auto")


def _first(draft: Draft, names: Iterable[str]) -> str:
    return next(filter(None, (draft.where(f"facts.{name}") for name in names)), "scheduler")


def settle_precision(draft: Draft) -> None:
    """Leave out the loss scale without fp16, and what ZeRO cannot do here."""
    if draft.get("fp16.enabled") is not True:
        draft.drop("fp16", "it has a meaning only with fp16")
    elif draft.get("fp16.loss_scale"):
        for name in [name for name in draft.fields if name.startswith("fp16.")]:
            if name not in ("fp16.enabled", "fp16.loss_scale"):
                draft.drop(name, "a loss scale that is given does not change")
    stage, name = draft.get("zero_optimization.stage"), "zero_optimization.stage"
    divided = [draft.get(f"parallel.{kind}_model_parallel_size", 1) for kind in ("tensor", "pipeline")]
    if isinstance(stage, int) and (stage > 2 or (stage == 2 and divided != [1, 1])):
        draft.advise(
            name,
            "run as stage 1, the same numbers with more memory: tensor parallelism and pipeline stages divide the "
            "weights of a replica (attach has stage 3, docs/library.md)",
        )
        draft.replace(name, 1)


def settle_intervals(draft: Draft, steps: int | None) -> None:
    """Put when the run logs, saves and evaluates, in local steps."""
    facts = draft.facts
    if facts.log_every:
        draft.put("training.log_interval", _interval(facts.log_every, steps), "log_every")
        draft.drop("facts.print_every", "logging_steps decides it")
    elif facts.print_every:
        draft.put("training.log_interval", _interval(facts.print_every, steps), "print_every")
    if facts.save_when == "steps" and facts.save_every:
        draft.put("checkpoint.save_interval", _interval(facts.save_every, steps), "save_when", "save_every")
    elif facts.save_when:
        draft.put("checkpoint.save_interval", "auto" if facts.save_when == "epoch" else 0, "save_when")
    every = facts.evaluate_every or facts.log_every
    if facts.evaluate_when == "steps" and every:
        draft.put("evaluation.interval", _interval(every, steps), "evaluate_when", "evaluate_every")
    elif facts.evaluate_when:
        draft.put("evaluation.interval", 0, "evaluate_when")
    if facts.evaluated_batches is not None:
        microbatches = facts.evaluated_batches * draft.get(STEPS, 1)
        draft.put("evaluation.iters", microbatches, "evaluated_batches")
    if draft.get("wandb.enabled") is not True:
        draft.drop("wandb", "it is for Weights & Biases, which is off")


def _interval(amount: float, steps: int | None) -> int:
    """Return an interval in local steps; below 1 it is a share of the run."""
    if amount >= 1:
        return int(amount)
    if steps is None:
        raise UserError(f"an interval of {amount:g} is a share of training.train_iters, which is missing")
    return max(1, math.ceil(amount * steps))


def settle_data(draft: Draft) -> None:
    """Put the tokenizer's folder."""
    facts = draft.facts
    if facts.tokenizer_file:
        path = facts.tokenizer_file
        folder = path.rpartition("/")[0] or "." if path.endswith((".model", ".json")) else path
        draft.put("data.tokenizer_model", folder, "tokenizer_file", "tokenizer_kind")
    elif facts.tokenizer_kind:
        draft.advise("facts.tokenizer_kind", "data.tokenizer_model names a folder with tokenizer.json")
    if "data.sft_data_path" not in draft.fields:
        draft.drop("data.sft_packing", "it is of data.sft_data_path, which --config may give")
