"""Jobs behind routers that translate addresses: who exchanges with whom, and over which hosts the bytes go."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.netlab.lab import Lab, lab
from tests.netlab.network import Link
from tests.netlab.relay import address_of
from tools.processes import Federation, base_config

_REPLICAS, _HOMES = 4, 2
_PORT = 29500  # on every host
_STEPS = 60
_SECONDS = 600.0


class InLab(Federation):
    """Replicas on hosts of a lab.

    Args:
        homes: replicas behind a router, with the host's name (`Lab.behind`); no other can connect to them.
    """

    def __init__(
        self, folder: Path, base: dict[str, Any], settings: dict[str, Any], there: Lab, homes: dict[int, str]
    ) -> None:
        super().__init__(folder, base, settings)
        self._there, self._homes = there, homes

    def network(self, replica: int) -> dict[str, str]:
        addresses = [f"tcp://{address_of(slot)}:{_PORT}" for slot in range(_REPLICAS)]
        seeds = [address[6:] for slot, address in enumerate(addresses) if slot not in self._homes]
        listen = "off" if replica in self._homes else addresses[replica]
        return {"listen": listen, "rendezvous": "tcp://" + ",".join(seeds)}

    def placed(self, replica: int, command: list[str]) -> list[str]:
        return self._there.on(self._homes.get(replica, self._there.names[replica]), *command)


def measure(link: Link, congestion: str) -> Iterator[dict[str, Any]]:
    """Yield a row for two replicas behind routers, which exchange with two that can be reached."""
    with (
        lab([link] * _REPLICAS, congestion) as there,
        ExitStack() as stack,
        tempfile.TemporaryDirectory() as folder,
    ):
        hidden = range(_REPLICAS - _HOMES, _REPLICAS)
        names = {replica: stack.enter_context(there.behind(there.names[replica])) for replica in hidden}
        yield _run(there, names, Path(folder))


def _run(there: Lab, names: dict[int, str], folder: Path) -> dict[str, Any]:
    settings = {
        "slots": _REPLICAS, "start_with": _REPLICAS, "skip_local_steps": False, "rounds_behind": 1000,
    }  # fmt: skip
    base = base_config(_STEPS)
    base["noloco"] |= {"payload": "int8"}
    with InLab(folder, base, settings, there, names) as federation:
        for replica in range(_REPLICAS):
            federation.start(replica)
        federation.wait(_SECONDS)
        return {
            "behind_routers": sorted(names),
            "exit_codes": federation.exit_codes(),
            "partners": {replica: _partners(federation, replica) for replica in range(_REPLICAS)},
            "missed_rounds": {one: federation.total(one, "missed_rounds") for one in range(_REPLICAS)},
            "losses": {one: federation.loss(one) for one in range(_REPLICAS)},
            "sent_bytes": {name: there.sent_bytes(name) for name in there.names},
        }


def _partners(federation: Federation, replica: int) -> dict[str, int]:
    """Return how many rounds a replica had with each partner."""
    rounds = Counter[str]()
    for row in federation.rows(replica):
        if row.get("round/partners"):
            rounds[",".join(map(str, row["round/partners"]))] += 1
    return dict(sorted(rounds.items()))
