"""The commands `invite` and `join`: one line with which another machine joins a federation."""

import argparse
import json
import os
import select
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_noloco import __version__
from megatron_noloco.cli import preflight
from megatron_noloco.cli.options import Commands, add_command, duration, host, port, say
from megatron_noloco.errors import UserError
from megatron_noloco.job.leaving import FAILURE

if TYPE_CHECKING:
    from megatron_noloco.invitation.newcomer import Link

_PORT = 29700
_STDIN = "-"
_HELP = """\
The line holds where to ask, the fingerprint of the federation's key, the number of the run, the version, and a
secret that is good for one machine. Give the line to the other side over a channel that you trust: whoever uses
it first joins. With --serve the command answers machines that join, until Ctrl-C. Without --serve it prints
another line for an `invite --serve` that is running: give the same --port and --address."""
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
        "invite my-run.json --serve",
        _HELP,
    )
    add = invite.add_argument
    add("config", help="the config of a job of the federation, as it runs")
    add("--serve", action="store_true", help="answer machines that join")
    add("--port", type=port, default=_PORT, help=f"port at which --serve answers (default: {_PORT})")
    add(
        "--address",
        type=host,
        metavar="HOST",
        help="name or address by which others reach this host (default: its own towards the rendezvous)",
    )
    valid = "how long the line is good, such as 1h (default: 1d)"
    add("--valid", type=duration, default=86400.0, metavar="TIME", help=valid)
    slot = "slot of a machine that will not come back (default: a free slot)"
    add("--slot", type=int, metavar="I", help=slot)
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

    from megatron_noloco.config import load_config
    from megatron_noloco.federation.inquiry import known_addresses
    from megatron_noloco.federation.keys import fingerprint_of
    from megatron_noloco.files import without_mark
    from megatron_noloco.invitation.desk import Desk, open_desk
    from megatron_noloco.invitation.ticket import Ticket, line_of, new_secret
    from megatron_noloco.job.join import reachable_address
    from megatron_noloco.settings import MOST_SLOTS
    from megatron_noloco.training.prepare import network_for

    config = load_config(args.config)
    federation = config.federation
    if not federation.exists or federation.key_file is None or federation.encryption != "tls":
        raise UserError(
            f"{args.config}: invite needs a federation with a key: federation.rendezvous, federation.key_file, "
            'and federation.encryption "tls"'
        )
    network, key = network_for(config), Path(federation.key_file)
    own = args.address or reachable_address(network.rendezvous.hosts)
    if args.slot is not None and not 0 <= args.slot < MOST_SLOTS:
        raise UserError(f"invite: --slot {args.slot}: the slots are 0 to {MOST_SLOTS - 1}")
    secret = new_secret(key.read_bytes(), args.valid, args.slot)
    place = f"[{own}]:{args.port}" if ":" in own else f"{own}:{args.port}"
    line = line_of(Ticket(__version__, [place], fingerprint_of(key), secret))
    if not args.serve:
        say(line)
        return 0
    folder = Path(config.training.output_dir) / "invitations"
    raw = json.loads(without_mark(Path(args.config).read_bytes()))
    desk = Desk(raw, key.read_bytes(), lambda: known_addresses(network), folder, say)
    try:
        server = open_desk(desk, key, "*", args.port)
    except OSError as error:
        raise UserError(f"invite: cannot listen at port {args.port}: {error.strerror}; give --port") from None
    say(
        "On the other machine run `megatron-noloco join -`, and paste this line, which lets one machine join:",
        "",
    )
    say(line, "", f"answering at {place}, until Ctrl-C")
    sys.stdout.flush()
    with server:
        server.serve_forever()
    return 0


def _join(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # likewise
    if args.line != [_STDIN] and {*args.line} <= {*sys.argv}:
        _hide(args.line)
    from megatron_noloco.files import write_text
    from megatron_noloco.invitation import newcomer
    from megatron_noloco.invitation.ticket import ticket_in

    ticket = ticket_in(_pasted() if args.line == [_STDIN] else " ".join(args.line))
    local = newcomer.Local(
        args.folder,
        dict(_field(entry) for entry in args.data),
        None if args.pretrained is None else str(args.pretrained),
        args.listen,
        newcomer.gpus_here(),
    )
    with newcomer.Visit(ticket) as visit:
        about = visit.about()
        newcomer.check_local(about, local)
        link = visit.measure()
        welcome = visit.welcome()
    path, ranks = newcomer.write_job(welcome, about, local, say)
    say(
        f"{path}: the config of replica {welcome.slot}, for {ranks} rank{'s' * (ranks > 1)}; its key is beside "
        f"it, and what the job writes goes to {path.with_name('run')}"
    )
    command = [sys.executable, "-m", *newcomer.arguments_of(path.absolute(), ranks, welcome.slot)]
    script = path.with_name("start.sh")
    write_text(script, f"exec {shlex.join(command)}\n")
    ready = _looked_at(path, link)
    if args.start and ready:
        say("", f"Starting it; later: sh {script}")
        sys.stdout.flush()
        os.execv(command[0], command)
    if args.start:
        say("", f"Not started: first mend the problem above. Then start it with: sh {script}")
        return FAILURE
    say("", f"Start it with: sh {script}")
    return 0


def _looked_at(config: Path, link: "Link") -> bool:
    """Run `doctor` and `plan` with the measured link; return whether the machine is ready."""
    network = ["--bandwidth", f"{link.rate * 8 / 1e6:.3f}Mbit", "--latency", f"{link.latency * 1e3:.3f}ms"]
    say("", f"The link to the machine that invites: {network[1]} the slower way, {network[3]} one way")
    parser = argparse.ArgumentParser()
    preflight.add_commands(parser.add_subparsers())
    ready = True
    for command in (["doctor", "--seconds", "0", *network], ["plan", str(config), *network]):
        say("", f"$ megatron-noloco {shlex.join(command)}")
        args = parser.parse_args(command)
        ready = args.run(args) == 0 and ready
    return ready


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
