"""What a launch script says of a mistake before it starts anything: tests/golden/launch_lines.txt."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.kit.golden import check
from tests.kit.launched import said_by
from tests.kit.ranks import REPOSITORY

CONFIG = str(REPOSITORY / "configs" / "quickstart.json")
LAUNCHERS = ("mpirun.sh", "torchrun.sh", "deepspeed.sh")
# Hostfiles and programs in the folder that is HERE in the variables
FILES = {
    "none": "# none\n\n",
    "one": "node1 slots=8\n",
    "typo": "node1 slots=8 # fast\nnode2 slot=8\n",
    "openmpi": "#!/bin/sh\necho 'mpirun (Open MPI) 5.0.11'\n",
    "old": '#!/bin/sh\n[ "$1" != --version ] || echo Python 3.9.2\n[ "$1" != -c ]\n',
}
# Script, arguments, variables
WRONG: list[tuple[str, str, str]] = [
    *((script, f"{CONFIG} 8", "") for script in LAUNCHERS),
    *((script, f"08 {CONFIG}", "") for script in LAUNCHERS),
    *((script, f"6 {CONFIG}", "") for script in LAUNCHERS),
    ("mpirun.sh", f"8 {CONFIG}", "PYTHON=/opt/typo"),
    ("mpirun.sh", f"8 {CONFIG}", "MPIRUN=/opt/typo"),
    *((script, f"8 {CONFIG}", "HOSTFILE=HERE/missing") for script in ("mpirun.sh", "deepspeed.sh")),
    *((script, f"8 {CONFIG}", "HOSTFILE=HERE/none") for script in ("mpirun.sh", "deepspeed.sh")),
    *((script, f"8 {CONFIG}", "HOSTFILE=HERE/typo") for script in ("mpirun.sh", "deepspeed.sh")),
    ("deepspeed.sh", f"8 {CONFIG}", "LAUNCHER=rsh"),
    ("deepspeed.sh", f"8 {CONFIG}", "NODE_RANK=0"),
    ("deepspeed.sh", f"8 {CONFIG}", "LAUNCHER=openmpi HOSTFILE=HERE/one"),
    ("deepspeed.sh", f"8 {CONFIG}", "LAUNCHER=mpich HOSTFILE=HERE/one MPIRUN=HERE/openmpi"),
    ("deepspeed.sh", f"8 {CONFIG}", "NODE_RANK=first HOSTFILE=HERE/one"),
    ("setup.sh", "", "PYTHON=of-nowhere"),
    ("setup.sh", "", "PYTHON=HERE/old"),
]


def test_each_is_one_line(tmp_path: Path) -> None:
    """With exit code 2; 1 of a set-up, which make runs."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)

    def said_of(row: tuple[str, str, str]) -> str:
        script, arguments, variables = row
        words = variables.replace("HERE", str(tmp_path)).split()
        code, said = said_by(script, *arguments.split(), environ=dict(word.split("=", 1) for word in words))
        assert code == (1 if script == "setup.sh" else 2)
        assert len(said.splitlines()) == 1
        return said.replace(str(tmp_path), "HERE").replace(str(REPOSITORY), "REPOSITORY")

    def cases() -> Iterator[tuple[str, str]]:
        with ThreadPoolExecutor(2) as threads:
            for row, said in zip(WRONG, threads.map(said_of, WRONG), strict=True):
                script, arguments, variables = row
                shown = f"{variables} {script} {arguments}".strip()
                yield shown.replace(str(REPOSITORY), "REPOSITORY"), said

    check("launch_lines", cases())
