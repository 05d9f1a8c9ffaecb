"""Numbers that options take, as types for argparse."""

import argparse
import math


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'"{text}" is not a whole number of at least 1')
    return int(text)


def share(text: str) -> float:
    number = _number(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a share: a number above 0 and at most 1, such as 0.4'
        )
    return number


def seconds(text: str) -> float:
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of seconds; it must be 0 or more')
    return number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
