"""Asks the jobs of a run who there is, without being a member: for commands."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress

from megatron_noloco.errors import UserError
from megatron_noloco.federation.https_client import CONNECTION_ERRORS, Client, RefusalError, why_not
from megatron_noloco.federation.keys import Identity
from megatron_noloco.federation.mesh import Member
from megatron_noloco.federation.statuses import PeerStatus, SignedStatus, Statuses


def visit(
    identity: Identity, run: int, addresses: Sequence[str]
) -> tuple[Mapping[Member, PeerStatus], set[Member]]:
    """Return the last status of each member of a run, and who is there, as the first job sees it that answers.

    Args:
        identity: of a visitor, or of the slot of a member file.
        addresses: HOST:PORT of jobs.

    Raises UserError where no job answers.
    """
    statuses, present = Statuses(run, Member(identity.slot, time.time_ns()), identity), set[Member]()

    async def ask(client: Client, address: str) -> None:
        async with aclosing(client.statuses(address)) as lines:
            async for line in lines:
                with suppress(ValueError, TypeError):
                    if isinstance(names := line.get("present"), list):
                        present.update(map(Member.parse, names))
                    else:
                        statuses.take(SignedStatus.parse(line))

    async def ask_first() -> str:
        client, reasons = Client(statuses, None), list[str]()
        try:
            for address in addresses:
                try:
                    await ask(client, address)
                    return ""
                except RefusalError:
                    reasons.append(f"the job at {address} is of another run")
                except CONNECTION_ERRORS as error:
                    reasons.append(await why_not(address, error))
        finally:
            await client.close()
        return "; ".join(reasons) or "there is no address of a job to ask"

    if problem := asyncio.run(ask_first()):
        raise UserError(problem)
    return {signed.member: signed.status for signed in statuses.newest()}, present
