"""One line with which a machine joins a federation: what it lets in, and what it does not."""

import errno
import io
import itertools
import json
import os
import random
import re
import socket
import string
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, redirect_stderr, suppress
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from megatron_noloco.federation.inquiry import known_addresses
from pydantic import ValidationError

from megatron_noloco import __version__
from megatron_noloco.cli import invitation
from megatron_noloco.cli.main import main
from megatron_noloco.config import RunConfig, load_config
from megatron_noloco.config.optimizer_block import OPTIMIZERS, SCHEDULES
from megatron_noloco.config.run_config import File
from megatron_noloco.federation.keys import Keys, fingerprint_of
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.rendezvous import Seeds, SharedFolder, split
from megatron_noloco.fields import fields_of
from megatron_noloco.invitation import desk
from megatron_noloco.invitation.agreed import AGREED
from megatron_noloco.invitation.desk import ABOUT, WELCOME, About, Desk, Welcome, open_desk
from megatron_noloco.invitation.newcomer import (
    Local,
    Visit,
    arguments_of,
    check_local,
    proposed,
    write_job,
)
from megatron_noloco.invitation.ticket import Ticket, line_of, new_secret, ticket_in
from megatron_noloco.preflight import machine
from megatron_noloco.preflight.machine import Finding
from tests.integration.tiny import tiny
from tests.unit.federated import RUN, connected, until
from tests.unit.test_tokenizers import write_tokenizer

TICKET = Ticket(__version__, ["10.0.0.1:29700"], "0f" * 32, new_secret(b"key", 60.0))
THERE = {0: "tcp://10.0.0.1:5000", 2: ""}


def raw(**more: Any) -> dict[str, Any]:
    federation = {"rendezvous": "tcp://10.0.0.1:5000", "key_file": "key"}
    return tiny(more, tiny({"federation": federation, "data": {"text": "python-stdlib"}}))


class Invites:
    """A desk that answers, and the tickets to it."""

    def __init__(self, folder: Path, content: dict[str, Any]) -> None:
        self.key_file, self.told = folder / "key", list[str]()
        Keys.make(self.key_file)
        content["federation"]["key_file"] = str(self.key_file)
        self.desk = Desk(
            content, self.key_file.read_bytes(), lambda: THERE, folder / "used", self.told.append
        )
        self.server = open_desk(self.desk, self.key_file, "127.0.0.1", 0)

    def ticket(self, seconds: float = 60.0, **changes: Any) -> Ticket:
        fields = {
            "addresses": [f"127.0.0.1:{self.server.server_address[1]}"],
            "fingerprint": fingerprint_of(self.key_file),
            "secret": new_secret(self.key_file.read_bytes(), seconds),
        }
        return replace(TICKET, **fields | changes)


@contextmanager
def inviting(folder: Path, **more: Any) -> Iterator[Invites]:
    invites = Invites(folder, raw(**more))
    thread = threading.Thread(target=invites.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    with closing(invites.server.socket):
        yield invites
        invites.server.shutdown()
        thread.join()


def test_no_line_but_the_one_that_was_printed_is_taken() -> None:
    line, draw = line_of(TICKET), random.Random(1)
    assert ticket_in(line) == TICKET
    mutants = {line[:cut] for cut in range(0, len(line), 7)} | {line + "=", line + "A", line.lower(), ""}
    while len(mutants) < 300:
        place = draw.randrange(len(line))
        mutants.add(line[:place] + draw.choice(string.printable) + line[place + draw.randrange(2) :])
    changed = {mutant for mutant in mutants if re.sub("[^a-zA-Z0-9_-]", "", mutant) != line}
    assert len(changed) > 200
    for mutant in changed:
        with pytest.raises(ValueError, match=r"^join: (this is no|a part of the) invitation.*\Z"):
            ticket_in(mutant)
    for mutant in mutants - changed:  # with a space or a sign more
        with suppress(ValueError):
            assert ticket_in(mutant) == TICKET


@pytest.mark.parametrize(
    "mail",
    [
        "megatron-noloco join {line}\n",
        "(.venv) me@host:~$ megatron-noloco join '{line}' --start\n",
        "Hello,\n\nhere it is:\n\n{wrapped}\n\nBest regards,\nA.\n",
        "On Friday A. wrote:\n> Paste this:\n> {quoted}\n>\n> Best regards\n",
        ">> {twice}\r\n",
        "\u201c{line}\u201d",
        "<{line}>.",
        "{soft}\n",
    ],
)
def test_an_invitation_is_found_in_a_mail(mail: str) -> None:
    line = line_of(TICKET)
    pieces = [line[at : at + 70] for at in range(0, len(line), 70)]
    text = mail.format(
        line=line, wrapped="\n".join(pieces), quoted="\n> ".join(pieces), twice="\r\n>> ".join(pieces),
        soft="=\n".join(pieces),
    )  # fmt: skip
    assert ticket_in(text) == TICKET
    with pytest.raises(ValueError, match="a part of the invitation is missing or changed: copy all from"):
        ticket_in(text.replace(pieces[-1], ""))
    with pytest.raises(ValueError, match='this is no invitation, which begins with "noloco-"'):
        ticket_in(text.replace("noloco-", ""))


@pytest.mark.parametrize("closed", [True, False])
def test_all_lines_that_are_pasted_are_read(closed: bool) -> None:
    """Also where stdin stays open, as at a terminal."""
    (reads, writes), stdin = os.pipe(), os.dup(0)
    os.dup2(reads, 0)
    try:
        os.write(writes, b"> noloco-\n> abc\n")
        if closed:
            os.close(writes)
        assert invitation._pasted() == "> noloco-\n> abc\n"
    finally:
        os.dup2(stdin, 0)
        for descriptor in (reads, stdin, *[writes] * (not closed)):
            os.close(descriptor)


def test_a_newcomer_gets_what_it_needs_once(tmp_path: Path) -> None:
    with inviting(tmp_path, training={"output_dir": "/theirs"}, parallel={"replicas": 1}) as invites:
        ticket = invites.ticket()
        with Visit(ticket) as visit:
            about, link = visit.about(), visit.measure()
            assert about == About([], False)
            assert link.rate > 0
            assert link.latency > 0
            welcome = visit.welcome()
            with pytest.raises(ValueError, match="join: this invitation was used already"):
                visit.welcome()
        assert welcome.slot == 1, "0 and 2 are known"
        assert invites.told == ["127.0.0.1 takes slot 1"]
        with pytest.raises(ValueError, match="used already"), Visit(ticket) as again:
            again.about()
        path, ranks = write_job(welcome, about, Local(tmp_path / "joined", {}), (told := []).append)
        (line,) = told
        assert line.startswith("Taken from the machine that invites: ")
        assert "model.num_layers, " in line
        config = load_config(path)
        assert ranks == 1
        assert config.federation.rendezvous == "tcp://10.0.0.1:5000"
        assert config.training.output_dir == str(tmp_path / "joined" / "run")
        key = Path(str(config.federation.key_file))
        assert key.read_bytes() == invites.key_file.read_bytes()
        assert key.stat().st_mode & 0o077 == 0
        with pytest.raises(ValueError, match="is there already, and is no empty folder"):
            check_local(about, Local(tmp_path / "joined", {}))
        with Visit(invites.ticket()) as visit:
            assert visit.welcome().slot == 3
        with Visit(invites.ticket()) as visit, pytest.raises(ValueError, match=r"all 4 slots .* are taken"):
            visit.welcome()
        again = new_secret(invites.key_file.read_bytes(), 60.0, slot=3)
        with Visit(invites.ticket(secret=again)) as visit:
            assert visit.welcome().slot == 3, "of a machine that does not come back"


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"version": "0.0.1"}, f"the other side has megatron_noloco 0.0.1, this machine {__version__}"),
        ({"fingerprint": "00" * 32}, "somebody else answers there, without the key of the federation"),
        ({"secret": new_secret(b"another key", 60.0)}, "of another federation, or its key is another one"),
        ({"seconds": -1.0}, "this invitation has expired"),
        ({"addresses": ["127.0.0.1:1"]}, "nobody answers .*Connection refused"),
    ],
)
def test_others_are_told_why_they_get_nothing(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with (
        inviting(tmp_path) as invites,
        pytest.raises(ValueError, match=f"^join: .*{line}.*\\Z"),
        Visit(invites.ticket(**changes)) as visit,
    ):
        visit.about()


def test_both_sides_learn_that_the_machine_that_invites_fails(tmp_path: Path) -> None:
    """Here its disk takes no file; the invitation stays good."""
    (tmp_path / "used").touch()
    with inviting(tmp_path) as invites:
        with Visit(invites.ticket()) as visit, pytest.raises(ValueError, match=r"^join: .* File exists: "):
            visit.welcome()
        (line,) = invites.told
        assert line.startswith("127.0.0.1 gets nothing: ")
        (tmp_path / "used").unlink()
        with Visit(invites.ticket()) as visit:
            assert visit.welcome().slot == 1


def test_a_stranger_gets_nothing_and_holds_nobody_up(tmp_path: Path) -> None:
    """One that says nothing, and one without TLS."""
    with inviting(tmp_path) as invites:
        place = invites.server.server_address[:2]
        with socket.create_connection(place), socket.create_connection(place) as other:
            other.sendall(b"GET /welcome HTTP/1.1\r\n\r\n")
            with suppress(ConnectionResetError):
                assert b"200" not in other.recv(100)
            with Visit(invites.ticket()) as visit:
                assert visit.about() == About([], False)


def test_strangers_start_a_bounded_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ones wait; a newcomer has its turn when they have gone."""
    monkeypatch.setattr(desk, "_MOST_CONNECTIONS", 2)
    with inviting(tmp_path) as invites, ExitStack() as strangers:
        before, place = threading.active_count(), invites.server.server_address[:2]
        for _ in range(20):
            strangers.enter_context(socket.create_connection(place))
        until(lambda: threading.active_count() >= before + 2)
        time.sleep(0.2)
        assert threading.active_count() == before + 2
        strangers.close()
        with Visit(invites.ticket()) as visit:
            assert visit.about() == About([], False)
        until(lambda: threading.active_count() == before)


@pytest.mark.parametrize("has_ipv6", [True, False])
def test_a_desk_listens_at_all_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ipv6: bool
) -> None:
    """IPv4 too where the system would keep the two apart; and where there is no IPv6."""
    made = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *more: Any, **options: Any) -> socket.socket:
        if family == socket.AF_INET6 and not has_ipv6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        found = made(family, *more, **options)
        if family == socket.AF_INET6:  # as sysctl net.ipv6.bindv6only=1 does
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        return found

    Keys.make(tmp_path / "key")
    monkeypatch.setattr(socket, "socket", without_ipv6)
    server = open_desk(Mock(), tmp_path / "key", "*", 0)
    monkeypatch.setattr(socket, "socket", made)
    with server:
        for host in ("127.0.0.1", "::1")[: 1 + has_ipv6]:
            socket.create_connection((host, server.server_address[1])).close()


def test_a_key_that_was_replaced_is_named(tmp_path: Path) -> None:
    Keys.make(tmp_path / "new")
    keys = Keys.make(tmp_path / "key")
    with redirect_stderr(io.StringIO()), connected(tmp_path, 1, slots=2, keys=keys) as (job,):
        place = split(job.address.endpoint)
        network = Network(Seeds([place]), RUN, None, Keys.read(tmp_path / "new"))
        with pytest.raises(ValueError, match=f"the job at {job.address.endpoint} has another key"):
            known_addresses(network)


def test_a_machine_with_a_problem_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "check_gpus", lambda: [Finding("GPU", "problem", "broken", "mend it")])
    started = Mock()
    monkeypatch.setattr(os, "execv", started)
    folder = tmp_path / "joined"
    with inviting(tmp_path) as invites:
        assert main(["join", line_of(invites.ticket()), "--start", "--folder", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Not started: first mend the problem above. Then start it with: sh {folder}/start.sh"
    assert "Fix first: GPU: broken. mend it" in lines
    assert not started.called


def test_what_is_a_machine_s_own_is_asked_of_it(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path / "theirs")
    data = {
        "text": "/their/text", "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tokenizer),
    }  # fmt: skip
    with inviting(tmp_path, data=data) as invites, Visit(invites.ticket()) as visit:
        about = visit.about()
        assert about == About(["text"], False)
        with pytest.raises(ValueError, match=r"--data is missing: what this machine reads \(data.text\)"):
            check_local(about, Local(tmp_path / "joined", {}))
        welcome = visit.welcome()
    assert "/their" not in json.dumps(welcome.config)
    (mine := tmp_path / "mine").mkdir()
    local = Local(tmp_path / "joined", {"": str(mine)})
    check_local(about, local)
    config = load_config(write_job(welcome, about, local, [].append)[0])
    assert config.data.text == str(mine)
    copied = Path(str(config.data.tokenizer_model)) / "tokenizer.json"
    assert copied.read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("dp", [1, 2])
def test_the_batch_of_a_newcomer_is_that_of_the_run(tmp_path: Path, dp: int) -> None:
    """However the layout of the machine that invites divides it."""
    more = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    with inviting(tmp_path, parallel={"data_parallel_size": dp}, **more) as invites:
        with Visit(invites.ticket()) as visit:
            about, welcome = visit.about(), visit.welcome()
        config = load_config(write_job(welcome, about, Local(tmp_path / "joined", {}), [].append)[0])
    assert (config.replica_batch, config.micro_batch_size) == (6 * dp, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"slot": -1},
        {"slot": 4096},
        {"rendezvous": "file:///root/.ssh"},
        {"rendezvous": "tcp://a:1\x1b[2J"},
        {"key": "k" * 20_000},
        *(
            {"tokenizer": {name: ""}}
            for name in ("../escaped", "/etc/passwd", "a/../../b.json", "run.sh", "")
        ),
        {"tokenizer": {"additional_chat_templates/../../x.jinja": ""}},
        {"tokenizer": {"tokenizer.json": "\x1b"}},
    ],
    ids=lambda changes: str(changes)[:50],
)
def test_an_answer_that_names_a_place_outside_is_refused(changes: dict[str, Any]) -> None:
    right = {"slot": 1, "config": {}, "rendezvous": "tcp://a:1", "key": "", "tokenizer": {}}
    assert WELCOME.validate_json(json.dumps(right)).slot == 1
    with pytest.raises(ValidationError):
        WELCOME.validate_json(json.dumps(right | changes))
    with pytest.raises(ValidationError):
        ABOUT.validate_json(json.dumps({"data": ["tokenizer_model"], "pretrained": False}))


# Each machine has these of its own. A new field is here, or among those that an inviter chooses: then think of
# what a hostile one would choose.
OWN_OF_BLOCK = {
    "checkpoint": "async_save keep_last load",
    "data": "data_path sft_data_path text tokenizer_model train_data_path valid_data_path",
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
    blocks = {"optimizer": OPTIMIZERS, "scheduler": SCHEDULES}
    params = {
        f"{block}.params.{name}" for block, kinds in blocks.items() for kind in kinds.values()
        for name in kind.model_fields
    }  # fmt: skip
    return {name for name, _ in fields_of(File)} - {f"{block}.params" for block in blocks} | params


def changed(config: dict[str, Any], name: str, value: Any) -> None:
    *blocks, last = name.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[last] = value


def test_each_field_of_a_config_is_taken_from_the_inviter_or_a_machine_s_own() -> None:
    agreed = {".".join(path) for path in AGREED}
    assert agreed.isdisjoint(OWN)
    assert agreed | {*OWN} == schema()


@pytest.fixture
def from_inviter(tmp_path: Path) -> Callable[[dict[str, Any]], tuple[dict[str, Any], list[str]]]:
    """Writes a job from a config that was sent; returns the config that is there then, and what is told."""
    key, numbers = Keys.make(tmp_path / "key") and (tmp_path / "key").read_text(), itertools.count()

    def written(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        told, local = list[str](), Local(tmp_path / f"joined_{next(numbers)}", {"text": str(tmp_path)})
        path, _ = write_job(Welcome(1, config, "tcp://a:1", key, {}), About([], False), local, told.append)
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


@pytest.mark.parametrize("name", sorted(".".join(path) for path in AGREED))
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
    check_local(About(["text"], False), local)
    with pytest.raises(ValueError, match=re.escape(line)):
        check_local(About(["text"], False), local._replace(**changes))


@pytest.mark.parametrize(
    "options",
    ["--port 80000", "--port -1", "--address 127.0.0.1:29748", "--address tcp://127.0.0.1", "--valid soon"],
)
def test_an_option_that_is_wrong_is_refused(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["invite", "my-run.json", *options.split()])
    assert capsys.readouterr().err.count("\n") == 1


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
        found, count = proposed(base, gpus)
        config = RunConfig.from_dict(found)
        assert count == ranks, gpus
        assert config.replica_batch == 6
        assert config.parallel.tensor_model_parallel_size == tp, gpus
        assert config.parallel.data_parallel_size == dp, gpus
    assert arguments_of(Path("c"), 1, 2) == ["megatron_noloco", "train", "c", "--replica", "2"]
    assert arguments_of(Path("c"), 4, 2)[:3] == ["torch.distributed.run", "--nproc-per-node", "4"]


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_program_that_is_no_job_learns_which_jobs_there_are(tmp_path: Path, encrypted: bool) -> None:
    keys = Keys.make(tmp_path / "key") if encrypted else None
    with (
        redirect_stderr(io.StringIO()) as output,
        connected(tmp_path, 2, slots=3, keys=keys) as (first, second),
    ):
        expected = {0: first.address.endpoint, 1: second.address.endpoint}
        folder = Network(SharedFolder(tmp_path, RUN), RUN, None, keys)
        assert known_addresses(folder) == expected
        places = [("127.0.0.1", 1), split(second.address.endpoint)]  # nobody is at the first
        until(lambda: known_addresses(Network(Seeds(places), RUN, None, keys)) == expected)
        assert known_addresses(Network(Seeds(places), RUN + 1, None, keys)) == {}, "they are of another run"
        until(lambda: "replica 1: a program that invites is refused: its job differs" in output.getvalue())
        assert first.service.peers.directory.addresses.keys() == {0, 1}


def test_the_line_does_not_stay_in_the_list_of_processes(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        line = line_of(replace(TICKET, addresses=[address]))
        command = ["-m", "megatron_noloco", "join", line, "--folder", str(tmp_path / "joined")]
        with subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            silent.settimeout(60)
            with silent.accept()[0] as there:
                shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
                assert line.encode() not in shown
                assert TICKET.secret.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
                assert b"joined" in shown
                there.close()
            output = process.communicate(timeout=60)[0].decode()
        assert process.returncode == 2
        assert output.startswith("join: nobody answers (")
        assert line not in output
        assert output.count("\n") == 1
