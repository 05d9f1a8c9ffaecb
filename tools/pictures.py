"""The pictures of docs/ that show a run, light and dark: `watch` of a federation, its report, and its timeline.

python -m tools.pictures docs      # or: make pictures; two minutes

It runs launch/federation.sh, calls `watch` once the killed replica is back, and `report` at the end. Headless
Chromium (Debian: apt install chromium) photographs the pages.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from html import escape
from pathlib import Path

from PIL import Image

from megatron_noloco.monitor.run_log import RunLog
from tools.options import command_line

RUN = Path("runs/federation")
_CLI = (sys.executable, "-m", "megatron_noloco")
_CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
_SCHEMES = {"light": 1, "dark": 0}  # Chromium's numbers of the schemes that a page may ask for
_PARTS = {  # of the report: what a picture leaves out, and its height in pixels
    "report": ("section:nth-of-type(n+2)", 1060),
    "timeline": ("h1,table,h2,body>p,section:not(:last-of-type)", 500),
}
_TERMINAL = "<style>:root{color-scheme:light dark}pre{font-size:15px;line-height:1.35;margin:1em}</style>"
_COLORS = 256


def watched(run: Path) -> str:
    """Run the federation; return what `watch` shows while all three replicas train, replica 2 once more."""
    shown = ""
    shutil.rmtree(run, ignore_errors=True)
    with subprocess.Popen(["launch/federation.sh"]) as federation:
        while federation.poll() is None:
            if not shown and _is_back(run):
                shown = subprocess.run(
                    [*_CLI, "watch", run, "--once"], check=True, capture_output=True, text=True
                ).stdout
            time.sleep(0.5)
    if federation.returncode or not shown:
        raise SystemExit(f"{run}: exit code {federation.returncode}; replica 2 seen back: {bool(shown)}")
    return shown


def _is_back(run: Path) -> bool:
    """Return whether replica 2 has trained since it was started again."""
    try:
        rows = next(log.rows for log in RunLog(run).replicas if log.replica == "02")
    except (ValueError, StopIteration):
        return False
    starts = [index for index, row in enumerate(rows) if row["kind"] == "start"]
    return bool(starts) and any("round/partners" in row for row in rows[starts[-1] :])


def photograph(page: str, height: int, path: Path) -> None:
    """Write a picture of a page for each scheme: PATH-light.png, PATH-dark.png."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.html").write_text(page)
        for scheme, number in _SCHEMES.items():
            picture = path.with_name(f"{path.name}-{scheme}.png")
            options = [
                f"--user-data-dir={folder}/profile",
                f"--blink-settings=preferredColorScheme={number}",
                f"--window-size=900,{height}",
                "--virtual-time-budget=5000",
                f"--screenshot={picture.resolve()}",
            ]
            subprocess.run(
                [*_CHROMIUM, *options, f"file://{folder}/page.html"], check=True, capture_output=True
            )
            Image.open(picture).convert("RGB").quantize(_COLORS).save(picture, optimize=True)
            print(picture)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="where the pictures are written")
    folder = parser.parse_args().folder
    if shutil.which(_CHROMIUM[0]) is None:
        parser.error("chromium is not there (Debian: apt install chromium)")
    folder.mkdir(parents=True, exist_ok=True)
    terminal = watched(RUN)
    text = f"$ megatron-noloco watch {RUN}\n{terminal}"
    photograph(f"{_TERMINAL}<pre>{escape(text)}</pre>", 40 + 21 * text.count("\n"), folder / "watch")
    subprocess.run([*_CLI, "report", RUN], check=True, stdout=subprocess.DEVNULL)
    report = (RUN / "report.html").read_text().replace(str(RUN.resolve()), str(RUN))
    for name, (left_out, height) in _PARTS.items():
        photograph(
            f"{report}<style>{left_out},.modebar{{display:none!important}}</style>", height, folder / name
        )


if __name__ == "__main__":
    main()
