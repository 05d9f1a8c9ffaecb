"""The effect of routing on spread and validation loss, for every interval, with rounds and without.

    nice -n 10 python -m tools.study_routing --output runs/study_routing --plot docs/routing.png

Trains 4 replicas x 2 stages of a very small Llama, once per method ("noloco": rounds; "none": routing alone),
routing interval and seed, one run after the other, each with the real trainer under mpirun. Finished runs are not
repeated, so an interrupted study can be continued. Runs of one seed start from the same weights and read the same
samples in the same order: only the routes differ, so they are compared pair by pair.

Prints one JSON object and writes it to OUTPUT/study.json; the plot is a PNG.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
REPLICAS, STAGES = 4, 2
METHODS = {"noloco": "rounds every {local_steps} steps (NoLoCo)", "none": "no rounds (routing alone)"}
INTERVALS = ("off", "round", "step", "microbatch")
RUN_SECONDS = 1800.0  # a run that takes longer hangs


class Run(NamedTuple):
    method: str
    interval: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.interval}-seed{self.seed}"


class Evaluation(NamedTuple):
    """One evaluation of one run: means over what the replicas wrote."""

    step: int
    replica_loss: float  # mean over the replicas' own losses, nats per token
    mean_model_loss: float
    spread: float  # over the replicas, of the last stage's weights


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/study_routing"), help="folder of the runs")
    parser.add_argument("--plot", type=Path, help="the PNG; default: OUTPUT/routing.png")
    parser.add_argument("--text", default="python-stdlib", help="data.text: a text file, a folder, or this")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--local-steps", type=int, default=10, help="steps between two rounds, or reshuffles")
    parser.add_argument("--eval-interval", type=int, default=25)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options = parser.parse_args()

    runs = [
        Run(method, interval, seed) for seed in options.seeds for interval in INTERVALS for method in METHODS
    ]
    for number, run in enumerate(runs, 1):
        started = time.perf_counter()
        done = "trained" if train(run, options) else "found"
        print(
            f"{number}/{len(runs)} {run.name}: {done}, {time.perf_counter() - started:.0f} s", file=sys.stderr
        )
    histories = {run: read_history(options.output / run.name) for run in runs}
    study = {
        "configuration": configuration(runs[0], options, "RUN"),
        "results": summarise(histories, options),
    }
    text = json.dumps(study, indent=1)
    (options.output / "study.json").write_text(text + "\n")
    print(text)
    plot(histories, options, options.plot or options.output / "routing.png")


def configuration(run: Run, options: argparse.Namespace, output_dir: str) -> dict[str, Any]:
    """The settings of the quickstart with a smaller model."""
    schedule = {"total_num_steps": options.steps, "warmup_num_steps": options.steps // 10}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupCosineLR",
            "params": {
                **schedule, "warmup_type": "linear", "warmup_min_ratio": 0.0, "cos_min_ratio": 0.1
            },
        },
        "gradient_clipping": 1.0,
        "noloco": {
            "enabled": run.method != "none",
            "local_steps": options.local_steps,
            "outer_momentum": 0.5,
            "outer_lr": 0.7,
            "routing": {"interval": run.interval},
        },
        "parallel": {"replicas": REPLICAS, "pipeline_model_parallel_size": STAGES},
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 192,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "seq_length": 64,
            "make_vocab_size_divisible_by": 32,
        },
        "data": {"text": options.text, "split": "949,50,1"},
        "training": {
            "train_iters": options.steps,
            "seed": run.seed,
            "log_interval": options.eval_interval,
            "output_dir": output_dir,
        },
        "evaluation": {"interval": options.eval_interval, "iters": 16},
        "tensorboard": {"enabled": False},
    }  # fmt: skip


def train(run: Run, options: argparse.Namespace) -> bool:
    """Whether the run had to be trained; what is there already must have been trained alike."""
    folder, unfinished = options.output / run.name, options.output / f"{run.name}.unfinished"
    config = configuration(run, options, str(unfinished))
    if folder.exists():
        trained = json.loads((folder / "config.json").read_text())
        trained["training"]["output_dir"] = str(unfinished)  # the folder may have been moved since
        if trained != config:
            raise SystemExit(
                f"{folder} was trained with other settings: choose another --output or remove it"
            )
        return False
    shutil.rmtree(unfinished, ignore_errors=True)  # the metrics of a run that was cut off
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(config, indent=1))
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else "mpirun"
    command = [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(REPLICAS * STAGES), sys.executable]
    command += ["-m", "megatron_noloco", "train", "--progress", "lines"]
    command += ["--config", str(unfinished / "config.json")]
    environ = os.environ | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environ.get("PYTHONPATH")]))
    environ.setdefault("OMP_NUM_THREADS", "1")
    with (unfinished / "log.txt").open("w") as log:
        code = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=RUN_SECONDS
        ).returncode
    if code:
        raise SystemExit(f"{run.name} ended with exit code {code}; see {unfinished / 'log.txt'}")
    unfinished.rename(folder)
    return True


def read_history(folder: Path) -> list[Evaluation]:
    """The evaluations of a run. Every replica writes all losses, so one replica's file is enough."""
    rows = map(json.loads, (folder / "replica_00" / "metrics.jsonl").read_text().splitlines())
    return [
        Evaluation(
            row["step"],
            statistics.fmean(row["validation/replica_losses"]),
            row["validation/mean_model_loss"],
            row["validation/spread"],
        )
        for row in rows
        if row["kind"] == "evaluation"
    ]


def summarise(histories: dict[Run, list[Evaluation]], options: argparse.Namespace) -> dict[str, Any]:
    """Mean and standard deviation over the seeds; ratios to "off" are taken seed by seed."""
    results: dict[str, Any] = {}
    for method, interval in cases():
        last = {seed: histories[Run(method, interval, seed)][-1] for seed in options.seeds}
        off = {seed: histories[Run(method, "off", seed)][-1] for seed in options.seeds}
        mean_spread = {seed: mean_of_spread(histories[Run(method, interval, seed)]) for seed in options.seeds}
        mean_off = {seed: mean_of_spread(histories[Run(method, "off", seed)]) for seed in options.seeds}
        results[f"{method} {interval}"] = {
            "final_spread": over_seeds(last[s].spread for s in last),
            "final_spread_over_off": over_seeds(last[s].spread / off[s].spread for s in last),
            "mean_spread_over_off": over_seeds(mean_spread[s] / mean_off[s] for s in last),
            "final_replica_loss": over_seeds(last[s].replica_loss for s in last),
            "final_perplexity_over_off": over_seeds(
                math.exp(last[s].replica_loss - off[s].replica_loss) for s in last
            ),
            "final_mean_model_loss": over_seeds(last[s].mean_model_loss for s in last),
        }
    return results


def cases() -> Iterator[tuple[str, str]]:
    return ((method, interval) for method in METHODS for interval in INTERVALS)


def mean_of_spread(history: list[Evaluation]) -> float:
    """Over all evaluations of a run."""
    return statistics.fmean(evaluation.spread for evaluation in history)


def over_seeds(values: Iterator[float]) -> dict[str, float]:
    seen = list(values)
    deviation = statistics.stdev(seen) if len(seen) > 1 else 0.0
    return {"mean": round(statistics.fmean(seen), 6), "sd": round(deviation, 6)}


def plot(histories: dict[Run, list[Evaluation]], options: argparse.Namespace, path: Path) -> None:
    """Spread above, perplexity over that of routing off below; a line per interval, a band of one deviation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, len(METHODS), figsize=(10, 7), sharex=True)
    for column, (method, title) in enumerate(METHODS.items()):
        above, below = axes[:, column]
        for color, interval in enumerate(INTERVALS):
            runs = [Run(method, interval, seed) for seed in options.seeds]
            steps = [evaluation.step for evaluation in histories[runs[0]]]
            spreads = [[evaluation.spread for evaluation in histories[run]] for run in runs]
            draw_band(above, steps, spreads, f"C{color}", interval)
            perplexities = [relative_perplexity(histories, run) for run in runs]
            draw_band(below, steps, perplexities, f"C{color}", interval)
        above.set_title(title.format(local_steps=options.local_steps))
        above.set_ylim(bottom=0)
        below.set_xlabel("local step")
    axes[0, 0].set_ylabel("spread (last stage)")
    axes[1, 0].set_ylabel("perplexity / perplexity with routing off")
    axes[1, 1].sharey(axes[1, 0])
    axes[1, 0].autoscale()
    axes[0, 0].legend(title="routing.interval")
    seeds = ", ".join(map(str, options.seeds))
    figure.suptitle(f"{REPLICAS} replicas x {STAGES} stages, seeds {seeds}: mean and one standard deviation")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def relative_perplexity(histories: dict[Run, list[Evaluation]], run: Run) -> list[float]:
    off = histories[run._replace(interval="off")]
    return [
        math.exp(here.replica_loss - there.replica_loss)
        for here, there in zip(histories[run], off, strict=True)
    ]


def draw_band(axis: Any, steps: list[int], lines: list[list[float]], color: str, label: str) -> None:
    columns = [over_seeds(iter(values)) for values in zip(*lines, strict=True)]
    means = [column["mean"] for column in columns]
    axis.plot(steps, means, color=color, label=label, marker="o", markersize=3)
    lower, upper = ([m + sign * c["sd"] for m, c in zip(means, columns, strict=True)] for sign in (-1, 1))
    axis.fill_between(steps, lower, upper, color=color, alpha=0.15, linewidth=0)


if __name__ == "__main__":
    main()
