"""A program that is no job learns which jobs there are."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
from megatron_noloco.federation.inquiry import known_addresses

from megatron_noloco.federation.keys import Keys
from megatron_noloco.federation.network import Network
from megatron_noloco.federation.rendezvous import Seeds, SharedFolder, split
from tests.unit.federated import RUN, connected, until


def test_a_key_that_was_replaced_is_named(tmp_path: Path) -> None:
    Keys.make(tmp_path / "new")
    keys = Keys.make(tmp_path / "key")
    with redirect_stderr(io.StringIO()), connected(tmp_path, 1, slots=2, keys=keys) as (job,):
        place = split(job.address.endpoint)
        network = Network(Seeds([place]), RUN, None, Keys.read(tmp_path / "new"))
        with pytest.raises(ValueError, match=f"the job at {job.address.endpoint} has another key"):
            known_addresses(network)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_program_that_is_no_job_learns_which_jobs_there_are(tmp_path: Path, encrypted: bool) -> None:
    keys = Keys.make(tmp_path / "key") if encrypted else None
    with (
        redirect_stderr(io.StringIO()) as output,
        connected(tmp_path, 2, slots=3, keys=keys) as (first, second),
    ):
        expected = {0: first.address.endpoint, 1: second.address.endpoint}
        folder = Network(SharedFolder(tmp_path, RUN), RUN, None, keys)
        assert known_addresses(folder) == expected
        places = [("127.0.0.1", 1), split(second.address.endpoint)]  # nobody is at the first
        until(lambda: known_addresses(Network(Seeds(places), RUN, None, keys)) == expected)
        assert known_addresses(Network(Seeds(places), RUN + 1, None, keys)) == {}, "they are of another run"
        until(lambda: "replica 1: a program that invites is refused: its job differs" in output.getvalue())
        assert first.service.peers.directory.addresses.keys() == {0, 1}
