"""Benchmarks: each prints one JSON object.

    python -m tools.bench CASE --help
    python -m tools.bench payload

Under mpirun, a rank each: exchange and overlap. "against" compares this tree with another commit, and prints an
object for each benchmark.
"""

from tools.options import run_case

CASES = (
    *("against", "checkpoint", "exchange", "federation", "host"),
    *("overlap", "payload", "routing", "throughput"),
)

if __name__ == "__main__":
    run_case("tools.bench", __doc__, CASES)
