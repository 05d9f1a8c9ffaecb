"""Federations that are disturbed, and what it costs; each scenario prints one JSON object.

    nice python -m tools.faults SCENARIO --help

"chaos", "storm", "faulty" and "uneven" run each replica as a process of its own, with a folder of its own: they
share no files. "soak" runs replicas without a trainer.
"""

from tools.options import run_case

SCENARIOS = ("chaos", "storm", "faulty", "uneven", "soak")

if __name__ == "__main__":
    run_case("tools.faults", __doc__, SCENARIOS)
