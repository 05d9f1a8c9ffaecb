"""NoLoCo for a training loop that exists: one line before the loop, one after each optimizer step.

    noloco = attach(engine, NolocoSettings(local_steps=50), replicas=4)    # this job holds four replicas; or
    noloco = attach(engine, NolocoSettings(local_steps=50), federation=FederationSettings(rendezvous=...), slot=0)
    ...
    engine.step()      # of DeepSpeed; or optimizer.step()
    noloco.step()

The loop, its model, data and config stay as they are. Either each replica is an ordinary job, to which `attach`
adds the exchange with the other jobs (a federation); or the replicas are blocks of the ranks of one job, whose
gradient all-reduce must then end at the replica. `attach` refuses a model whose gradients are reduced over other
ranks, and says what to change.

`megatron_noloco.attach.hf_trainer` does the same for the `Trainer` of Hugging Face's transformers.
"""

from megatron_noloco.attach.attached import Attached
from megatron_noloco.attach.attaching import attach
from megatron_noloco.attach.replica_groups import ReplicaGroups

__all__ = ["Attached", "ReplicaGroups", "attach"]
