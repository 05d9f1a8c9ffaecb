"""Codes on a GPU: are they those of a CPU, and how many weights does it code in a second.

    python -m tools.gpu_check.coding [--elements 33554432] [--device cuda]

A member of a pair codes, and uses the codes of the other, without messages (`tools/bench/payload.py`). Exit code 1
where its mean is not that of a CPU, bit for bit.
"""

import json
import sys

import torch

from megatron_noloco.outer.payload import BLOCK
from megatron_noloco.plans.payloads import BITS
from tools.bench.payload import coded
from tools.options import command_line


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.set_num_threads(1)
    elements, draw = options.elements // BLOCK * BLOCK, torch.Generator().manual_seed(0)
    phi = torch.randn(elements, generator=draw)
    mine, theirs = (phi + 0.01 * torch.randn(elements, generator=draw) for _ in range(2))
    figures, peers, wrong = list[str](), list[str](), list[str]()
    for bits in BITS:
        there = coded(mine.to(options.device), theirs.to(options.device), options.repeats, bits)
        here = coded(mine, theirs, 1, bits)
        if not torch.equal(there.mean.cpu(), here.mean):
            apart = (there.mean.cpu() - here.mean).abs()
            wrong.append(f"int{bits}: {int((apart > 0).sum())} means differ, by up to {apart.max():.2g}")
        for found, way in ((figures, there), (peers, here)):
            rates = (elements / seconds / 1e9 for seconds in (way.encode_seconds, way.decode_seconds))
            found.append(f"int{bits} " + " and ".join(f"{rate:.3g}" for rate in rates))
    words = "G weights/s to code and to use"
    print(json.dumps({"figure": f"{', '.join(figures)} {words}", "peer": f"{', '.join(peers)} on a core"}))
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
