"""What a machine that joins takes from the job that invites, and writes; the commands invite and join."""

import asyncio
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_noloco import __version__
from megatron_noloco.cli import invite
from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config.agreed import divided, is_taken
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.data.tokenizer import build_tokenizer
from megatron_noloco.federation.dialling import Carriers
from megatron_noloco.federation.invitation import Invitations, JoinBundle, JoinRequirements
from megatron_noloco.federation.joining import Ticket, line_of, ticket_in
from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.messages import Address
from megatron_noloco.federation.node import Node
from megatron_noloco.federation.tcp import TcpCarrier
from megatron_noloco.fields import fields_of
from megatron_noloco.preflight import machine
from megatron_noloco.preflight.machine import Finding
from megatron_noloco.preflight.newcomer import Local, check_local, offered, proposed, write_job
from megatron_noloco.training.prepare import network_for
from tests.integration.tiny import tiny, write_config
from tests.unit.test_tokenizers import write_tokenizer

NOTHING = JoinRequirements([], False)


def raw(**more: Any) -> dict[str, Any]:
    federation = {"rendezvous": "tcp://10.0.0.1:5000", "key_file": "key"}
    return tiny(more, tiny({"federation": federation, "data": {"text": "python-stdlib"}}))


def joined(
    folder: Path, content: dict[str, Any], **local: Any
) -> tuple[RunConfig, RunConfig, JoinRequirements]:
    """Return the config of a job with this file, that of a machine that joins it, and what this one must have."""
    keys = Keys.make(folder / "key")
    content["federation"]["key_file"] = str(folder / "key")
    config = RunConfig(**content)
    offer = offered(config, build_tokenizer(config.data.tokenizer), keys.fingerprint)
    bundle = JoinBundle(1, offer.config, "tcp://10.0.0.1:5000", offer.key, offer.tokenizer)
    here = Local(folder / "joined", **{"data": {}} | local)
    told = list[str]()
    return (
        config,
        load_config(write_job(bundle, offer.requirements, here, told.append)[0]),
        offer.requirements,
    )


@pytest.mark.parametrize("closed", [True, False])
def test_all_lines_that_are_pasted_are_read(closed: bool) -> None:
    """Also where stdin stays open, as at a terminal."""
    (reads, writes), stdin = os.pipe(), os.dup(0)
    os.dup2(reads, 0)
    try:
        os.write(writes, b"> noloco-\n> abc\n")
        if closed:
            os.close(writes)
        assert invite._pasted() == "> noloco-\n> abc\n"
    finally:
        os.dup2(stdin, 0)
        for descriptor in (reads, stdin, *[writes] * (not closed)):
            os.close(descriptor)


@contextmanager
def running(config: RunConfig, told: Callable[[str], object]) -> Iterator[str]:
    """Run a job that answers newcomers, in a thread; give its endpoint."""
    network, started, ends = network_for(config), threading.Event(), asyncio.Event()
    loop, listener = asyncio.new_event_loop(), socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"

    async def run() -> None:
        carriers = Carriers(TcpCarrier(network.keys, listener))
        node = Node(0, Address(endpoint, 1), network.member, carriers)
        node.warn = told
        assert network.keys is not None
        offer = partial(offered, config, build_tokenizer(config.data.tokenizer), network.keys.fingerprint)
        path = Path(config.training.output_dir) / "invitations.json"
        invitations = Invitations(offer, node, path)
        node.strangers, node.invites = invitations.welcome, invitations.invite
        await node.start()
        started.set()
        await ends.wait()
        await node.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        while not started.wait(timeout=0.1):
            assert thread.is_alive(), "it has failed"
        yield endpoint
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(ends.set)
        thread.join()
        loop.close()


def test_two_commands_lead_to_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "check_gpus", lambda: [Finding("GPU", "problem", "broken", "mend it")])
    monkeypatch.setattr(os, "execv", started := Mock())
    Keys.make(tmp_path / "key")
    content = raw(training={"output_dir": str(tmp_path / "run")})
    content["federation"]["key_file"] = str(tmp_path / "key")
    path, told, folder = write_config(tmp_path, content), list[str](), tmp_path / "joined"
    with running(load_config(path), told.append) as endpoint:
        assert main(["invite", str(path), "--at", endpoint.removeprefix("tcp://"), "--valid", "1h"]) == 0
        line, hint = capsys.readouterr()
        assert line.count("\n") == 1
        assert f"while replica 0 at {endpoint} runs" in hint
        assert main(["join", line, "--start", "--folder", str(folder)]) == 1
    assert told == ["a machine joins with an invitation, and takes slot 1"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Taken from the machine that invites: ")
    assert "Fix first: GPU: broken. mend it" in lines, "so it is not started"
    assert lines[-1] == f"Not started: first mend the problem above. Then start it with: sh {folder}/start.sh"
    assert not started.called
    config = load_config(folder / "config.json")
    assert config.federation.rendezvous == endpoint
    assert config.training.output_dir == str(folder / "run")
    key = Path(str(config.federation.key_file))
    assert key.read_bytes() == (tmp_path / "key").read_bytes()
    assert key.stat().st_mode & 0o077 == 0
    with pytest.raises(ValueError, match="is there already, and is no empty folder"):
        check_local(NOTHING, Local(folder, {}))
    assert main(["invite", str(path), "--at", endpoint.removeprefix("tcp://")]) == 2, "the job has ended"
    assert f"invite: no job makes an invitation (nobody answers at {endpoint}: " in capsys.readouterr().err


def test_a_key_that_was_replaced_is_named_wherever_it_is_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The job runs on with the key that it has read."""
    (tmp_path / "old").mkdir()
    Keys.make(tmp_path / "key")
    content = raw(training={"output_dir": str(tmp_path / "run")})
    content["federation"]["key_file"] = str(tmp_path / "key")
    path, told = write_config(tmp_path, content), list[str]()
    with running(load_config(path), told.append) as endpoint:
        at = ["invite", str(path), "--at", endpoint.removeprefix("tcp://")]
        assert main(at) == 0
        line = capsys.readouterr().out
        (tmp_path / "key").rename(tmp_path / "old" / "key")
        Keys.make(tmp_path / "key")
        assert main(at) == 2
        assert f"the process at {endpoint} has another key" in capsys.readouterr().err
        assert main(["join", line, "--folder", str(tmp_path / "joined")]) == 2
        replaced = "the key file was replaced, and this job still has the key before: start all jobs again"
        assert f"join: the job that invites cannot let anybody in: {replaced}" in capsys.readouterr().err
        assert told == [f"a machine with an invitation gets nothing: {replaced}"]
    with running(load_config(path), told.append) as endpoint:
        ticket = replace(ticket_in(line), endpoint=endpoint)
        assert main(["join", line_of(ticket), "--folder", str(tmp_path / "joined")]) == 2
        assert f"join: the process at {endpoint} has another key; an invitation is" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--serve", "--port 29700", "--address first"])
def test_the_server_of_its_own_is_no_longer_needed(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invite", "my-run.json", *option.split()]) == 2
    assert "no longer needed: a running job answers, at its own port" in capsys.readouterr().err


@pytest.mark.parametrize("options", ["--at 127.0.0.1", "--at tcp://127.0.0.1:1", "--valid soon"])
def test_an_option_that_is_wrong_is_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["invite", "my-run.json", *options.split()])
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_a_machine_s_own_is_asked_of_it(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "theirs")
    data = {
        "text": "/their/text", "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer),
    }  # fmt: skip
    (mine := tmp_path / "mine").mkdir()
    _, config, requirements = joined(tmp_path, raw(data=data), data={"": str(mine)})
    assert requirements == JoinRequirements(["text"], False)
    with pytest.raises(ValueError, match=r"--data is missing: what this machine reads \(data.text\)"):
        check_local(requirements, Local(tmp_path / "other", {}))
    assert "/their" not in json.dumps(config.to_dict())
    assert config.data.text == str(mine)
    copied = Path(str(config.data.tokenizer_model)) / "tokenizer.json"
    assert copied.read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("recipe", ["paper", None])
def test_a_newcomer_has_the_run_s_settings(tmp_path: Path, dp: int, recipe: str | None) -> None:
    """All that jobs share is as the job that invites has it, and the batch is whole, whatever its layout."""
    more: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    if recipe:
        more["noloco"] = {"recipe": recipe}
    theirs, own, _ = joined(tmp_path, raw(parallel={"data_parallel_size": dp}, **more))
    assert (own.replica_batch, own.micro_batch_size) == (6 * dp, 2)
    batch = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
    shared = [divided(config.to_dict())[0] for config in (theirs, own)]
    assert shared[0] == {**shared[1], **{name: shared[0][name] for name in batch}}


# Each machine has these of its own. A new field is here, or among those that an inviter chooses: then think of
# what a hostile one would choose.
OWN_OF_BLOCK = {
    "checkpoint": "async_save keep_last load",
    "data": "cache data_path sft_data_path text tokenizer_model train_data_path valid_data_path",
    "evaluation": "mean_model",
    "federation": "advertise encryption key_file leave_seconds listen rendezvous site",
    "noloco": "enabled most_waiting routing sites transport",
    "parallel": "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split data_parallel_size "
    "expert_model_parallel_size num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "pipeline_model_parallel_size replicas sequence_parallel tensor_model_parallel_size "
    "virtual_pipeline_model_parallel_size",
    "tensorboard": "enabled",
    "training": "exit_duration_minutes output_dir peak_tflops pretrained",
    "wandb": "enabled group project team",
}
OWN = [f"{block}.{name}" for block, names in OWN_OF_BLOCK.items() for name in names.split()]
HARMFUL = (
    "/root/.ssh/id",
    "../../etc",
    "$(touch /tmp/x); rm -rf ~",
    "http://198.51.100.7/x",
    "\x1b[2J\nready",
)


def schema() -> set[str]:
    """The dotted names of all fields of a config, the params of each optimizer and schedule among them."""
    blocks: dict[str, Any] = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}
    params = {
        f"{block}.params.{name}" for block, kinds in blocks.items() for kind in kinds.values()
        for name in kind.model_fields
    }  # fmt: skip
    types = {f"{block}.type" for block in blocks}
    return {name for name, _ in fields_of(RunConfig)} - blocks.keys() | types | params


def changed(config: dict[str, Any], name: str, value: Any) -> None:
    *blocks, last = name.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[last] = value


def test_each_field_is_offered_or_own() -> None:
    assert {name for name in schema() if not is_taken((*name.split("."),))} == {*OWN}
    assert not any(is_taken((name,)) for name in (*RunConfig.model_fields, "hooks") if name not in schema())


@pytest.fixture
def from_inviter(tmp_path: Path) -> Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]:
    """Writes a job from a config that was sent; returns the config that is there then, and what is told."""
    Keys.make(tmp_path / "key")
    key, numbers = (tmp_path / "key").read_text(), itertools.count()

    def written(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        told, local = list[str](), Local(tmp_path / f"joined_{next(numbers)}", {"text": str(tmp_path)})
        path, _ = write_job(JoinBundle(1, config, "tcp://a:1", key, {}), NOTHING, local, told.append)
        return json.loads(path.read_text()), told

    return written


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_hostile_inviter_chooses_nothing_beyond_the_list(
    from_inviter: Callable[..., tuple[dict[str, Any], list[str]]], harm: str
) -> None:
    """Each other field is set at once, and so are fields that no config has."""
    invented = {
        "federation.notice_command": harm,
        "hooks": {"start": harm},
        harm: harm,
        "model": {harm: [harm]},
    }
    sent = deepcopy(raw())
    honest, _ = from_inviter(sent)
    for name in (*OWN, *invented):
        changed(sent, name, invented.get(name, harm))
    sent["model"] |= raw()["model"]
    sent["wandb"]["enabled"] = True
    found, told = from_inviter(sent)
    assert [told[1].startswith("Left out, since each machine has its own: "), len(told)] == [True, 2]
    assert all(line.isascii() and line.isprintable() for line in told)
    own = str(Path(found["federation"]["key_file"]).parent)
    assert json.dumps(found).replace(own, "") == json.dumps(honest).replace(own[:-1] + "0", "")
    assert harm not in str(found)


@pytest.mark.parametrize("name", sorted(name for name in schema() if is_taken((*name.split("."),))))
def test_no_field_that_an_inviter_chooses_takes_free_text(
    from_inviter: Callable[..., tuple[dict[str, Any], list[str]]], name: str
) -> None:
    for harm in HARMFUL:
        sent = deepcopy(raw())
        changed(sent, name, harm)
        with pytest.raises(ValueError, match=r"^join: ") as refused:
            from_inviter(sent)
        assert all(line.isascii() and line.isprintable() for line in str(refused.value).split("\n"))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"data": {"txt": "/tmp"}}, "--data txt=/tmp: the fields are text, "),
        ({"data": {"": "/no/such"}}, "--data /no/such: there is no such file or folder"),
        ({"data": {"sft_data_path": "/no/such"}}, "--data /no/such: there is no such file or folder"),
        ({"listen": "foo"}, '--listen: "foo" is neither "off" nor "tcp://HOST:PORT"'),
        ({"pretrained": "/no/such"}, "--pretrained /no/such: there is no such folder"),
        ({"folder": Path(__file__)}, "is there already, and is no empty folder"),
        ({"folder": Path(__file__).parent}, "is there already, and is no empty folder"),
    ],
)
def test_a_mistake_is_found_before_the_invitation_is_used(
    tmp_path: Path, changes: dict[str, Any], line: str
) -> None:
    local = Local(tmp_path / "joined", {"": str(tmp_path)})
    check_local(JoinRequirements(["text"], False), local)
    with pytest.raises(ValueError, match=re.escape(line)):
        check_local(JoinRequirements(["text"], False), local._replace(**changes))


def test_the_batch_stays_whatever_layout_is_proposed() -> None:
    base = raw(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    little, much = 1_000, 80 * 10**9
    expected = {
        (): (1, 1, 1),
        (much,): (1, 1, 1),
        (much,) * 2: (1, 1, 1),  # two do not divide three microbatches
        (much,) * 4: (3, 1, 3),
        (little,) * 4: (2, 2, 1),  # which does not fit either
    }
    for gpus, (ranks, tp, dp) in expected.items():
        config, count = proposed(RunConfig(**base), gpus)
        assert count == ranks, gpus
        assert config.replica_batch == 6
        assert config.parallel.tensor_model_parallel_size == tp, gpus
        assert config.parallel.data_parallel_size == dp, gpus


def test_the_line_does_not_stay_in_the_list_of_processes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        ticket = Ticket(__version__, endpoint, "0f" * 32, "a1" * 16)
        line = line_of(ticket)
        command = ["-m", "megatron_noloco", "join", line, "--folder", str(tmp_path / "joined")]
        with subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            silent.settimeout(60)
            with silent.accept()[0] as there:
                shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                assert line.encode() not in shown
                assert ticket.secret.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
                assert b"joined" in shown
                there.close()
            output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 2
        assert output.startswith(f"join: the process at {endpoint} is no job with a key")
        assert line not in output
        assert output.count("\n") == 1
