"""What a file that cannot be converted is told: tests/golden/convert_lines.txt has the line of each."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.configs import FILES, SMALLEST
from tests.kit.golden import check
from tests.kit.ranks import refusal_of

CONFIG = FILES.parents[1] / "configs" / "quickstart.json"
MEGATRON = "--micro-batch-size 2\n--train-iters 4\n"

# Name and content of a file; "--config quickstart.json" gives the rest.
WRONG: list[tuple[str, str]] = [
    # what is no such file
    ("empty.json", ""),
    ("empty.toml", " \n"),
    ("package.json", '{"name": "x", "version": "1.0"}'),
    ("ruff.toml", "[lint]\nselect = []"),
    ("compose.yaml", "services: {}\nversion: 3"),
    ("list.yaml", "- 1"),
    ("setup.sh", "echo hello"),
    ("own.json", json.dumps(SMALLEST)),
    ("form.json", '{"gradient_clipping": 1,}'),
    ("form.yaml", "output_dir: [a"),
    ("deep.json", '{"optimizer": ' * 9999),
    # values
    ("kind.json", '{"train_micro_batch_size_per_gpu": "two", "gradient_clipping": 1}'),
    ("kind.txt", f"{MEGATRON}--lr-warmup-iters soon"),
    ("kind.toml", '[training]\nseq_len = "long"'),
    ("kind.yaml", "output_dir: x\nlearning_rate: [1]"),
    ("kind_of_block.json", '{"optimizer": "Adam", "gradient_clipping": 1}'),
    ("scale.txt", f"{MEGATRON}--initial-loss-scale inf"),
    ("exotic.txt", f"{MEGATRON}--lr-decay-style exotic"),
    ("optimizer.json", '{"optimizer": {"type": "Lamb"}}'),
    ("auto.json", '{"train_batch_size": "auto"}'),
    ("rate.txt", f"{MEGATRON}--lr 1e-4 --min-lr 1e-3"),
    ("warmup.txt", f"{MEGATRON}--lr-warmup-iters 4"),
    # what is there twice
    ("twice.json", '{"gradient_clipping": 1, "gradient_clipping": 2}'),
    ("twice.toml", "[training]\nsteps = 1\nsteps = 2"),
    ("twice.yaml", "output_dir: a\nseed: 1\nseed: 2"),
    ("twice.txt", "--lr 1\n--lr 2"),
    ("two_ways.txt", f"{MEGATRON}--recompute-granularity full\n--recompute-activations"),
    # unknown names
    ("unknown.json", '{"gradient_cliping": 1, "train_batch_size": 8}'),
    ("unknown.toml", "[training]\nsteps = 1\nseq_length = 2"),
    ("unknown.yaml", "output_dir: a\nlearning_rat: 1"),
    ("unknown.txt", f"{MEGATRON}--log-intervall 4"),
    # what only a shell knows
    ("argument.sh", "LR=$1\npython pretrain_gpt.py --lr $LR --train-iters 4"),
    ("computed.sh", "python pretrain_gpt.py \\\n --lr $(cat lr)"),
    (
        "condition.sh",
        'ARGS="--lr 1"\nif [ -n "$MORE" ]; then\n ARGS="$ARGS --bf16"\nfi\npython pretrain_gpt.py $ARGS',
    ),
    ("quote.sh", 'python x.py --lr 1 "a'),
    (
        "branches.sh",
        "if [ -d a ] && [ 1 = 2 ] || [ 1 = 1 ]; then A=--bf16; fi\n"
        "if [ 1 = 2 ] || [ -d a ]; then A=--fp16; fi\npython x.py --lr 1 $A",
    ),
    ("brackets.sh", "if ( [ 1 = 2 ] && [ -d a ] ); then A=--bf16; fi\npython x.py --lr 1 $A"),
    ("two.sh", "python a.py --lr 1\npython b.py --lr 2"),
]
# Files of tests/other_programs, or with these contents, and options
SEVERAL = [
    "mixture.txt",
    "mixture.txt --world-size 3",
    "llama.sh --world-size 7",
    "llama.sh --world-size 6",
    "llama.sh clipping.json",
    "llama.sh --config rest.json",
    "llama.sh --config block.json",
    "llama.sh --output mine.json",
    "nowhere.sh",
    "samples.txt --world-size 4",
    "style.txt",
    "scheduler.json share.yaml",
]
CONTENTS = {
    "clipping.json": '{"train_batch_size": 16, "gradient_clipping": 0.5, "bf16": {"enabled": true}}',
    "rest.json": '{"noloko": {"local_steps": 20}}',
    "block.json": '{"model": 3}',
    "samples.txt": "--train-tokens 4096\n--micro-batch-size 2\n--num-layers 2",
    "style.txt": "--lr-decay-style cosine\n--lr 1",
    "scheduler.json": '{"scheduler": {"type": "WarmupLR"}, "gradient_clipping": 1}',
    "share.yaml": "output_dir: a\nlogging_steps: 0.5\nnum_train_epochs: 1",
    "mine.json": "mine",
}


def test_each_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exit code 2, and no config is written."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    shutil.copy(CONFIG, tmp_path)
    for name, content in [*WRONG, *CONTENTS.items()]:
        (tmp_path / name).write_text(content)

    def cases() -> Iterator[tuple[str, str]]:
        files = [f"{name} --config {CONFIG.name}" for name, _ in WRONG]
        for command in [*files, *SEVERAL]:
            yield command, refusal_of("convert", "--output", "run.json", *command.split())
            assert not Path("run.json").exists()

    check("convert_lines", cases())
    assert Path("mine.json").read_text() == "mine"
