"""Text to Megatron's indexed datasets, PREFIX_KEY_document.{bin,idx}.

    python tools/preprocess_data.py --input corpus.jsonl.zst --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model path/to/tokenizer --append-eod

The same as `python -m megatron_noloco data preprocess`, for those who look here first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_noloco.cli.main import run

if __name__ == "__main__":
    run(["data", "preprocess", *sys.argv[1:]])
