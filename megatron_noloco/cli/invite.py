"""The commands `invite` and `join`: one line with which another machine joins a federation."""

import argparse
import asyncio
import os
import select
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_noloco.cli.options import Commands, add_command, duration, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, write_text
from megatron_noloco.job.leaving import FAILURE

if TYPE_CHECKING:
    from megatron_noloco.federation.invitation import Made, Wish
    from megatron_noloco.federation.network import Network

_STDIN = "-"
_HELP = """\
The line holds the address of a running job, the fingerprint of the federation's key, the version, and a secret
that is good for one machine. Give the line to the other side over a channel that you trust: whoever uses it
first joins. The job answers at its own port while it runs, also after a restart."""
_GONE = "invite: --serve, --port and --address are no longer needed: a running job answers, at its own port"
_JOIN = """\
LINE is the line that `megatron-noloco invite` printed, as it was copied: wrapped, quoted, or with text around it;
"-" reads it from stdin. As an argument the line is in the list of processes for an instant; then this command
hides it there, but not in the history of the shell."""
_LONGEST_TEXT = 2**20  # bytes around a line
_PASTE_SECONDS = 1.0  # in which the next line of a text comes that is pasted at a terminal


def add_commands(commands: Commands) -> None:
    invite = add_command(
        commands,
        "invite",
        "print a line with which another machine joins",
        "invite my-run.json",
        _HELP,
    )
    add = invite.add_argument
    add("config", help="the config of a job of the federation, as it runs")
    add(
        "--at",
        type=_place,
        metavar="HOST:PORT",
        help="the job to ask (default: any that the rendezvous knows)",
    )
    valid = "how long the line is good, such as 1h (default: 1d)"
    add("--valid", type=duration, default=86400.0, metavar="TIME", help=valid)
    slot = "slot of a machine that will not come back (default: a free slot)"
    add("--slot", type=int, metavar="I", help=slot)
    for option in ("--serve", "--port", "--address"):
        add(option, nargs="?", dest="gone", const="", help=argparse.SUPPRESS)
    invite.set_defaults(run=_invite)

    join = add_command(commands, "join", "join a federation with an invitation", "join -", _JOIN)
    add = join.add_argument
    add("line", metavar="LINE", nargs="+", help="an invitation, or -")
    folder = "folder for config, key and run (default: joined)"
    add("--folder", type=Path, default=Path("joined"), help=folder)
    add(
        "--data",
        action="append",
        default=[],
        metavar="[FIELD=]PATH",
        help="data that this machine reads, such as text=my-texts; FIELD: of the block data (default: the run's)",
    )
    pretrained = "for a run with training.pretrained: folder of the same weights on this machine"
    add("--pretrained", type=Path, help=pretrained)
    listen = (
        "see federation.listen: tcp://*:29600 where a firewall lets in connections to that port; "
        '"off" behind a router (default: tcp://*:0, any free port)'
    )
    add("--listen", default="tcp://*:0", help=listen)
    add("--start", action="store_true", help="start the job, instead of printing how to start it")
    join.set_defaults(run=_join)


def _invite(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a lost connection is an error, which is reported
    if args.gone is not None:
        raise UserError(_GONE)

    from megatron_noloco.config import load_config
    from megatron_noloco.federation.invitation import Wish
    from megatron_noloco.federation.joining import Ticket, line_of
    from megatron_noloco.settings import MOST_SLOTS
    from megatron_noloco.training.prepare import network_for

    config = load_config(args.config)
    federation = config.federation
    if not federation.exists or federation.key_file is None or federation.encryption != "tls":
        raise UserError(
            f"{args.config}: invite needs a federation with a key: federation.rendezvous, federation.key_file, "
            'and federation.encryption "tls"'
        )
    if args.slot is not None and not 0 <= args.slot < MOST_SLOTS:
        raise UserError(f"invite: --slot {args.slot}: the slots are 0 to {MOST_SLOTS - 1}")
    network = network_for(config)
    assert network.keys is not None
    known = [args.at] if args.at else network.rendezvous.look().all_endpoints
    made = asyncio.run(_made(network, known, Wish(args.valid, args.slot)))
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + args.valid))
    sys.stderr.write(
        "On the other machine run `megatron-noloco join -`, and paste this line. It lets one machine join until "
        f"{until}, while replica {made.slot} at {made.endpoint} runs.\n"
    )
    say(line_of(Ticket(made.version, made.endpoint, network.keys.fingerprint, made.secret)))
    return 0


async def _made(network: "Network", endpoints: Sequence[str], wish: "Wish") -> "Made":
    """Return the invitation of the first job that makes one."""
    from megatron_noloco.federation.invitation import ask_invitation
    from megatron_noloco.federation.tcp import TcpCarrier

    member = network.member
    carrier, reasons = TcpCarrier(network.keys), list[str]()
    try:
        for endpoint in endpoints:
            try:
                return await ask_invitation(carrier, endpoint, member, wish)
            except (ConnectionError, TimeoutError) as error:
                reason = str(error)
                reasons.append(outside(reason if endpoint in reason else f"{endpoint}: {reason}"))
    finally:
        await carrier.close()
    nobody = "no running job with a port is found; jobs without ports get copies of config and key instead"
    raise UserError(
        f"invite: no job makes an invitation ({'; '.join(reasons) or nobody}); start one whose port others can "
        "reach, or name it with --at HOST:PORT"
    )


def _place(text: str) -> str:
    """Return the endpoint of HOST:PORT."""
    from megatron_noloco.federation.directory import is_endpoint

    if not is_endpoint(f"tcp://{text}"):
        raise argparse.ArgumentTypeError(f'"{text}" is not HOST:PORT, such as first:29600')
    return f"tcp://{text}"


def _join(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # likewise
    if args.line != [_STDIN] and {*args.line} <= {*sys.argv}:
        _hide(args.line)
    from megatron_noloco.federation.joining import join, ticket_in
    from megatron_noloco.preflight import newcomer
    from megatron_noloco.preflight.short_run import trainer

    ticket = ticket_in(_pasted() if args.line == [_STDIN] else " ".join(args.line))
    local = newcomer.Local(
        args.folder,
        dict(_field(entry) for entry in args.data),
        None if args.pretrained is None else str(args.pretrained),
        args.listen,
    )
    requirements, speed, bundle = asyncio.run(
        join(ticket, lambda requirements: newcomer.check_local(requirements, local))
    )
    path, ranks = newcomer.write_job(bundle, requirements, local, say)
    say(
        f"{path}: the config of replica {bundle.slot}, for {ranks} rank{'s' * (ranks > 1)}; its key is beside "
        f"it, and what the job writes goes to {path.with_name('run')}"
    )
    command = [*trainer(ranks), str(path.absolute()), "--replica", str(bundle.slot)]
    script = path.with_name("start.sh")
    write_text(script, f"exec {shlex.join(command)}\n")
    ready, lines = newcomer.looked_at(path, speed)
    say(*lines)
    if args.start and ready:
        say("", f"Starting it; later: sh {script}")
        sys.stdout.flush()
        os.execv(command[0], command)
    if args.start:
        say("", f"Not started: first mend the problem above. Then start it with: sh {script}")
        return FAILURE
    say("", f"Start it with: sh {script}")
    return 0


def _field(text: str) -> tuple[str, str]:
    """Return a field of the block `data`, "" for none, and a path."""
    name, equals, path = text.partition("=")
    return (name, path) if equals and name.isidentifier() else ("", text)


def _pasted() -> str:
    """Return what stdin holds, or all lines that come at once."""
    text = b""
    while len(text) < _LONGEST_TEXT and (data := os.read(0, _LONGEST_TEXT)):
        text += data
        if text.endswith(b"\n") and not select.select([0], [], [], _PASTE_SECONDS)[0]:
            break
    return text.decode(errors="replace")


def _hide(words: list[str]) -> None:
    """Start this process anew with an invitation on its stdin, so that no list of processes has it."""
    reads, writes = os.pipe()
    os.write(writes, f"{' '.join(words)}\n".encode())
    os.close(writes)
    os.dup2(reads, 0)
    arguments = [_STDIN if word == words[0] else word for word in sys.argv[1:] if word not in words[1:]]
    os.execv(sys.executable, [sys.executable, "-m", "megatron_noloco", *arguments])
