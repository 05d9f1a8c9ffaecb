"""Convert between checkpoints and Hugging Face folders.

    python tools/convert.py export runs/quickstart --output my-llama
    python tools/convert.py import my-llama --config configs/quickstart.json --output finetune.json

The same as `python -m megatron_noloco export|import`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_noloco.cli.main import run

COMMANDS = ("export", "import")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        sys.stdout.write(f"{__doc__}\n")
        sys.exit(0 if {"-h", "--help"} & set(sys.argv) else 2)
    run(sys.argv[1:])
