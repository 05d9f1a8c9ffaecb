"""The mean model: the mean of all replicas' slow weights, put in the place of the fast ones to be evaluated."""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_noloco.outer.exchange import AnyExchange
from megatron_noloco.outer.finite_mean import ExchangeReport
from megatron_noloco.outer.optimizer import Rounds


class MeanModel:
    """Averages the slow weights over all replicas, to evaluate or save the mean model. All ranks call it together.

    Args:
        outer: holds the weights.
        exchange: on a channel of its own (`Channel.MEAN_MODEL`). What it holds bounds the memory that this takes.
    """

    def __init__(self, outer: Rounds, exchange: AnyExchange, replicas: int) -> None:
        self.outer = outer
        self.exchange = exchange
        self._everyone = tuple(range(replicas))

    @contextmanager
    def in_place(self, number: int) -> Iterator[ExchangeReport]:
        """Put the mean model in the place of the weights; on leaving they are the replica's own again.

        Gives the report of the exchange: the replicas in the mean, and their spread. Raises PartnerLostError when
        a replica of this job does not answer; the weights are then put back.

        Args:
            number: of this evaluation, the same on all ranks: the local steps done.
        """
        with self.outer.evaluating() as slow_weights:
            self.exchange.begin(slow_weights, self._everyone, number, "an evaluation")
            with self.outer.weights.writing() as write:
                for start, _, mean in self.exchange.finish():
                    write(start, mean)
            yield self.exchange.report
