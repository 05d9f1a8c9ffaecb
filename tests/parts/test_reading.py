"""A run's own numbers, read again: as they grow, as a table, and as a page."""

import io
import json
import math
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_noloco.files import write_text
from megatron_noloco.job.run_folder import stop_request
from megatron_noloco.monitor.numbers import TABLE
from megatron_noloco.monitor.plots import pairings_of, phases_of, places_of, plots_of_one, smoothed
from megatron_noloco.monitor.report import _switches, write_page
from megatron_noloco.monitor.run_log import ReplicaLog, RunLog
from megatron_noloco.monitor.timeline import timeline_of
from megatron_noloco.monitor.watch import run_table
from megatron_noloco.monitor.writers import read_row
from megatron_noloco.training.following import keep_rows
from megatron_noloco.training.separate_jobs import OtherJobs
from tests.kit.ranks import output_of, refusal_of
from tests.kit.rows import meeting, step, write

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    evaluation = {
        "kind": "evaluation", "step": 4, "validation/loss": 2.5, "validation/mean_model_loss": 2.4
    }  # fmt: skip
    write(
        tmp_path,
        "00",
        step(2, **meeting(0, 1), **{"total/sent_bytes": 100, "train/skipped_steps": 2}),
        step(4, **meeting(1), **{"total/sent_bytes": 100, "train/skipped_steps": 1}),
        evaluation,
        {"kind": "checkpoint", "step": 4},
    )
    write(tmp_path, "01", step(2, **meeting(0, 0)), {"kind": "checkpoint", "step": 2})
    (tmp_path / "run.json").write_text(json.dumps({"steps": 10, "synchronous_bytes_per_step": 400}))
    return tmp_path


def write_facts(folder: Path, **facts: Any) -> None:
    """Make a folder that of a job of a federation."""
    config = {"federation": {"rendezvous": "file://there"}}
    (folder / "run.json").write_text(json.dumps({"config": config, **facts}))


def test_rows_are_read_as_they_come(tmp_path: Path) -> None:
    path = write(tmp_path, "03", step(1))
    log = ReplicaLog(path.parent)
    log.update()
    with path.open("a") as file:
        file.write(json.dumps(step(2))[:20])
    log.update()
    assert [row["step"] for row in log.rows] == [1], "the second is not complete"
    with path.open("a") as file:
        rows = (json.dumps(step(3) | damage) for damage in ({"round/partners": 1}, {"step": None}))
        damaged = ["", "\0\0", '{"step": 3}', '{"kind": "step", "step": 3}', "[" * 100_000, *rows]
        file.write("\n".join([json.dumps(step(2))[20:], *damaged, json.dumps(step(4)), ""]))
    log.update()
    log.update()
    assert [row["step"] for row in log.rows] == [1, 2, 4], "damaged lines are left out"
    write_text(path, json.dumps(step(1)) + "\n" + json.dumps(step(7)) + "\n")
    log.update()
    assert [row["step"] for row in log.rows] == [1, 7], "a resumed run has put another file in place"


def test_a_late_row_of_a_checkpoint_drops_no_other(tmp_path: Path) -> None:
    """All ranks had written it two steps later."""
    write(tmp_path, "00", step(1), step(2), step(3), {"kind": "checkpoint", "step": 1}, step(4))
    (log,) = RunLog(tmp_path).replicas
    assert [row["step"] for row in log.rows] == [1, 2, 3, 1, 4]
    assert log.newest("checkpoint")["step"] == 1


def test_watch_keeps_the_newest_rows_only(tmp_path: Path) -> None:
    """And shows the same, also of rows that come later."""
    evaluation = {"kind": "evaluation", "step": 2, "validation/loss": 2.5}
    first = step(2, **meeting(0, **{"round/missed": "late", "round/deadline_seconds": 5.0}))
    path = write(
        tmp_path, "00", step(1, **meeting(0, 1)), first, evaluation, step(3, **{"train/skipped_steps": 2})
    )
    short, whole = RunLog(tmp_path, keeps_rows=False), RunLog(tmp_path)
    with path.open("a") as file:
        file.write(json.dumps(step(4, **meeting(1))) + "\n")
    short.update()
    whole.update()
    assert short.replicas[0].rows == []
    assert len(whole.replicas[0].rows) == 5
    assert short.replicas[0].counts == whole.replicas[0].counts
    lines = shown(short)
    assert lines == shown(whole)
    assert "no partner in 2 of 3 rounds in the log (1 missed, the last: late), 2 skipped steps" in lines[-1]


def test_watch_shows_the_last_round_in_rows_without_one(tmp_path: Path) -> None:
    write(tmp_path, "00", step(1, **meeting(7, 1)), step(2))
    _, heading, row, *_ = shown(RunLog(tmp_path))
    assert "round with pause ms" in heading
    assert row.startswith("00 2 ")
    assert " 7 1 100.0 " in row


def test_watch_shows_no_spread_of_a_round_without_partner(tmp_path: Path) -> None:
    write(tmp_path, "00", step(1, **meeting(7, **{"round/spread": None, "train/loss": None})))
    _, heading, row, *_ = shown(RunLog(tmp_path))
    assert "spread" not in heading
    assert row.startswith("00 1 nan "), "the loss"


def test_training_time_counts_computed_steps(tmp_path: Path) -> None:
    """2 s each: 10 after a start from another replica's state, 10 of 20, 5 and 5 around a start from its own."""
    log = ReplicaLog(tmp_path)
    left_out = {"total/skipped_ahead": 10}
    starts = [{"kind": "start", "step": number} for number in (1000, 1035)]
    log.rows = [starts[0], step(1010), step(1030, **left_out), step(1035), starts[1], step(1040)]
    assert log.seconds_so_far() == {1010: 20, 1030: 40, 1035: 50, 1040: 60}


def test_new_replicas_are_seen_in_their_order(run: Path) -> None:
    log = RunLog(run)
    write(run, "100", step(1))
    write(run, "02", step(1))
    write(run, "00.bak", step(1))
    log.update()
    assert [replica.replica for replica in log.replicas] == ["00", "01", "02", "100"]


def test_replicas_that_a_resume_has_dropped_are_left_out(run: Path) -> None:
    """Also while the run is watched."""
    log = RunLog(run)
    (run / "run.json").write_text(json.dumps({"steps": 10, "replicas": 1}))
    log.update()
    assert [replica.replica for replica in log.replicas] == ["00"]
    assert shown(RunLog(run))[0].startswith(f"{run}: step 4 of 10")


def shown(log: RunLog, width: int = 200, seconds: float = 75) -> list[str]:
    """Return the lines that `watch` shows after these seconds, with single spaces."""
    text = io.StringIO()
    now = (log.replicas[0].written or time.time()) + seconds
    Console(file=text, width=width).print(run_table(log, now))
    return [" ".join(line.split()) for line in text.getvalue().splitlines()]


def test_the_table_fits_into_80_characters(tmp_path: Path) -> None:
    more = {"round/pause_seconds": 1.2345, "speed/mfu": 0.417, "train/loss": None}
    evaluation = {"kind": "evaluation", "step": 123456, "validation/loss": 2.5}
    write(tmp_path, "00", step(123456, **(meeting(1234, 12) | more)), evaluation)
    row = "00 123456 nan 1000 41.7 % 1234 12 1234.5 2.000E-03 2.5000 75s"
    assert row in shown(RunLog(tmp_path), 80), "nan: a loss that was not finite"


def test_many_replicas_are_shown_page_by_page(tmp_path: Path) -> None:
    """In a terminal of 24 lines, with what is about all."""
    names, missed = [f"{index:02}" for index in range(64)], {"round/missed": "replica 1 is not there"}
    for name in names:
        write(tmp_path, name, step(4, **meeting(1), **missed), {"kind": "checkpoint", "step": 4})
    log, seen = RunLog(tmp_path), set[str]()
    for page in range(10):
        text = io.StringIO()
        Console(file=text, width=80, height=24).print(run_table(log, log.replicas[0].written + 6 * page, 24))
        lines = text.getvalue().splitlines()
        assert len(lines) < 24
        assert any(line.startswith("last checkpoint: step 4") for line in lines)
        assert "60 more replicas have notes: `watch --once` shows all" in lines
        seen |= {line.split()[0] for line in lines if line.split()[0] in names}
    assert seen == {*names}


def test_the_table_has_a_line_for_each_replica_and_what_is_wrong(run: Path) -> None:
    os.utime(run / "replica_01" / "metrics.jsonl", (1, 1))
    (run / "running").write_text("process 7 on another host\n")
    first, headings, zero, one, *more = shown(RunLog(run), seconds=70)
    assert first == f"{run}: step 2 of 10, 16s of training left"
    assert headings == "replica step loss tokens/s round with pause ms spread valid. age"
    assert zero == "00 4 2.6000 1000 1 none 100.0 2.5000 70s"
    assert one.startswith("01 2 2.8000 1000 0 0 100.0 2.000E-03 ")
    assert more == [
        "validation at step 4: mean model 2.4000",
        "last checkpoint: step 2",
        "replica 00: no partner in 1 of 2 rounds in the log, 3 skipped steps",
    ]


@pytest.mark.parametrize(("steps", "state"), [(2, "2; ended"), (10, "10; no job is under way")])
def test_a_run_that_no_job_writes(run: Path, steps: int, state: str) -> None:
    (run / "run.json").write_text(json.dumps({"steps": steps}))
    assert shown(RunLog(run))[0] == f"{run}: step 2 of {state}, last written 75s ago"


def test_a_job_of_another_host_that_writes_no_more(run: Path) -> None:
    """Its lock is not seen from here."""
    (run / "running").write_text("process 7 on another host\n")
    assert shown(RunLog(run))[0] == f"{run}: step 2 of 10; nothing written for 75s, so it may have ended"
    (run / "running").write_text("")
    assert shown(RunLog(run))[0] == f"{run}: step 2 of 10; no job is under way, last written 75s ago"


def test_a_federation_has_ended_where_one_replica_has(tmp_path: Path) -> None:
    """Who leaves first does not get the last rows of others."""
    (tmp_path / "run.json").write_text(json.dumps({"steps": 8}))
    write(tmp_path, "00", step(8))
    write(tmp_path / "replica_00" / "others", "01", step(6))
    assert shown(RunLog(tmp_path))[0] == f"{tmp_path}: step 6 of 8; ended, last written 75s ago"


def test_watch_shows_the_last_step_of_others_without_last_rows(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"steps": 8}))
    write(tmp_path, "00", step(8, **{"final/replicas": [0, 1]}))
    write(tmp_path / "replica_00" / "others", "01", step(6))
    write(tmp_path / "replica_00" / "others", "02", step(6))
    _, _, *rows = shown(RunLog(tmp_path))
    assert [row.split()[:2] for row in rows[:3]] == [["00", "8"], ["01", "8"], ["02", "6"]]
    (tmp_path / "replica_00" / "others" / "replica_02" / "metrics.jsonl").unlink()
    assert shown(RunLog(tmp_path))[0] == f"{tmp_path}: step 8 of 8; ended, last written 75s ago"


def test_a_page_is_utf_8_whatever_the_locale(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it says of itself; plotly's own text is not ASCII. So is a small file."""
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "ascii")
    output_of("report", run)
    assert (run / "report.html").read_bytes().decode().endswith("</html>\n")
    write_text(run / "small", "\u00e9")
    assert (run / "small").read_bytes() == b"\xc3\xa9"


def test_a_page_that_cannot_be_written(run: Path) -> None:
    line = "/proc/x.html: cannot be written: No such file or directory; give another --output"
    assert refusal_of("report", run, "--output", "/proc/x.html") == line


def test_a_run_without_rows_is_at_step_0(tmp_path: Path) -> None:
    """There is a file without rows."""
    write(tmp_path, "00")
    (tmp_path / "running").write_text("process 7 on another host\n")
    assert shown(RunLog(tmp_path))[0] == f"{tmp_path}: step 0"
    write_page([RunLog(tmp_path)], tmp_path / "page.html")


def report(run: Path, *more: object, page: Path | None = None) -> tuple[list[str], str]:
    """Make a page; returns the titles of its plots and what is written beside them, with single spaces."""
    output_of("report", run, *more, *(["--output", page] if page else []))
    text = (page or run / "report.html").read_text()
    assert text.count("<script") > 1
    body = text[text.index("<body>") :]
    assert not re.search(r"(src|href)=", body), "the page needs no other file"
    beside = re.sub("<script.*?</script>|<.*?>", " ", body, flags=re.DOTALL)
    return re.findall("<h2>(.*?)</h2>", body), " ".join(beside.split())


def test_the_page_has_every_plot_and_what_came_of_the_run(run: Path) -> None:
    titles, text = report(run)
    assert titles == ["Loss", "Spread", "Where the time goes", "Bytes", "Pairings"]
    assert "local step 2" in text
    assert "2.4000 nats per token" in text


def test_the_page_of_a_replica_whose_loss_is_not_finite(tmp_path: Path) -> None:
    """Also in the folder of one job of a federation, which has no other replica's."""
    losses = {"validation/loss": None, "validation/mean_model_loss": None}
    write(tmp_path, "03", step(2, **{"train/loss": None}), {"kind": "evaluation", "step": 2} | losses)
    assert "validation loss, replica 3 nan nats per token" in report(tmp_path)[1]
    report(tmp_path, tmp_path, page=tmp_path / "both.html")


VALUES = (
    "null", "true", "-1", "-1.5", "NaN", "-Infinity", "1.7e308", "1e999", "9007199254740993", "1" + 400 * "0",
    "1" + 5000 * "0", '"x"', '"\\u001b[2J"', "[]", "{}", "[null]", '["x", "y"]', "[{}]", "[-1, 2]", "[true]",
    "[1" + 400 * "0" + "]", 900 * "[" + 900 * "]",
)  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_no_row_ends_watch_or_report(value: str, tmp_path: Path) -> None:
    """Of another job, or edited by hand."""
    write_facts(tmp_path, steps=10)
    evaluation = {"kind": "evaluation", "step": 5, "validation/loss": 2.5}
    honest = [
        step(4, unix_seconds=time.time(), **meeting(1, 1)),
        evaluation,
        {"kind": "checkpoint", "step": 5},
    ]
    path = write(tmp_path, "00", *honest)
    with path.open("a") as file:
        for name in ("kind", "step", "replica", "unix_seconds", "origin/loss of 3", "eggs", *TABLE):
            for row in honest:
                text = json.dumps({key: kept for key, kept in row.items() if key != name})
                file.write(f"{text[:-1]}, {json.dumps(name)}: {value}}}\n")
                if name in ("kind", "step"):
                    file.write(f"{value}\n")
    run = RunLog(tmp_path)
    assert {"start", "step", "evaluation", "checkpoint", "x"} >= {
        str(row["kind"]) for row in run.replicas[0].rows
    }
    assert all(character.isprintable() for line in shown(run) for character in line)
    write_page([run], tmp_path / "one.html")
    write_page([run, run], tmp_path / "both.html")


def test_a_number_is_read_as_it_was_written() -> None:
    row = step(4, **meeting(1, 1), unix_seconds=1.5, replica=3)
    row |= {
        "validation/replica_losses of a": [None, 2.5],
        "round/missed": "late",
        "total/skipped_ahead": 10.0,
    }
    assert read_row(json.dumps(row)) == row
    assert read_row(json.dumps(row | {"eggs": 3, "train/loss": math.inf})) == row | {"train/loss": None}


def test_page_tolerates_missing_numbers(tmp_path: Path) -> None:
    write_facts(tmp_path)
    rows = step(2, **meeting(0, 1), unix_seconds=1.0), step(4, unix_seconds=None)
    del rows[0]["round/index"]
    write(tmp_path, "03", *rows, {"kind": "evaluation", "step": 4})
    for folders in ([tmp_path], [tmp_path] * 2):
        output_of("report", *folders)


def test_of_a_federation_those_count_that_have_not_left(tmp_path: Path) -> None:
    write_facts(tmp_path, steps=10)
    write(tmp_path, "00", step(6, **{"round/deadline_seconds": 5.0}), {"kind": "checkpoint", "step": 6})
    write(tmp_path / "replica_00" / "others", "01", step(8), {"kind": "checkpoint", "step": 8})
    write(tmp_path / "replica_00" / "others", "02", step(2), {"kind": "checkpoint", "step": 2})
    log = tmp_path / "replica_00" / "others" / "replica_02" / "metrics.jsonl"
    os.utime(log, (log.stat().st_mtime - 110,) * 2)
    text = " ".join(shown(RunLog(tmp_path), 80, seconds=0))
    assert ": step 6 of 10" in text
    assert "last checkpoint: step 6" in text
    assert "waits for a partner at most: replica 00 5 s" in text
    page = report(tmp_path)[1]
    assert "local steps 2 to 8 of 10" in page
    assert "last checkpoint local step 2 to 8" in page


def test_several_runs_are_compared(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write(other, "00", step(2), step(3), {"kind": "evaluation", "step": 3, "validation/loss": 2.25})
    titles, text = report(run, other, page=tmp_path / "page.html")
    assert [title.removeprefix("Validation loss over ") for title in titles] == [
        "local step",
        "seconds of training",
        "MB sent by the first replica",
    ]
    assert text.index("2.5000 nats") < text.index("2.2500 nats")


def test_evaluations_between_rows_of_steps_are_compared(tmp_path: Path) -> None:
    """2 s a step; the last evaluation is newer than the rows that tell its seconds and bytes."""
    sent = [{"total/sent_bytes": size} for size in (4e6, 6e6)]
    rows = [step(4, **sent[0]), step(8, **sent[1])]
    rows += [{"kind": "evaluation", "step": number} for number in (2, 4, 7, 9)]
    write(tmp_path, "00", *sorted(rows, key=lambda row: row["step"]))
    (log,) = RunLog(tmp_path).replicas
    assert places_of(log, "local step") == [2, 4, 7, 9]
    assert places_of(log, "seconds of training")[:3] == [4, 8, 14]
    *known, newest = places_of(log, "MB sent by the first replica")
    assert known == [2, 4, 5.5]
    assert math.isnan(newest)


def test_a_replica_has_its_own_number_in_the_pairings(tmp_path: Path) -> None:
    """Also in the folder of one job of a federation, which has no other replica's."""
    write(tmp_path, "02", step(2, **meeting(0, 1)), step(4, **meeting(1)))
    assert [list(line.y) for line in pairings_of(RunLog(tmp_path))] == [[1, 2, None], [2, None]]


def test_the_pairings_of_many_rounds_are_few_traces(tmp_path: Path) -> None:
    """A browser draws thousands of lines in a trace, but not thousands of traces."""
    for replica in range(4):
        rounds = (step(2 * done, **meeting(done, replica ^ (1 + done % 2))) for done in range(1, 100))
        write(tmp_path, f"{replica:02d}", *rounds)
    first, second = pairings_of(RunLog(tmp_path))
    assert len(first.x) == len(second.x) == 99 * 3


def test_the_timeline_of_a_federation(tmp_path: Path) -> None:
    """Replica 1 ends after step 2, where its partner skips a round, and goes on with replica 0's state."""

    def at(seconds: float, row: dict[str, Any]) -> dict[str, Any]:
        return row | {"unix_seconds": 1000.0 + seconds}

    missed = {"total/missed_rounds": 1}
    write(
        tmp_path,
        "00",
        at(4, step(2, **meeting(0, 1))),
        at(8, step(4, **meeting(1), **missed)),
        at(12, step(6, **meeting(2), **missed)),
        at(16, step(8, **meeting(3, 1), **missed)),
    )
    write(
        tmp_path,
        "01",
        at(5, step(2, **meeting(0, 0))),
        at(13, {"kind": "start", "step": 2}),
        at(17, step(8, **meeting(3, 0), **{"handover/giver": 0})),
    )
    run = RunLog(tmp_path)
    assert timeline_of(run) == [], "no federation"
    run.facts["config"] = {"federation": {"rendezvous": "file://there"}}
    traces = {trace.name: list(zip(trace.x, trace.y, strict=True)) for trace in timeline_of(run)}
    end = (None, None)
    assert traces == {
        "exchange": [(5, 1), (4, 0), end, (17, 1), (16, 0), end],
        "local steps": [
            *((0, 0), (4, 0), (8, 0), (12, 0), (16, 0), end),
            *((1, 1), (5, 1), end, (13, 1), (17, 1), end),
        ],
        "round with a partner": [(4, 0), (16, 0), (5, 1), (17, 1)],
        "round without a partner": [(12, 0)],
        "round skipped because of the partner": [(8, 0)],
        "start from its checkpoint": [(13, 1)],
        "goes on with another replica's state": [(17, 1)],
    }


def test_the_line_of_a_loss_breaks_where_steps_were_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        "00",
        step(2),
        step(4),
        {"kind": "start", "step": 4},
        step(50, **{"handover/giver": 1}),
        step(52),
    )
    (line,) = next(plots_of_one(RunLog(tmp_path))).traces
    assert list(line.x) == [2, 4, 50, 50, 52]
    assert [math.isnan(y) for y in line.y] == [False, False, True, False, False]


def test_the_line_of_a_spread_breaks_where_nobody_was_there(tmp_path: Path) -> None:
    rows = [step(2 * at, **meeting(at, *[1] * (at not in (3, 4)))) for at in range(1, 7)]
    write(tmp_path, "00", *rows)
    _, plot, *_ = plots_of_one(RunLog(tmp_path))
    assert plot.title == "Spread"
    assert [math.isnan(y) for y in plot.traces[0].y] == [False, False, True, True, False, False]


def test_plots_have_an_axis_of_time_and_smooth_lines(tmp_path: Path) -> None:
    """Of each replica its own seconds: replica 1 is twice as fast, and began at step 4."""
    fast = {"speed/seconds_per_step": 1.0}
    write(tmp_path, "00", *(step(number) for number in (2, 4, 6)), {"kind": "evaluation", "step": 6})
    write(tmp_path, "01", {"kind": "start", "step": 4}, step(6, **fast), step(8, **fast))
    plots = {plot.title: plot for plot in plots_of_one(RunLog(tmp_path))}
    assert [list(places) for places in plots["Loss"].seconds] == [[4, 8, 12], [2, 4]]
    assert not plots["Pairings"].seconds
    switches = [*_switches(plots["Loss"])]
    labels = [[button["label"] for button in switch["buttons"]] for switch in switches]
    assert labels == [["local step", "seconds of training"], ["as logged", "smooth"]]
    (_, smooth) = switches[1]["buttons"]
    assert smooth["args"][0]["y"][0] == pytest.approx([2.8, 2.7, 2.6])
    assert next(_switches(plots["Where the time goes"]))["buttons"][1]["args"][0]["x"]
    report(tmp_path)


def test_smooth_lines_keep_gaps_and_constants() -> None:
    assert smoothed([2.0, 4.0, None, math.nan, 5.0]) == [
        2.0,
        3.0,
        None,
        pytest.approx(math.nan, nan_ok=True),
        5.0,
    ]
    assert smoothed([0.0] + [1.0] * 100)[-1] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("seconds", [600.0, 1600.0])
def test_the_header_follows_the_jobs_that_are_there(seconds: float, tmp_path: Path) -> None:
    """The job of this folder has ended; rows of another come, or come no more."""
    write_facts(tmp_path, steps=100)
    own = write(tmp_path, "00", step(6))
    os.utime(own, (own.stat().st_mtime - 600,) * 2)
    write(tmp_path / "replica_00" / "others", "01", step(8))
    (header, *_) = shown(RunLog(tmp_path), 300, seconds=seconds)
    assert ("step 8 of 100" in header, "no job is under way" in header) == (True, seconds > 600)


def test_other_jobs_are_told_when_a_row_was_written(tmp_path: Path) -> None:
    """So a time line shows them from any folder, and where a job was away."""
    told = list[dict[str, Any]]()
    members: Any = SimpleNamespace(
        publish_row=told.append, rows=list, run=1, mesh=SimpleNamespace(known=dict)
    )
    OtherJobs(members, tmp_path, 0, None).write(step(2, **meeting(0, 0)))
    OtherJobs(members, tmp_path, 2, None).write(step(4, **meeting(1, 0)))
    write(tmp_path, "00", step(2, **meeting(0, 1), unix_seconds=time.time()))
    keep_rows(tmp_path / "replica_00" / "others", [(1, json.dumps(row)) for row in told])
    write_facts(tmp_path)
    present = {trace.name: trace for trace in timeline_of(RunLog(tmp_path))}["local steps"]
    assert list(present.y) == [0, 0, None, 1, 1, None, 1, 1, None]


def test_the_time_of_a_step_is_shown_once(tmp_path: Path) -> None:
    """Waits are a part of forward and backward; means of the replicas; without what took no time."""
    for replica, seconds in (("00", 0.5), ("01", 0.7)):
        times = {
            "time/forward_backward_seconds": seconds,
            "data/wait_seconds": 0.1,
            "time/exchange_seconds": 0.25,
        }
        write(tmp_path, replica, step(3, **times))
    steps, phases = phases_of(RunLog(tmp_path))
    assert steps == [3]
    assert {label: layer for label, (layer,) in phases.items()} == pytest.approx(
        {"waiting for data": 0.1, "forward and backward": 0.5, "exchanges": 0.25, "everything else": 1.15}
    )


def test_a_run_without_rounds_has_no_plots_of_them(tmp_path: Path) -> None:
    write(tmp_path, "00", step(1), step(2))
    assert report(tmp_path)[0] == ["Loss", "Where the time goes"]


def test_a_run_is_asked_to_stop_by_its_folder_or_its_config(run: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    raw = json.loads((ROOT / "configs/quickstart.json").read_text())
    config.write_text(json.dumps(raw | {"training": raw["training"] | {"output_dir": str(run)}}))
    requests = [stop_request(run)]
    assert output_of("stop", run) == f"{run}: no run is under way there\n"
    (run / "running").write_text("process 1 on another-host\n")
    for run_or_config in (run, config):
        output_of("stop", run_or_config)
        requests.append(stop_request(run))
    assert requests[0] == ""
    assert len(set(requests)) == 3, "each is a new one"
    (run / "run.json").unlink()
    output_of("stop", config)  # it is starting
    (run / "running").unlink()
    line = f"{run}: no run has begun there (run.json); give its training.output_dir"
    assert refusal_of("stop", config) == line


def test_a_stop_that_cannot_be_written_is_one_line(run: Path) -> None:
    """As on a disk that is mounted read-only; the job is one of another host."""
    (run / "running").write_text("process 1 on elsewhere\n")
    (run / "stop").mkdir()
    assert refusal_of("stop", run) == (
        f"{run}: the request cannot be written there (Is a directory); call this where the run's folder can be "
        "written, or send SIGTERM to the run's launch script"
    )


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    for command in (["watch", "--once"], ["report"]):
        assert refusal_of(*command, tmp_path).startswith(f"{tmp_path}: no replica has written metrics there")


@pytest.mark.parametrize(
    "content",
    [
        b'{"steps": 1',
        b'{"steps": "\xff"}',
        b'{"steps": "x"}',
        b'{"steps": 1%s}' % (b"0" * 400),
        b'{"replicas": "2"}',
        b'{"replicas": -1}',
        b'{"config": []}',
        b'{"replicas": 2, "config": {"federation": null}}',
        b'{"method": {}}',
    ],
    ids=range(9),
)
def test_a_run_json_that_no_run_writes_is_one_line(content: bytes, run: Path) -> None:
    (run / "run.json").write_bytes(content)
    line = f"{run}/run.json: not what a run writes there; remove the file to go without"
    assert refusal_of("watch", "--once", run) == line
