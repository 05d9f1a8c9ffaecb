"""A short run of the quickstart in this environment: its loss falls, and the console shows no warnings."""

import json

from tools.runner import REPOSITORY, launched

_STEPS = 20


def main() -> None:
    config = json.loads((REPOSITORY / "configs/quickstart.json").read_text())
    config["training"] |= {"train_iters": _STEPS, "log_interval": 1}
    config["scheduler"]["params"] |= {"total_num_steps": _STEPS, "warmup_num_steps": 2}
    config["evaluation"] = {"iters": 0}
    (log, *_), said = launched(config, ranks=8)
    noise = [line for line in said.splitlines() if "warning" in line.lower() or "deprecat" in line.lower()]
    if noise:
        raise SystemExit("\n".join(["the console shows", *noise]))
    first, *_, last = [row["train/loss"] for row in log.rows_of("step")]
    if not last < first - 0.5:
        raise SystemExit(f"the loss went from {first:.4f} to {last:.4f} nats per token")
    print(json.dumps({"figure": f"{first:.4f} to {last:.4f}"}))


if __name__ == "__main__":
    main()
