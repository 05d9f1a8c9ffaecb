"""The command `plan`, and its arithmetic by hand."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_noloco.cli.main import main
from megatron_noloco.config import load_config
from megatron_noloco.preflight import fit
from megatron_noloco.preflight.memory import fullest_stage
from megatron_noloco.preflight.traffic import Network, Way

CONFIGS = Path(__file__).parents[2] / "configs"


def test_it_tells_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--gpu", "A100", "--bandwidth", "1Gbit", "--latency", "25ms"]
    assert main(["plan", str(CONFIGS / "llama_1.3b.json"), *asked]) == 0
    told = capsys.readouterr().out
    for words in ("16 replicas x 4 ranks", "inner optimizer", "fits A100", "this config", "synchronous"):
        assert words in told


@pytest.mark.parametrize(("model", "activations"), [("6.8b", False), ("1.3b", True)])
def test_changes_that_help_where_it_does_not_fit(
    model: str, activations: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer activations help only where they need more than the step of the inner optimizer."""
    assert main(["plan", str(CONFIGS / f"llama_{model}.json"), "--gpu", "4090"]) == 0
    told = capsys.readouterr().out
    assert "too much for 4090 of 24 GB" in told
    assert "parallel.pipeline_model_parallel_size 8" in told
    for change in ("model.recompute_granularity full", "train_micro_batch_size_per_gpu"):
        assert (change in told) == activations


def test_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    """4 replicas of 2 stages; pairs send each rank's weights once, in 1044 of 2048 bytes with int8."""
    asked = ["--json", "--bandwidth", "8Mbit", "--step", "0.5s", "--gpus", "16"]
    assert main(["plan", str(CONFIGS / "quickstart.json"), *asked]) == 0
    plan: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (plan["ranks"], plan["replicas"], plan["step_seconds"]) == (16, 8, 0.5)
    ways = {way["name"]: way for way in plan["ways"]}
    pairs = ways["NoLoCo in pairs, fp32"]
    assert pairs["bytes_per_exchange"] == 4 * plan["weights_of_rank"]["owned"]
    assert pairs["seconds_per_exchange"] == pytest.approx(pairs["bytes_per_exchange"] / 1e6)
    assert ways["DiLoCo, fp32"]["bytes_per_exchange"] == pytest.approx(
        2 * 7 / 8 * pairs["bytes_per_exchange"]
    )
    assert ways["synchronous"]["local_steps"] == 1
    # 4 microbatches of 8 samples of 128 tokens, 128 numbers of 4 bytes for each, forth and back; 7/8 go to others
    assert plan["routed_bytes_per_step"] == 2 * (4 * 8 * 128) * 128 * 4 * 7 / 8
    assert plan["routed_seconds_per_step"] == plan["routed_bytes_per_step"] / 2 / 1e6, (
        "from both stages at once"
    )


def test_without_routes_nothing_is_said_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for name, routed in (("llama_1.3b.json", True), ("llama_1.3b_recipe.json", False)):
        assert main(["plan", str(CONFIGS / name), "--bandwidth", "1Gbit"]) == 0
        assert ("routing sends" in capsys.readouterr().out) == routed


def test_memory_that_is_short_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 ranks, each with what `plan` says and the libraries; on a GPU without these. `config --check` says it."""
    path = CONFIGS / "quickstart.json"
    config = load_config(path)
    architecture, topology = config.architecture(257), config.topology(8)
    planned = fullest_stage(config, architecture, topology)[2]
    enough = 8 * (planned.device_bytes + planned.host_bytes + fit.LIBRARIES_BYTES)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(fit, "available_bytes", lambda: enough)
    assert fit.shortage_of_all(config, architecture, topology) is None
    monkeypatch.setattr(fit, "available_bytes", lambda: enough - 1)
    gb = f"{enough / 1e9:.1f} GB"
    told = f"memory for 8 ranks on this host: some {gb} needed, {gb} available; the system may kill one"
    assert (fit.shortage_of_all(config, architecture, topology) or "").startswith(told)
    assert fit.shortage(config, architecture, topology, 8, started=True) is None, "the libraries are there"

    monkeypatch.setattr(fit, "available_bytes", lambda: 0)
    assert main(["config", "--check", str(path)]) == 0
    assert "\nall on this machine: memory for 8 ranks on this host: some " in capsys.readouterr().out

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * planned.device_bytes - 1, 0))
    monkeypatch.setattr(fit, "available_bytes", lambda: 2 * (planned.host_bytes + fit.LIBRARIES_BYTES))
    assert fit.shortage(config, architecture, topology, 2) is None
    assert "memory for 2 ranks on a GPU: some " in (fit.shortage(config, architecture, topology, 2, 2) or "")
    assert "memory for 3 ranks on this host: some " in (fit.shortage(config, architecture, topology, 3) or "")


def test_the_limit_of_a_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the group itself, or of one around it; files that the system can drop are not in use."""
    own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
    inner = tmp_path / "job" / own
    inner.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(fit, "_CGROUPS", tmp_path / "job")
    free = fit.available_bytes()
    assert free > 1000
    for name, text in (("max", "3000"), ("current", "2500"), ("stat", "anon 2000\ninactive_file 500\n")):
        (tmp_path / "job" / f"memory.{name}").write_text(text)
    assert fit.available_bytes() == 1000
    (tmp_path / "job" / "memory.max").write_text("max\n")
    assert fit.available_bytes() > 1000


def test_the_time_lost() -> None:
    """1 MB at 1 MB/s by two ranks of a node, two messages after each other: 2.5 s of 10 + 2.5."""
    network = Network(bytes_per_second=1e6, latency=0.25, ranks_per_node=2)
    seconds = network.seconds(1e6, trips=2)
    assert seconds == 2.5
    waits = Way("", 1_000_000, seconds, local_steps=10)
    assert waits.share_lost(step_seconds=1) == 0.2
    assert Way("", 0, seconds, waits.enough_steps(1)).share_lost(1) <= 0.01
    assert Way("", 0, seconds, waits.enough_steps(1) - 1).share_lost(1) > 0.01
    overlaps = Way("", 1_000_000, seconds, local_steps=10, hidden_steps=10)
    assert (overlaps.share_lost(1), overlaps.enough_steps(1)) == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--gpu", "Voodoo"], "--gpu Voodoo: not known; known are H100 PCIe"),
        (["--gpus", "7"], "7"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(CONFIGS / "quickstart.json"), *arguments]) == 2
    said = capsys.readouterr()
    assert problem in said.err
    assert said.err.count("\n") == 1
    assert not said.out


def test_a_wrong_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "file.json", "--bandwidth", "1GB"])
    assert ended.value.code == 2
    assert '"1GB" is no bandwidth; write 100Mbit or 1Gbit' in capsys.readouterr().err
