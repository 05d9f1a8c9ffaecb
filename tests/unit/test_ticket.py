"""The line of an invitation is read from a mail, and no other line is taken."""

import random
import re
import string
from contextlib import suppress

import pytest

from megatron_noloco import __version__
from megatron_noloco.federation.joining import Ticket, line_of, ticket_in

TICKET = Ticket(__version__, "tcp://10.0.0.1:29600", "0f" * 32, "a1" * 16)


def test_no_line_but_the_one_that_was_printed_is_taken() -> None:
    line, draw = line_of(TICKET), random.Random(1)
    assert ticket_in(line) == TICKET
    mutants = {line[:cut] for cut in range(0, len(line), 7)} | {line + "=", line + "A", line.lower(), ""}
    while len(mutants) < 300:
        place = draw.randrange(len(line))
        mutants.add(line[:place] + draw.choice(string.printable) + line[place + draw.randrange(2) :])
    changed = {mutant for mutant in mutants if re.sub("[^a-zA-Z0-9_-]", "", mutant) != line}
    assert len(changed) > 200
    for mutant in changed:
        with pytest.raises(ValueError, match=r"^join: (this is no|a part of the) invitation.*\Z"):
            ticket_in(mutant)
    for mutant in mutants - changed:  # with a space or a sign more
        with suppress(ValueError):
            assert ticket_in(mutant) == TICKET


@pytest.mark.parametrize(
    "mail",
    [
        "megatron-noloco join {line}\n",
        "(.venv) me@host:~$ megatron-noloco join '{line}' --start\n",
        "Hello,\n\nhere it is:\n\n{wrapped}\n\nBest regards,\nA.\n",
        "On Friday A. wrote:\n> Paste this:\n> {quoted}\n>\n> Best regards\n",
        ">> {twice}\r\n",
        "\u201c{line}\u201d",
        "<{line}>.",
        "{soft}\n",
    ],
)
def test_an_invitation_is_found_in_a_mail(mail: str) -> None:
    line = line_of(TICKET)
    pieces = [line[at : at + 70] for at in range(0, len(line), 70)]
    text = mail.format(
        line=line, wrapped="\n".join(pieces), quoted="\n> ".join(pieces), twice="\r\n>> ".join(pieces),
        soft="=\n".join(pieces),
    )  # fmt: skip
    assert ticket_in(text) == TICKET
    with pytest.raises(ValueError, match="a part of the invitation is missing or changed: copy all from"):
        ticket_in(text.replace(pieces[-1], ""))
    with pytest.raises(ValueError, match='this is no invitation, which begins with "noloco-"'):
        ticket_in(text.replace("noloco-", ""))
