"""The command `config`: what a config file may hold, and whether a run can start from one."""

import argparse
import sys

from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.options import Commands, add_command, at_least_one, say
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.job.start_up import importing


def add_commands(commands: Commands) -> None:
    config = add_command(
        commands, "config", "explain or check a config file", "config --check my-run.json --world-size 16"
    )
    action = config.add_mutually_exclusive_group()
    fields = "of all fields, of a block such as noloco, or of a field such as noloco.local_steps"
    explain = f"print type, bounds, default and meaning {fields}"
    action.add_argument("--explain", nargs="?", const="", metavar="NAME", help=explain)
    check = "check a config file, the files which it names, and the first rows of the data; starts nothing"
    action.add_argument("--check", metavar="FILE", help=check)
    schema = "print the JSON schema of a config file, for editors"
    action.add_argument("--schema", action="store_true", help=schema)
    ranks = "with --check: also check for N ranks"
    config.add_argument("--world-size", type=at_least_one, metavar="N", help=ranks)
    dry = "with --check: also train one replica for two local steps, and compare its memory with that of plan"
    config.add_argument("--dry-run", action="store_true", help=dry)
    config.set_defaults(run=_config)


def _config(args: argparse.Namespace) -> int:
    from megatron_noloco.config import explain, schema

    if args.world_size is not None and not args.check:
        raise UserError("config: --world-size goes together with --check FILE")
    if args.dry_run and not args.check:
        raise UserError("config: --dry-run goes together with --check FILE")
    if args.explain is not None:
        sys.stdout.write(explain(args.explain))
    elif args.schema:
        sys.stdout.write(schema())
    elif args.check:
        with prefix_errors_with(args.check):
            _check(args.check, args.world_size, args.dry_run)
    else:
        raise UserError("config: give --explain, --schema or --check FILE")
    return 0


def _check(path: str, world_size: int | None, dry: bool) -> None:
    """Write the banner of a run; raises UserError when the file is wrong, or a run could not start from it.

    When only the start would fail the banner is written all the same: on another machine it may succeed.
    """
    from megatron_noloco.config import Known, describe, load_config, resolve

    config = load_config(path)
    ranks = config.world_size if world_size is None else world_size
    topology = config.smallest_topology() if ranks is None else config.topology(ranks)
    config, by_recipe = resolve(config, topology.total_replicas)

    with importing():  # torch: only for a sound config
        from megatron_noloco.preflight.short_run import dry_run
        from megatron_noloco.training.prepare import check_data, check_start

    architecture = config.architecture() if config.model.vocab_size is not None else None
    problem = None
    try:
        tokenizer, architecture = check_start(config)
        check_data(config, None if ranks is None else topology, tokenizer, architecture)
        say(f"{path}: ok")
    except UserError as error:
        problem = error
    say(*describe(Known(config, topology, architecture, by_recipe)))
    if ranks is None:
        replicas = topology.replicas
        say(f'parallel.replicas is "auto": this is for {replicas} replicas; --world-size N is for N ranks')
    if problem is not None:
        raise problem
    if dry:
        assert architecture is not None
        try:
            say(*dry_run(config, architecture).lines())
        except RuntimeError as error:
            raise StoppedError(str(error)) from None
