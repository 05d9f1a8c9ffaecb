"""Formats a number the same way in the log, the closing table, `watch` and `report`."""

from collections.abc import Callable, Sequence

whole: Callable[[float], str] = "{:.0f}".format
loss: Callable[[float], str] = "{:.4f}".format  # nats per token
scientific: Callable[[float], str] = "{:.3E}".format  # learning rates, spreads


def losses(nats_per_token: Sequence[float]) -> str:
    return " ".join(map(loss, nats_per_token))


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def megabytes(size: float) -> str:
    """Return `size` bytes in units of 10^6 bytes: below 10 with two decimals, else with one."""
    return f"{size / 1e6:.{1 if size >= 1e7 else 2}f}"


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.2f}"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def partners(replicas: Sequence[int]) -> str:
    return ",".join(map(str, replicas)) or "none"


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes}min"
    return f"{minutes}min" if minutes >= 10 else f"{60 * minutes + rest}s"
