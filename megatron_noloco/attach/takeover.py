"""A job that begins takes the state of one that trains: weights, outer state, and the inner optimizer's."""

import hashlib
import io
import json
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_noloco.attach.trained import Stateful
from megatron_noloco.federation.handover import Handover, Snapshot, furthest
from megatron_noloco.job.agreement import of_all_ranks, of_rank_0
from megatron_noloco.outer import OuterOptimizer
from megatron_noloco.plans.topology import Topology

_MOST_BYTES_PER_WEIGHT = 64  # of the replica
_OTHER_BYTES = 1 << 24


def copy_state(outer: OuterOptimizer, done: int, inner: Stateful | None) -> Callable[[], Snapshot]:
    """Copy the state of this rank; return what makes a snapshot of the copy."""
    file = io.BytesIO()
    state = {
        "weights": outer.weights.read(),
        "outer": outer.state(wait=False),
        "inner": None if inner is None else inner.state_dict(),
    }
    torch.save(state, file)
    content = file.getvalue()

    def made() -> Snapshot:
        digest = hashlib.sha256(content).hexdigest()
        description = {"step": done, "bytes": len(content), "sha256": digest}
        return Snapshot(json.dumps(description).encode(), [np.frombuffer(content, np.uint8)])

    return made


def take_state(
    handover: Handover,
    outer: OuterOptimizer,
    topology: Topology,
    least: int,
    seconds: float,
    inner: Stateful | None,
) -> dict[str, Tensor] | None:
    """Take the state of the replica that is furthest, if it has done `least` local steps. A collective of the job.

    Overwrites the weights, and the state of `inner`. Returns a state for `OuterOptimizer.restore`, with
    "local_steps_done"; None where there is none to take. Warns where the state of one could not be taken.
    """
    rank, given_up = outer.place.rank, set[int]()
    while True:
        steps = handover.steps() if rank % topology.replica_size == 0 else {}
        slot = of_rank_0(furthest(steps, topology, least, given_up))
        if slot is None:
            return None
        found, problem = None, ""
        try:
            found = _fetch(handover, outer, outer.place.rank_of(slot), least, seconds)
        except (OSError, ValueError) as error:
            problem = " ".join(str(error).split())
        told = of_all_ranks((problem, found and found["step"]))
        problem = next((text for text, _ in told if text), "")
        if found is not None and not problem and len(set(told)) == 1:
            break
        warnings.warn(f"the state of replica {slot} was not taken over: {problem or told}", stacklevel=3)
        given_up.add(slot)
    if inner is not None and found["inner"] is not None:
        inner.load_state_dict(found["inner"])  # before the weights, which some optimizers load as well
    elif inner is not None:
        warnings.warn(f"replica {slot} gave no state of its inner optimizer; it begins anew", stacklevel=3)
    with outer.weights.writing() as write:
        write(0, found["weights"])
    return found["outer"] | {"local_steps_done": torch.tensor(found["step"])}


def _fetch(
    handover: Handover, outer: OuterOptimizer, giver: int, least: int, seconds: float
) -> dict[str, Any]:
    """Return the state of a rank; raises OSError where it does not come, ValueError where it is none."""
    tag, content = handover.ask(giver, seconds)
    try:
        description = json.loads(content)
        step, size, digest = (description[name] for name in ("step", "bytes", "sha256"))
        if type(step) is not int or type(size) is not int:
            raise TypeError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError("its description is not that of a state") from None
    if step < least:
        raise ValueError(f"it is at local step {step} by now, as it was started anew")
    weights = outer.weights.length * outer.place.ranks_per_replica  # `inner` may hold the state of them all
    if not 0 < size <= _MOST_BYTES_PER_WEIGHT * weights + _OTHER_BYTES:
        raise ValueError(f"its state has {size} bytes")
    buffer = torch.zeros(size, dtype=torch.uint8)
    handover.take(giver, tag, [buffer])
    received = buffer.numpy().tobytes()
    if hashlib.sha256(received).hexdigest() != digest:
        raise ValueError("its checksum does not match")
    try:
        state = torch.load(io.BytesIO(received), map_location="cpu", weights_only=True)
        vectors = [state["weights"], state["outer"]["slow_weights"]]
        sound = all(vector.shape == (outer.weights.length,) for vector in vectors)
        sound = sound and all(bool(vector.isfinite().all()) for vector in vectors) and "inner" in state
    except Exception as error:  # torch.load says neither which errors, nor always the same
        raise ValueError(f"it is not a state: {type(error).__name__}: {error}") from None
    if not sound:
        raise ValueError("its weights are not finite, or not as many as here")
    return {**state, "step": step}
