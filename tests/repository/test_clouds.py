"""What launch/ has for Kubernetes and for cloud-init: its form, and what its scripts do. No cloud is at hand."""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_noloco.cli import invite
from tests.kit.ranks import REPOSITORY

USER_DATA = REPOSITORY / "launch" / "cloud-init.yaml"
MANIFEST = REPOSITORY / "launch" / "kubernetes.yaml"
VERSION = "1.31"  # of Kubernetes


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(MANIFEST.read_text()))


@pytest.mark.contract
def test_it_fits_the_published_schema() -> None:
    """108 MB of schemas, so the package is not among the requirements: `pip install kubernetes-validate`."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for document in documents():
        kubernetes_validate.validate(document, VERSION, strict=True)


def test_names_that_must_agree() -> None:
    service, job = documents()
    pod = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None"
    assert pod["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == pod["metadata"]["labels"]
    (container,) = pod["spec"]["containers"]
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }


@pytest.mark.parametrize(
    ("asked_to_stop", "code", "expected"), [(False, 0, 0), (False, 2, 2), (True, 0, 143)], ids=str
)
def test_a_replica_that_was_stopped_has_not_completed(asked_to_stop: bool, code: int, expected: int) -> None:
    """It saves and leaves with 0; the pod must fail, or Kubernetes would not start it again."""
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    shell, script = container["command"][:3], container["command"][3]
    assert script == "sh"
    replica = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
print("ready", flush=True)
time.sleep({60 if asked_to_stop else 0})
sys.exit({code})
"""
    with subprocess.Popen(
        [*shell, "sh", sys.executable, "-c", replica], stdout=subprocess.PIPE, text=True
    ) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "ready\n"
        if asked_to_stop:
            pod.send_signal(signal.SIGTERM)
        assert pod.wait(60) == expected


def test_a_spot_machine_joins_once_and_then_goes_on(tmp_path: Path) -> None:
    """The script of the user data, with programs that print what they were called with."""
    data = yaml.safe_load(USER_DATA.read_text())
    assert USER_DATA.read_text().startswith("#cloud-config\n")
    files = {file["path"]: file for file in data["write_files"]}
    assert files["/root/invitation"]["permissions"] == "0600"
    assert "ExecStart=/bin/sh /root/train.sh" in files["/etc/systemd/system/federation.service"]["content"]
    script = files["/root/train.sh"]["content"].replace("/root", str(tmp_path))
    program = tmp_path / "megatron_noloco" / ".venv" / "bin" / "megatron-noloco"
    program.parent.mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"; cat\n')
    program.chmod(0o700)
    (tmp_path / "invitation").write_text("noloco-line")
    notice, told = tmp_path / "megatron_noloco" / "launch" / "notice.sh", tmp_path / "told"
    notice.parent.mkdir()
    notice.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {told}.new; mv {told}.new {told}\n')
    notice.chmod(0o700)

    def output() -> str:
        return subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout

    called, _, line = output().rpartition("\n")
    assert line == "noloco-line"
    parser = argparse.ArgumentParser()
    invite.add_commands(parser.add_subparsers())
    args = parser.parse_args(called.splitlines())
    assert (args.invitation, args.no_start, args.folder) == ("-", False, Path("joined"))
    assert args.data == [("", f"{tmp_path}/texts")]
    while not told.exists():
        time.sleep(0.01)
    run, command = told.read_text().splitlines()
    assert run == f"{args.folder}/run"
    assert command.endswith("instance/preempted | grep -q TRUE")
    (tmp_path / "joined").mkdir()
    (tmp_path / "joined" / "config.json").write_text("{}")
    assert output() == "train\njoined/config.json\n"
