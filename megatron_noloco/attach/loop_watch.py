"""Looks at the loop around an attached model, and says in one line each what the loop does wrong."""

import gc
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakMethod, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from megatron_noloco.attach.shards import Engine, local_part

_SAMPLED = 64  # elements of each parameter, by which a copy of the model that changes is told

PER_MICROBATCH = (
    "noloco.step() after a backward pass without a step of the optimizer: call it after optimizer.step(), not "
    "after each microbatch (with Accelerate `if accelerator.sync_gradients:`), or rounds come too often"
)
SKIPPED = (
    "the optimizer took no step before noloco.step(), as where a GradScaler skips one: it counts as a local step "
    "all the same, so that all replicas have their rounds together"
)
COPY_CHANGES = (
    "a copy of the model changes while the model is trained, such as an EMA: neither rounds nor average() reach "
    "it, so each replica ends with another copy; save the model itself, or begin the copy anew after average()"
)


class LoopWatch:
    """Counts the steps of torch's optimizers, and finds copies of the model that the loop changes.

    An optimizer that is none of torch's is not seen, and nothing is said of its steps.
    """

    def __init__(self, engine: Engine) -> None:
        self._modules = engine.modules
        self._own = {id(one) for one in engine.parameters.values()}
        self._own_steps = 0  # of optimizers, since the last local step
        self._looks_at_steps = False  # from the first step on, until a mistake is told
        self._told_of_steps = False
        self._others = WeakSet[Optimizer]()  # which step other weights
        self._copies: list[tuple[ref[nn.Module], Tensor]] | None = None  # with a sample of each
        count = WeakMethod(self._count)
        self.close = register_optimizer_step_post_hook(lambda *step: (count() or _nothing)(*step)).remove

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        if any(id(one) in self._own for group in optimizer.param_groups for one in group["params"]):
            self._own_steps += 1
        else:
            self._others.add(optimizer)

    def after_step(self, round_ended: bool) -> None:
        """Look at what has happened since the last local step; warn of each mistake once."""
        taken, self._own_steps = self._own_steps, 0
        self._looks_at_steps = self._looks_at_steps or (taken > 0 and not self._told_of_steps)
        if self._looks_at_steps and not taken:
            self._looks_at_steps, self._told_of_steps = False, True
            warnings.warn(PER_MICROBATCH if self._has_gradients() else SKIPPED, stacklevel=3)
        if self._copies is None:
            self._copies = [(ref(copy), _sample(copy)) for copy in self._copies_now()]
        elif round_ended and self._copies:
            found = ((copy(), before) for copy, before in self._copies)
            if any(copy is not None and not torch.equal(_sample(copy), before) for copy, before in found):
                warnings.warn(COPY_CHANGES, stacklevel=3)
            self._copies = []

    def _has_gradients(self) -> bool:
        """Return whether gradients wait for a step: a scaler skips a step where they are not finite."""
        parameters = (one for module in self._modules for one in module.parameters())
        gradients = [local_part(one.grad) for one in parameters if one.grad is not None]
        return any(one.any() for one in gradients) and all(one.isfinite().all() for one in gradients)

    def _copies_now(self) -> Iterator[nn.Module]:
        """Yield the modules of this process that are like an attached one, and that no optimizer trains."""
        kinds = {type(module): [one.shape for one in module.parameters()] for module in self._modules}
        trained = {
            id(one) for other in self._others for group in other.param_groups for one in group["params"]
        }
        for found in gc.get_objects():
            if type(found) in kinds:
                parameters = list(found.parameters())
                alike = [one.shape for one in parameters] == kinds[type(found)]
                if alike and not {id(one) for one in parameters} & (self._own | trained):
                    yield found


def _nothing(*_: Any) -> None: ...


class Ending:
    """Says at the end of an attached loop what it leaves out.

    Attributes:
        done: local steps so far.
        kept: the local step of the last average, or of the last state that was saved.
    """

    def __init__(self, replica: int, replicas: int | None, done: int) -> None:
        self._replica, self._replicas, self.done, self.kept = replica, replicas, done, done
        self._process = os.getpid()

    @property
    def words(self) -> str:
        """What is left out; "" where nothing is, and where an exception ends the process."""
        if self._replicas == 1 or getattr(sys, "last_value", None) is not None:
            return ""
        if self.kept < self.done:
            return (
                f"the loop ends after local step {self.done} without average(): the model is that of replica "
                f"{self._replica} alone; call average() after the last step"
            )
        gone = "without close(): the other jobs find out later that it is gone"
        return f"the loop of replica {self._replica} ends {gone}" * (self._replicas is None)

    def without_close(self) -> None:
        """Write it where the attached object has gone, or the process ends; not in a process that was forked."""
        if self.words and os.getpid() == self._process:
            sys.stderr.write(f"{self.words}\n")


@torch.no_grad()
def _sample(module: nn.Module) -> Tensor:
    """Return some elements of each parameter, on the host."""
    parts = [local_part(one).flatten()[:_SAMPLED].double().cpu() for one in module.parameters()]
    return torch.cat(parts)
