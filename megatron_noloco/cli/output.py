"""How commands write to stdout."""

import sys

CHECKPOINT = (
    "a step folder, or a run's output_dir (its latest checkpoint); of a federation its output_dir, or the "
    "folders of several replicas (the newest step that all have)"
)


def say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
