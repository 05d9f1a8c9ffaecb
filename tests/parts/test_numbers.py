"""The table of numbers: what it says of a number holds wherever numbers are shown."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megatron_noloco.monitor import numbers, plots, run_log, watch
from megatron_noloco.monitor.console import RunFacts, log_lines
from megatron_noloco.monitor.numbers import SPREAD, TABLE, TIME, Number, number_of
from megatron_noloco.monitor.reductions import LAST, LAST_SUM
from tests.kit.ranks import run_ranks
from tests.kit.rows import STEP, begin, step, write

PACKAGE = Path(numbers.__file__).parents[1]
NEW = Number(
    *("speed/eggs", LAST_SUM, "{:.1f}".format, "eggs of this replica", "eggs: {}"),
    **{"column": "Eggs", "note": "eggs laid", "chart": SPREAD},
)
PART = Number(
    "time/hen_seconds", LAST, str, "of the hen", chart=TIME, label="hen", part_of="data/wait_seconds"
)


@pytest.fixture
def extended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the table by two numbers."""
    for number in (NEW, PART):
        monkeypatch.setitem(TABLE, number.name, number)


def report(rank: int, world_size: int) -> list[dict[str, Any]]:
    metrics, rows = begin()
    metrics.record("speed/eggs", 1.0 + rank)
    metrics.write_steps(1, 1)
    return rows


def test_one_entry_and_one_report_show_a_number_everywhere(extended: None, tmp_path: Path) -> None:
    ((row,), _) = run_ranks(2, report)
    eggs = {"speed/eggs": row["speed/eggs"]}
    assert eggs == {"speed/eggs": 3.0}
    (line,) = log_lines({**STEP, **eggs}, 20, RunFacts(0.0, "", "", 0.0, "", "", ()))
    assert line.endswith(" | eggs: 3.0 |")
    write(tmp_path, "00", step(2, **eggs), step(4, **eggs, **{"data/wait_seconds": 0.5, PART.name: 0.25}))
    run, shown = run_log.RunLog(tmp_path), io.StringIO()
    Console(file=shown, width=100).print(watch.run_table(run))
    _, heading, cells, note = (" ".join(text.split()) for text in shown.getvalue().splitlines()[-4:])
    assert heading == "replica step loss tokens/s Eggs age"
    assert cells.startswith("00 4 2.6000 1000 3.0 ")
    assert note == "replica 00: 6.0 eggs laid"
    charts = {plot.title: plot.traces for plot in plots.plots_of_one(run)}
    assert list(charts[SPREAD][0].y) == [3.0, 3.0]
    assert {trace.name: trace.y[-1] for trace in charts[TIME]} == {
        "hen": 0.25,
        "waiting for data": 0.25,
        "everything else": 2.0,
    }


def test_each_name_in_the_code_is_one_of_the_table() -> None:
    """So that no reader looks for a number that is never written."""
    prefixes = "|".join({name.split("/")[0] for name in TABLE})
    quoted = re.compile(rf'"((?:{prefixes})/[a-z][^"\n]*)"')
    found = [name for path in PACKAGE.rglob("*.py") for name in quoted.findall(path.read_text())]
    assert len(found) > 100
    for name in found:
        begin, placeholder, _ = name.partition("{")
        assert number_of(f"{begin}1" if placeholder and begin.endswith(" of ") else begin)


def test_parts_are_in_the_chart_of_the_whole() -> None:
    for number in TABLE.values():
        assert not number.part_of or number_of(number.part_of).chart == number.chart
