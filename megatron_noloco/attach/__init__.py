"""NoLoCo for a training loop that exists: one line makes it, one is called after each optimizer step.

    noloco = attach(engine, NolocoSettings(local_steps=50), replicas=4)    # this job holds four replicas; or
    noloco = attach(engine, NolocoSettings(local_steps=50), federation=FederationSettings(slots=4, ...), slot=0)
    ...
    engine.step()      # of DeepSpeed; or optimizer.step()
    noloco.step()

The loop, its model, data and config stay as they are. Each replica is either a job of its own, an ordinary one, to
which `attach` adds the exchange with the other jobs (a federation); or a block of the ranks of one job. Then one
thing must change: where the gradient all-reduce ends. `attach` refuses a model whose gradients are reduced further
than its replica, or less far, and says what to do.

`megatron_noloco.attach.hf_trainer` does the same for the `Trainer` of Hugging Face's transformers.
"""

from megatron_noloco.attach.attached import Attached, attach
from megatron_noloco.attach.groups import ReplicaGroups

__all__ = ["Attached", "ReplicaGroups", "attach"]
