"""A job that begins takes the state of one that trains: weights, outer state, and the inner optimizer's."""

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megatron_noloco.attach.adapter import Stateful
from megatron_noloco.attach.other_state import buffers_of, check_buffers, write_buffers
from megatron_noloco.federation.handover import Handover, Snapshot
from megatron_noloco.federation.takeover import take_over
from megatron_noloco.outer import OuterOptimizer

_MOST_BYTES_PER_WEIGHT = 64  # of the replica
_OTHER_BYTES = 1 << 24


class Offer(NamedTuple):
    """Describes the state that a rank offers."""

    step: int
    bytes: int
    sha256: str


class JobState:
    """Gives the state of a rank to another job, and takes that of one; implements `federation.takeover.Taker`.

    The state is weights, buffers, the outer optimizer's, and that of the inner optimizer.

    Args:
        modules: that have the buffers.

    Attributes:
        took_inner: whether the state that was taken last had that of an inner optimizer.
    """

    def __init__(self, outer: OuterOptimizer, inner: Stateful | None, modules: Sequence[nn.Module]) -> None:
        self.took_inner = False
        self._received: dict[str, Any] = {}
        self._outer, self._inner, self._modules = outer, inner, modules

    def copy(self, done: int) -> Callable[[], Snapshot]:
        """Copy the state after `done` local steps; return what makes a snapshot of the copy."""
        file = io.BytesIO()
        state = {
            "weights": self._outer.weights.read(),
            "outer": self._outer.state(wait=False),
            "inner": None if self._inner is None else self._inner.state_dict(),
            "buffers": buffers_of(self._modules),
        }
        torch.save(state, file)
        content = file.getvalue()

        def made() -> Snapshot:
            description = Offer(done, len(content), hashlib.sha256(content).hexdigest())._asdict()
            return Snapshot(json.dumps(description).encode(), [np.frombuffer(content, np.uint8)])

        return made

    def take_over(self, handover: Handover, least: int, seconds: float) -> dict[str, Tensor] | None:
        """Take the state of the replica that is furthest, if it has done `least` local steps.

        A collective of the job, which overwrites weights, buffers and the inner state. Returns a state for
        `OuterOptimizer.restore`, with "local_steps_done"; None where there is none to take. Warns of each state
        that could not be taken.
        """
        lines = list[str]()
        found = take_over(handover, self, least, seconds, lines.append)
        received, self._received = self._received, {}  # not kept: it is as large as the state of this rank
        self.took_inner = received.get("inner") is not None
        if found is not None and self._inner is not None and not self.took_inner:
            lines.append(f"replica {found[0].slot} gave no state of its inner optimizer; it begins anew")
        for line in lines:
            warnings.warn(line, stacklevel=3)
        if found is None:
            return None
        state: dict[str, Tensor] = received["outer"]
        return state | {"local_steps_done": torch.tensor(found[1].step)}

    def check(self, slot: int, description: bytes) -> Offer:
        try:
            offer = Offer(**json.loads(description))
            if type(offer.step) is not int or type(offer.bytes) is not int:
                raise TypeError
        except (ValueError, TypeError, RecursionError):
            raise ValueError("its description is not that of a state") from None
        weights = (
            self._outer.weights.length * self._outer.place.ranks_per_replica
        )  # `inner` may be of them all
        other = _OTHER_BYTES + sum(buffer.nbytes for buffer in buffers_of(self._modules).values())
        if not 0 < offer.bytes <= _MOST_BYTES_PER_WEIGHT * weights + other:
            raise ValueError(f"its state has {offer.bytes} bytes")
        return offer

    def take(self, offer: Offer, fill: Callable[[Sequence[Tensor]], None]) -> None:
        buffer = torch.zeros(offer.bytes, dtype=torch.uint8)
        fill([buffer])
        received = buffer.numpy().tobytes()
        if hashlib.sha256(received).hexdigest() != offer.sha256:
            raise ValueError("its checksum does not match")
        length = self._outer.weights.length
        try:
            state = torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)
            vectors = [state["weights"], state["outer"]["slow_weights"]]
            sound = all(vector.shape == (length,) for vector in vectors)
            sound = sound and all(bool(vector.isfinite().all()) for vector in vectors) and "inner" in state
            check_buffers(self._modules, state["buffers"])
        except Exception as error:  # torch.load says neither which errors, nor always the same
            raise ValueError(f"it is not a state: {type(error).__name__}: {error}") from None
        if not sound:
            raise ValueError("its weights are not finite, or not as many as here")
        self._received = state

    def settle(self, offer: Offer, whole: bool) -> None:
        if not whole:
            return
        if self._inner is not None and self._received["inner"] is not None:
            self._inner.load_state_dict(
                self._received["inner"]
            )  # before the weights, which some load as well
        with self._outer.weights.writing() as write:
            write(0, self._received["weights"])
        write_buffers(self._modules, self._received["buffers"])
