"""`python -m megatron_noloco inspect CHECKPOINT...`: verify a checkpoint and print what it holds.

It loads no tensors.
"""

from collections.abc import Sequence
from pathlib import Path

from megatron_noloco.checkpoint import catalog
from megatron_noloco.checkpoint.catalog import verify
from megatron_noloco.checkpoint.ensemble import Ensemble, find_ensemble
from megatron_noloco.model.families import table_of


def inspect(paths: Sequence[Path]) -> list[str]:
    """Verify the checkpoint that `paths` name, and return lines about it.

    Raises like `find_ensemble`, and DamagedCheckpointError when a file is damaged.
    """
    saved = find_ensemble(paths)
    for manifest in saved.manifests:
        replica = manifest.position.replica
        verify(catalog.replica_folder(saved.folders[replica], replica), manifest.files)
    manifests, first = saved.manifests, saved.manifests[0]
    replicas = len(saved.replicas)
    noloco = first.config["noloco"]
    seq_length = first.config["model"]["seq_length"]
    size = sum(record.bytes for manifest in manifests for record in manifest.files.values())
    parameters = table_of(first.architecture).parameter_count
    lines = [
        *(f"checkpoint: {folder}" for folder in dict.fromkeys(saved.folders.values())),
        f"step: {_steps(saved)} of {first.config['training']['train_iters']}",
        f"consumed by all replicas: {first.consumed_samples} samples, "
        f"{first.consumed_samples * seq_length} tokens",
        f"parallel: {saved.layout_in_words}",
        f"method: {noloco['method'] if noloco['enabled'] else 'none'}",
        f"parameters: {parameters} per replica",
        f"size: {size / 1e6:.1f} MB, {size / (parameters * replicas):.1f} bytes per parameter",
        f"integrity: {sum(len(manifest.files) for manifest in manifests)} files, all checksums match",
    ]
    for replica in saved.replicas:
        counters = saved.last_stage(replica).counters
        if "validation_loss" in counters:
            lines.append(f"replica {replica}: validation loss {counters['validation_loss']:.4f}")
    return lines


def _steps(saved: Ensemble) -> str:
    steps = {replica: saved.last_stage(replica).step for replica in saved.replicas}
    if len(set(steps.values())) == 1:
        return str(steps[saved.replicas[0]])
    return ", ".join(f"{step} (replica {replica})" for replica, step in steps.items())
