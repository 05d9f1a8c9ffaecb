"""NoLoCo for a training loop that exists, in two lines: one makes it, one is called after each optimizer step.

    noloco = attach(engine, OuterSettings(local_steps=50), replicas=4)     # after deepspeed.initialize
    ...
    engine.step()
    noloco.step()

The loop, its model, data and config stay as they are. What must change is where the gradient all-reduce ends: at
the replica. `attach` refuses an engine whose data parallelism reaches further, and says what to do.
"""

from megatron_noloco.attach.attached import Attached, attach
from megatron_noloco.attach.groups import ReplicaGroups

__all__ = ["Attached", "ReplicaGroups", "attach"]
