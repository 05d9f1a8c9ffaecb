"""Each measuring tool at its smallest: it runs, and prints one JSON object with what it measures."""

import json
import runpy
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import by_hand, run_mpi, run_python

# How it is run, its options, and what it prints. Those of this process set nothing up before their imports.
TOOLS: dict[str, tuple[str, str, str]] = {
    "bench checkpoint": ("in a folder", "--hidden-size 16 --layers 1 --repeats 1", "median_seconds"),
    "bench exchange": ("on 2 ranks", "--megabytes 0.01 --repeats 1", "transport_time_over"),
    "bench federation": (
        "here",
        "--megabytes 1 --repeats 1 --pause 0 --payloads int8",
        "seconds_of_small_rounds",
    ),
    "bench host": ("here", "--weights 4096 --repeats 1", "core seconds, int8, groups of 4"),
    "bench overlap": ("on 2 ranks", "--megabytes 0.01 --repeats 1", "exchange_seconds"),
    "bench payload": ("here", "--elements 2048 --repeats 1", "ways"),
    "bench routing": ("alone", "--hidden 16 --seq-length 8 --repeats 1", "median_over_off"),
    "bench throughput": ("alone", "--size tiny --warm-ups 1 --repeats 1", "ours_over_it"),
    "faults soak": ("here", "--minutes 0.05 --elements 100 --restarts 0.2 --drops 0.2", "at_the_end"),
    "gpu_check.attached": ("alone", "--device cpu", "figure"),
    "gpu_check.coding": ("here", "--elements 8192 --repeats 1 --device cpu", "figure"),
    "gpu_check.replicas": (
        "alone",
        "rounds --replicas 2 --size tiny --precision fp32 --local-steps 2 --steps 6",
        "peer",
    ),
}
QUICK = (
    "bench host",
    "bench payload",
    "faults soak",
    "gpu_check.coding",
)  # test_netlab.py runs bench overlap too


def printed(output: str) -> dict[str, Any]:
    return json.loads(output[output.index("{") :])


def run(name: str, options: list[str], timeout: float = 180) -> dict[str, Any]:
    finished = run_python("-m", *f"tools.{name}".split(), *options, timeout=timeout)
    assert finished.returncode == 0, finished.stderr
    return printed(finished.stdout)


@pytest.mark.parametrize("name", by_hand(TOOLS, TOOLS.keys() - {*QUICK}))
def test_a_tool_prints_what_it_measures(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (how, options, figure), (module, *case) = TOOLS[name], name.split()
    words = [*case, *options.split()]
    if how == "here":
        monkeypatch.setattr(sys, "argv", [module, *words])
        with suppress(SystemExit):
            runpy.run_module(f"tools.{module}", run_name="__main__")
        found = printed(capsys.readouterr().out)
    elif how == "on 2 ranks":
        finished = run_mpi(2, f"tools.{module}", words, timeout=180)
        assert finished.returncode == 0, finished.stderr
        found = printed(finished.stdout)
    else:
        folder = ["--folder", str(tmp_path)] if how == "in a folder" else []
        found = run(name, [*options.split(), *folder])
    assert figure in json.dumps(found)


@pytest.mark.slow
def test_chaos_kills_a_replica_that_comes_back(tmp_path: Path) -> None:
    """One of three replicas is killed and comes back without its folder; a new one joins. Starts take seconds."""
    few = "--replicas 3 --kills 1 --returns 1 --joins 1 --freezes 0 --steps 1000 --limit 200"
    found = run("faults chaos", [*few.split(), "--output", str(tmp_path / "chaos")])
    assert set(found["exit_codes"].values()) == {0}
    assert found["processes_left"] == 0
    assert found["apart"] < 1e-3, "all end as one model"
    assert found["loss_ratio"] < 1.1  # so short a run is not that of docs/faults.md


@pytest.mark.slow
def test_faulty_replicas_do_not_end_the_others(tmp_path: Path) -> None:
    """One of three replicas sends NaN, or is slow: the other two end well, and the slow one has left out steps."""
    few = "--replicas 3 --faults sends_nan slow --steps 60 --step-seconds 0.1 --limit 120"
    found = run("faults faulty", [*few.split(), "--output", str(tmp_path / "faulty")], timeout=500)
    assert {name: outcome["ended_well"] for name, outcome in found["beside"].items()} == {
        "sends_nan": True,
        "slow": True,
    }
    assert max(found["beside"]["sends_nan"]["missed_rounds"]) > 0
    assert found["beside"]["slow"]["iterations_left_out"][-1] > 0


@pytest.mark.slow
def test_a_slow_replica_costs_less_as_a_separate_job(tmp_path: Path) -> None:
    """Of two replicas the slow one holds up the other in one job, and less where they are separate jobs."""
    few = "--replicas 2 --steps 11 --step-seconds 0.3 --cases one_slow"
    found = run("faults uneven", [*few.split(), "--output", str(tmp_path / "uneven")], timeout=500)["found"]
    assert found["one_slow"]["NoLoCo"]["left_out"] == 0
    assert found["one_slow"]["NoLoCo, separate jobs"]["left_out"] > 0
