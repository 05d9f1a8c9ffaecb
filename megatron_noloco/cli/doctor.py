"""The command `doctor`."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from megatron_noloco.cli.numbers import seconds
from megatron_noloco.cli.output import say
from megatron_noloco.job.leaving import FAILURE
from megatron_noloco.preflight.finding import Finding


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor", help="whether this machine is ready to train, and what to fix first"
    )
    doctor.add_argument("--hostfile", type=Path, help="mpirun's: exchange between its first two hosts")
    doctor.add_argument("--seconds", type=seconds, default=10.0, help="of exchanges; 0: none (default: 10)")
    doctor.add_argument("--json", action="store_true", help="one JSON object for scripts")
    doctor.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    """1 where something must be put right."""
    findings = list(_findings(args.hostfile, args.seconds))
    problems = [finding for finding in findings if finding.state == "problem"]
    if args.json:
        say(json.dumps({"ready": not problems, "findings": [asdict(finding) for finding in findings]}))
    else:
        say(*map(_line, findings), "", _verdict(findings))
    return FAILURE if problems else 0


def _findings(hostfile: Path | None, seconds: float) -> list[Finding]:
    from megatron_noloco.preflight.packages import check_kernels, check_packages

    if hostfile is not None and not hostfile.is_file():
        raise ValueError(f"--hostfile {hostfile}: there is no such file")
    findings = list(check_packages())
    if any(finding.what.startswith("torch ") for finding in findings if finding.state == "problem"):
        return findings  # the other checks need it
    import torch

    from megatron_noloco.preflight.machine import check_accelerators, check_limits, check_network
    from megatron_noloco.preflight.mpi import check_mpi

    findings += [*check_accelerators(), *check_kernels(torch.cuda.is_available())]
    findings += [*check_network(), *check_limits()]
    return findings + list(check_mpi(hostfile, seconds)) if seconds else findings


def _line(finding: Finding) -> str:
    advice = f"\n{'':20}-> {finding.advice}" if finding.advice else ""
    return f"{finding.state:8}{finding.area:12}{finding.what}{advice}"


def _verdict(findings: Sequence[Finding]) -> str:
    """What to fix first."""
    for state in ("problem", "note"):
        for finding in findings:
            if finding.state == state and finding.advice:
                first = f"{finding.area}: {finding.what}. {finding.advice}"
                return f"Fix first: {first}" if state == "problem" else f"Ready. It would gain by: {first}"
    return "Ready."
