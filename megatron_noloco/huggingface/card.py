"""The model card of an export: how this model came about, in figures."""

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_noloco.huggingface.export import Source


def model_card(source: "Source") -> str:
    from megatron_noloco.checkpoint.inspect import stage_spreads
    from megatron_noloco.huggingface.export import losses_report

    manifest, config = source.manifests[0], source.config
    topology = manifest.topology
    what = (
        f"the mean of {topology.replicas} replicas' slow weights"
        if len(source.replicas) > 1
        else f"replica {source.replicas[0]} of {topology.replicas}"
    )
    lines = [
        "---",
        "library_name: transformers",
        "tags: [llama, noloco]",
        "---",
        f"# A Llama trained with {config.noloco.active_method}",
        "",
        f"This model is {what}, trained with megatron_noloco (NoLoCo, arXiv 2506.10911).",
        "",
        f"- local steps: {manifest.step}",
        f"- tokens, all replicas together: {manifest.consumed_samples * config.model.seq_length}",
        f"- replicas x pipeline x data x tensor parallel sizes: {topology.replicas} x {topology.pp} x "
        f"{topology.dp} x {topology.tp}",
    ]
    lines += [f"- {line}" for line in losses_report(source)]
    if topology.replicas > 1:
        lines += [
            f"- spread between the replicas, stage {stage}: {spread:.3E}"
            for stage, spread in enumerate(stage_spreads(source.folder, source.manifests))
        ]
    lines += ["", "The run's configuration:", "", "```json", json.dumps(manifest.config, indent=1), "```", ""]
    return "\n".join(lines)
