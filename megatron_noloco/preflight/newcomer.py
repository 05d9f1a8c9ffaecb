"""What an invitation offers to a machine that joins, and the config that the machine writes."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config.agreed import divided, in_words
from megatron_noloco.config.data_block import SOURCES
from megatron_noloco.config.deepspeed_block import MICRO, STEPS, TRAIN
from megatron_noloco.config.parallel_block import ParallelConfig
from megatron_noloco.data.auto_tokenizer import build_tokenizer
from megatron_noloco.data.inputs import paths_at
from megatron_noloco.data.sources import STANDARD_LIBRARY
from megatron_noloco.data.tokenizer import write_copy
from megatron_noloco.errors import UserError
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import can_listen
from megatron_noloco.files import outside, write_text, writing
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.preflight.invitation import PRETRAINED, Invitation
from megatron_noloco.preflight.machine import check_machine, is_ready, verdict
from megatron_noloco.preflight.memory import fullest_stage
from megatron_noloco.preflight.plan import architecture_of_run, fits, plan_lines, plan_of
from megatron_noloco.settings import TCP


def offered(config: RunConfig) -> tuple[list[Any], dict[str, Any]]:
    """Return what a newcomer of a run must have itself (see `Invitation`), and the fields that it copies.

    The batch is given whole, however the layout divides it here.
    """
    shared, _ = divided(config.given())
    shared.pop(STEPS, None)
    shared |= {TRAIN: config.replica_batch, MICRO: config.micro_batch_size}
    needs = [name for name in SOURCES if getattr(config.data, name) not in (None, STANDARD_LIBRARY)]
    return needs + [PRETRAINED] * (config.training.pretrained is not None), shared


class Local(NamedTuple):
    """What is this machine's own.

    Attributes:
        folder: for config, key, tokenizer and the run.
        data: what is read, by field of the block `data`; "" for the field that the run has elsewhere.
        pretrained: the folder with the weights with which the run began.
        listen: see `FederationSettings`.
    """

    folder: Path
    data: Mapping[str, str]
    pretrained: str | None = None
    listen: str = "tcp://*:0"


def join_options(config: RunConfig, needs: Sequence[str]) -> list[str]:
    """Return the options of `join` for what a newcomer must have itself, with the paths of this machine."""
    options = []
    for name in needs:
        value = config.training.pretrained if name == PRETRAINED else getattr(config.data, name)
        path = _relative_to_here(value) if isinstance(value, str) else "PATH"
        if name == PRETRAINED:
            options += ["--pretrained", path]
        else:
            options += ["--data", path if name == needs[0] else f"{name}={path}"]
    return options


def _relative_to_here(path: str) -> str:
    """Return a path below the current folder without that folder, else the path."""
    return str(Path(path).relative_to(Path.cwd())) if Path(path).is_relative_to(Path.cwd()) else path


def check_local(needs: Sequence[str], local: Local) -> None:
    """Raise UserError where this machine lacks what it must have itself, or what is said of it is wrong."""
    if local.listen != "off" and not can_listen(local.listen):
        raise UserError(f'join: --listen: "{local.listen}" is neither "off" nor "tcp://HOST:PORT"')
    for name, path in _data(needs, local).items():
        if name not in SOURCES:
            raise UserError(f"join: --data {name}={path}: the fields are {', '.join(SOURCES)}")
        if name in ("text", "sft_data_path") and path != STANDARD_LIBRARY and not paths_at(Path(path)):
            raise UserError(f"join: --data {path}: there is no such file or folder")
    if local.pretrained is not None and not Path(local.pretrained).is_dir():
        raise UserError(f"join: --pretrained {local.pretrained}: there is no such folder")
    if {*needs} & {*SOURCES} and not local.data:
        raise UserError(f"join: --data is missing: what this machine reads (data.{needs[0]})")
    if PRETRAINED in needs and local.pretrained is None:
        raise UserError(
            "join: --pretrained is missing: the folder with the weights with which the run began, as elsewhere"
        )
    if local.folder.exists() and not (local.folder.is_dir() and not any(local.folder.iterdir())):
        config = local.folder / "config.json"
        what = ", and is no empty folder; give another --folder"
        if config.exists():
            start = f"`megatron-noloco train {config}` starts the job in it"
            what = f"; {start}; to join anew, remove the folder or give another --folder"
        raise UserError(f"join: {local.folder} is there already{what}")


def _data(needs: Sequence[str], local: Local) -> dict[str, str]:
    """Return what this machine reads, by field of the block `data`."""
    elsewhere = next((name for name in needs if name in SOURCES), "text")
    return {name or elsewhere: path for name, path in local.data.items()}


def check_member_file(invitation: Invitation) -> None:
    """Raise UserError where an invitation has ended, or its member file is not good."""
    Keys.of(invitation.member_file, "join: the invitation").identity(invitation.slot)


def write_job(invitation: Invitation, local: Local, tell: Callable[[str], object]) -> tuple[Path, int]:
    """Write config, member file and tokenizer; return the config's file, and how many ranks the job has.

    Raises UserError for a malformed config, for weights of another model, and where the folder cannot be written;
    the folder is then empty.

    Args:
        tell: is called with a line that says what is taken from the invitation, and what is not.
    """
    folder = local.folder.absolute()
    with writing(local.folder, "--folder"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return local.folder / "config.json", _write_job(invitation, local, folder, tell)
        except BaseException:  # else the folder would refuse the next try
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            raise


def _write_job(invitation: Invitation, local: Local, folder: Path, tell: Callable[[str], object]) -> int:
    raw, left_out = divided(invitation.config)
    tell(f"Taken from the invitation: {in_words(raw)}")
    if left_out:
        tell(outside(f"Left out, since each machine has its own: {', '.join(left_out)}"))
    for block in ("training", "federation", "data"):
        raw.setdefault(block, {})
    raw["training"] |= {"output_dir": str(folder / "run")}
    if local.pretrained is not None:
        raw["training"]["pretrained"] = _from_anywhere(local.pretrained)
    rendezvous = invitation.folder or TCP + ",".join(invitation.addresses)
    raw["federation"] |= {"rendezvous": rendezvous, "listen": local.listen}
    if local.data:
        raw["data"].pop("text", None)
    for name, path in _data(invitation.needs, local).items():
        raw["data"][name] = _from_anywhere(path)
    if invitation.tokenizer:
        write_copy(invitation.tokenizer, copy := folder / "tokenizer")
        raw["data"]["tokenizer_model"] = str(copy)
    member_file = folder / "member.pem"
    write_private(member_file, invitation.member_file)
    raw["federation"]["key_file"] = str(member_file)
    try:
        config, ranks = proposed(RunConfig(**raw), memory_of_gpus())
        if config.training.pretrained is not None:
            tokenizer = build_tokenizer(config.data.tokenizer)
            architecture = config.architecture(tokenizer.vocab_size)
            model = ModelFolder(Path(config.training.pretrained))
            model.check_fits(architecture, tokenizer, config.data.cache)
    except UserError as error:  # which quotes values
        raise UserError("\n".join(outside(f"join: {line}") for line in str(error).splitlines())) from None
    write_text(folder / "config.json", json.dumps(config.given(), indent=2) + "\n")
    return ranks


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        os.fchmod(file.fileno(), 0o600)  # of a file that was there
        file.write(text)


def _from_anywhere(path: str) -> str:
    """Return the same path for a job that starts in another folder."""
    return path if path == STANDARD_LIBRARY else str(Path(path).expanduser().absolute())


def memory_of_gpus() -> list[int]:
    """Return the bytes of memory of each GPU of this machine."""
    gpus = range(torch.cuda.device_count())
    return [torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus]


def proposed(config: RunConfig, gpus: Sequence[int]) -> tuple[RunConfig, int]:
    """Return a config with a layout for the GPUs of this machine, and the number of its ranks.

    The smallest tensor-parallel size that fits into their memory; the other GPUs are data-parallel, as many as
    divide the batch, which stays what it is. Without GPUs a single rank.

    Args:
        gpus: bytes of memory of each.
    """
    batch, micro = config.replica_batch, config.micro_batch_size
    best, ranks = config, 1
    for tp in (size for size in (1, 2, 4, 8) if size <= len(gpus)):
        dp = max(size for size in range(1, len(gpus) // tp + 1) if batch % (micro * size) == 0)
        has_experts = config.model.own("num_moe_experts") is not None
        sizes = ParallelConfig(
            tensor_model_parallel_size=tp, data_parallel_size=dp, sequence_parallel=has_experts and tp > 1
        )
        try:
            found = config.replace(
                parallel=sizes, gradient_accumulation_steps=batch // (micro * dp), train_batch_size=None
            )
        except UserError:  # heads or columns do not divide into tp
            continue
        best, ranks = found, tp * dp
        memory = fullest_stage(found, architecture_of_run(found), found.topology(ranks))
        if fits(memory, min(gpus) / 1e9):
            break
    return best, ranks


def looked_at(path: Path) -> tuple[bool, list[str]]:
    """Return whether this machine is ready for the job of a config, and what `doctor` and `plan` say of it."""
    findings, config = [*check_machine(is_separate=True)], load_config(path)
    topology = config.topology(config.parallel.replica_size)
    plan = plan_of(config, architecture_of_run(config), topology)
    return is_ready(findings), [
        "",
        "This machine, as `megatron-noloco doctor` says:",
        *map(str, findings),
        verdict(findings),
        "",
        "The job, as `megatron-noloco plan` says; with --bandwidth and --latency also what rounds cost:",
        *plan_lines(plan),
    ]
