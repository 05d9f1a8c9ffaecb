"""The commands `watch`, `report` and `stop`, which know a run by its folder."""

import argparse
import time
from pathlib import Path

from megatron_noloco.cli.options import Commands, add_command, say
from megatron_noloco.errors import UserError
from megatron_noloco.files import writing

_LOOK_SECONDS = 2.0


def add_commands(commands: Commands) -> None:
    watch = add_command(
        commands, "watch", "show a run in the terminal, one line for each replica", "watch runs/my-run"
    )
    watch.add_argument("folder", metavar="RUN", type=Path, help="a run's output_dir")
    watch.add_argument("--once", action="store_true", help="show the run's present state, and end")
    watch.set_defaults(run=_watch)

    report = add_command(
        commands, "report", "write a run, or a comparison of several, as one HTML page", "report runs/my-run"
    )
    report.add_argument("folders", metavar="RUN", nargs="+", type=Path, help="a run's output_dir")
    output = "the page to write (default: report.html in the folder of the first run)"
    report.add_argument("--output", type=Path, help=output)
    report.set_defaults(run=_report)

    stop = add_command(commands, "stop", "ask a run to save its state and end", "stop runs/my-run")
    stop.add_argument("run_or_config", metavar="RUN", type=Path, help="a run's output_dir, or its config")
    stop.add_argument(
        "--leave",
        action="store_true",
        help="in a federation: exchange once more before the end, within federation.leave_seconds",
    )
    stop.set_defaults(run=_stop)


def _watch(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.live import Live

    from megatron_noloco.job.run_folder import is_under_way
    from megatron_noloco.monitor.run_log import RunLog
    from megatron_noloco.monitor.watch import run_table
    from megatron_noloco.training.following import Following

    run, terminal = RunLog(args.folder, keeps_rows=False), Console()
    if args.once:
        terminal.print(run_table(run))
        return 0
    following = Following(args.folder)
    try:
        with Live(run_table(run, lines=terminal.height), console=terminal, auto_refresh=False) as live:
            while True:
                time.sleep(_LOOK_SECONDS)
                if run.separate_jobs and not is_under_way(args.folder):
                    following.update()
                run.update()
                live.update(run_table(run, lines=terminal.height), refresh=True)
    except KeyboardInterrupt:
        return 0


def _report(args: argparse.Namespace) -> int:
    from megatron_noloco.monitor.report import write_page
    from megatron_noloco.monitor.run_log import RunLog

    path = args.output or args.folders[0] / "report.html"
    runs = [RunLog(folder) for folder in args.folders]
    with writing(path, "--output"):
        write_page(runs, path)
    say(str(path))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from megatron_noloco.job.run_folder import ask_to_stop, is_under_way

    folder = args.run_or_config
    if folder.is_file():
        from megatron_noloco.config import load_config

        folder = Path(load_config(folder).training.output_dir)
    if not is_under_way(folder):
        if not (folder / "run.json").exists():
            raise UserError(f"{folder}: no run has begun there (run.json); give its training.output_dir")
        say(f"{folder}: no run is under way there")
        return 0
    try:
        ask_to_stop(folder, args.leave)
    except OSError as error:
        raise UserError(
            f"{folder}: the request cannot be written there ({error.strerror}); call this where the run's folder "
            "can be written, or send SIGTERM to the run's launch script"
        ) from None
    before = "exchanges once more, " * args.leave
    say(f"{folder}: asked to stop; the run {before}saves after its local step, and ends")
    return 0
