"""Which tag a message has. Every message between replicas that the outer optimizer sends has the tag

    tag = (number * CHANNELS + channel) * PHASES + phase

with the channel and the phase of the exchange, and its number (of the round, or of the evaluation). So exchanges
of different channels, or of one channel and different numbers, never take each other's messages.
"""

from enum import IntEnum

from megatron_noloco.transport.protocol import EXCHANGE_TAGS

CHANNELS = 64
PHASES = EXCHANGE_TAGS // CHANNELS  # 6 of a coded exchange; else the first two


class Channel(IntEnum):
    """The channels in use; the others, up to CHANNELS - 1, are free."""

    ROUNDS = 0
    MEAN_MODEL = 1
    LOSSES = 2
    CONTACTS = 3
    FINAL = 4
    COMMITS = 5


def tag_of(number: int, channel: int) -> int:
    """The tag of the first phase."""
    return (number * CHANNELS + channel) * PHASES
