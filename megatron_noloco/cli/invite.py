"""The commands `invite` and `join`: a file with which another machine joins a federation."""

import argparse
import os
import shlex
import signal
import sys
import time
from pathlib import Path

from megatron_noloco.cli.options import Commands, add_command, add_data, duration, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import check_writable, outside, writing
from megatron_noloco.job.launcher import STARTS_AGAIN, trainer
from megatron_noloco.job.leaving import FAILURE

_STDIN = "-"
_DAYS = 90
_INVITE = """\
Until the invitation ends one machine can be one replica with it; that machine cannot invite others. Give it to the
other side as you would give a key. A new key ends all invitations."""
_LAST = 253402300799.0  # Unix time: certificates end by the year 9999


def add_commands(commands: Commands) -> None:
    invite = add_command(
        commands,
        "invite",
        "write an invitation, with which another machine joins",
        "invite my-run.json",
        _INVITE,
    )
    add = invite.add_argument
    add("config", help="the config of a job of the federation, as it runs")
    add(
        "--at",
        type=_address,
        metavar="HOST:PORT",
        help="a running job (default: any that the rendezvous knows)",
    )
    valid = f"how long the machine can be a member, such as 1h (default: {_DAYS}d)"
    add("--valid", type=duration, default=86400.0 * _DAYS, metavar="TIME", help=valid)
    slot = "slot of the machine, such as that of one that will not come back (default: a free slot)"
    add("--slot", type=int, metavar="I", help=slot)
    add("--file", type=Path, help="where to write the invitation (default: invitation-SLOT.noloco)")
    invite.set_defaults(run=_invite)

    join = add_command(commands, "join", "join a federation with an invitation", "join invitation-1.noloco")
    add = join.add_argument
    add("invitation", metavar="FILE", help='a file of `megatron-noloco invite`; "-": it is read from stdin')
    folder = "folder for config, member file and run (default: joined)"
    add("--folder", type=Path, default=Path("joined"), help=folder)
    add_data(join, "data that this machine reads", "the run's")
    pretrained = "for a run with training.pretrained: folder of the same weights on this machine"
    add("--pretrained", type=Path, help=pretrained)
    listen = (
        "see federation.listen: tcp://*:29600 where a firewall lets in connections to that port (default: "
        "tcp://*:0, any free port)"
    )
    add("--listen", default="tcp://*:0", help=listen)
    add("--no-start", action="store_true", help="print how to start the job, instead of starting it")
    join.set_defaults(run=_join)


def _invite(args: argparse.Namespace) -> int:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # a lost connection is an error, which is reported
    from megatron_noloco.config import load_config
    from megatron_noloco.data.auto_tokenizer import build_tokenizer
    from megatron_noloco.preflight.invitation import text_of
    from megatron_noloco.preflight.inviting import invite, keys_of_inviter
    from megatron_noloco.preflight.newcomer import join_options, write_private
    from megatron_noloco.training.prepare import network_for

    config = load_config(args.config)
    ends = min(time.time() + args.valid, _LAST)
    keys = keys_of_inviter(config, args.config, args.slot, args.at)
    if args.file is not None and args.file.exists():
        raise UserError(f"invite: --file {args.file}: there is such a file already; give another")
    if args.file is not None and not args.file.parent.is_dir():
        raise UserError(f"invite: --file {args.file}: there is no folder {args.file.parent}")
    check_writable(Path() if args.file is None else args.file.parent, "--file")  # before a slot is given away
    network, tokenizer = network_for(config), build_tokenizer(config.data.tokenizer)
    invitation = invite(config, keys, network, tokenizer, slot=args.slot, ends=ends, at=args.at)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(ends))
    path = args.file or Path(f"invitation-{invitation.slot}.noloco")
    with writing(path, "--file"):
        write_private(path, text_of(invitation))
    options = join_options(config, invitation.needs)
    paths = " The paths are those of this machine: give those of the other." * bool(options)
    sys.stderr.write(
        f"Copy {path} to the other machine, as you would copy a key, and run there the command below; until "
        f"{until} that machine can be replica {invitation.slot}.{paths}\n"
    )
    say(shlex.join(["megatron-noloco", "join", path.name, *options]))
    return 0


def _address(text: str) -> str:
    from megatron_noloco.federation.statuses import is_address

    if not is_address(text):
        raise argparse.ArgumentTypeError(f'"{text}" is not HOST:PORT, such as first:29600')
    return text


def _join(args: argparse.Namespace) -> int:
    from megatron_noloco.preflight import newcomer
    from megatron_noloco.preflight.invitation import invitation_in

    invitation = invitation_in(_text_of(args.invitation))
    local = newcomer.Local(
        args.folder,
        dict(args.data),
        None if args.pretrained is None else str(args.pretrained),
        args.listen,
    )
    newcomer.check_local(invitation.needs, local)
    newcomer.check_member_file(invitation)
    path, ranks = newcomer.write_job(invitation, local, say)
    say(
        f"{path}: the config of replica {invitation.slot}, for {ranks} rank{'s' * (ranks > 1)}; its member file "
        f"is beside it, and what the job writes goes to {path.with_name('run')}"
    )
    if invitation.folder.startswith("file://"):
        say(f"The jobs meet in {outside(invitation.folder)}, which is the same folder on each machine")
    start = shlex.join(["megatron-noloco", "train", str(path)])
    ready, lines = newcomer.looked_at(path)
    say(*lines, "")
    if args.no_start:
        say(f"Start it with: {start}")
        return 0
    if not ready:
        say(f"Not started: first mend the problem above. Then start it with: {start}")
        return FAILURE
    say(f"Starting it; later: {start}")
    os.environ[STARTS_AGAIN] = f"`{start}`"
    sys.stdout.flush()
    os.execv(sys.executable, [*trainer(), str(path)])


def _text_of(name: str) -> str:
    """Return the text in which the invitation is."""
    from megatron_noloco.preflight.invitation import MOST_BYTES

    if name == _STDIN:
        return sys.stdin.buffer.read(MOST_BYTES).decode("utf-8-sig", errors="replace")
    try:
        with open(name, encoding="utf-8-sig", errors="replace") as file:
            return file.read(MOST_BYTES)
    except OSError as error:
        raise UserError(f"join: {outside(name)}: {error.strerror}") from None
