"""The outcomes as a table in Markdown."""

from collections.abc import Mapping, Sequence

from tools.gpu_check.runner import Outcome, Step


def table(steps: Sequence[Step], found: Mapping[str, Outcome]) -> str:
    """A row for each step in order, those that have not run included; below it the errors."""
    lines = ["| step | what | passed | seconds | figure | the peer's |", "|---|---|---|---|---|---|"]
    for step in steps:
        outcome = found.get(step.name)
        cells = ["waiting", "", "", ""]
        if outcome is not None:
            verdict = "yes" if outcome.passed else "**no**"
            cells = [verdict, f"{outcome.seconds:.0f}", outcome.figure, outcome.peer]
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in [step.name, step.what, *cells]) + " |"
        )
    for step in steps:
        outcome = found.get(step.name)
        if outcome is not None and outcome.error:
            lines += ["", f"**{step.name}**", "", "```", outcome.error, "```"]
    return "\n".join(lines) + "\n"
