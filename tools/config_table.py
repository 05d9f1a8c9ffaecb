"""The table of configs/README.md: what each configuration needs, as `plan` says.

    python -m tools.config_table

writes it there, between two comments.
"""

from pathlib import Path

from megatron_noloco.config import RunConfig, load_config, resolve
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.preflight.plan import plan_of
from megatron_noloco.preflight.schemes import Network
from tools.options import write_between

README = Path(__file__).parents[1] / "configs" / "README.md"
BEGIN, END = "<!-- tools/config_table.py -->\n", "<!-- end -->"
_GIGABIT = 1e9 / 8  # bytes per second
_RANKS_OF_NODE = 8  # that share a link, as `plan --gpu` has it


def main() -> None:
    write_between(README, BEGIN, END, table())


def table() -> str:
    head = [
        "file",
        "ranks",
        "GB per rank",
        "GB in host memory",
        "tokens per local step",
        "MB per exchange and rank",
        "seconds, 1 Gbit/s",
    ]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    files = sorted({*README.parent.glob("*.json")} - {README.parent / "schema.json"})
    rows += [_row(path.name, load_config(str(path))) for path in files]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(name: str, config: RunConfig) -> list[str]:
    topology = config.topology(config.world_size or config.parallel.replica_size)
    config = resolve(config, topology.ensemble).config
    architecture = config.architecture(config.model.vocab_size or ByteTokenizer.vocab_size)
    ranks = min(topology.world_size, _RANKS_OF_NODE)
    plan = plan_of(config, architecture, topology, Network(_GIGABIT, 0.0, ranks))
    memory = plan.memory
    own = [scheme for scheme in plan.schemes if scheme.name == "this config"]
    tokens = topology.replicas * config.replica_batch * architecture.seq_length
    return [
        f"`{name}`",
        str(topology.world_size),
        f"{memory.device_bytes / 1e9:.2g}",
        f"{memory.host_bytes / 1e9:.2g}",
        f"{tokens:,}",
        _short(own[0].bytes_per_exchange / 1e6) if own else "-",
        _short(own[0].seconds_per_exchange) if own else "-",
    ]


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.2g}" if figure >= 0.001 else "< 0.001"


if __name__ == "__main__":
    main()
