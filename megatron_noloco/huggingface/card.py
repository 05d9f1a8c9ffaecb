"""The model card of an export: how this model came about, in figures."""

import json

from megatron_noloco.checkpoint.inspect import stage_spreads
from megatron_noloco.huggingface.source import Source


def model_card(source: Source) -> str:
    manifest, family = source.saved.manifests[0], source.architecture.family
    topology, saved = manifest.topology, len(source.saved.replicas)
    what = (
        f"the mean of {saved} replicas' slow weights"
        if len(source.replicas) > 1
        else f"replica {source.replicas[0]} of {topology.ensemble}"
    )
    lines = [
        "---",
        "library_name: transformers",
        f"tags: [{family}, noloco]",
        "---",
        f"# A {family.capitalize()} trained with {source.config.noloco.active_method}",
        "",
        f"This model is {what}, trained with megatron_noloco (NoLoCo, arXiv 2506.10911).",
        "",
        f"- local steps: {manifest.step}",
        f"- tokens, all replicas together: {manifest.consumed_samples * source.architecture.seq_length}",
        f"- replicas x pipeline x data x tensor parallel sizes: {saved} x {topology.pp} x "
        f"{topology.dp} x {topology.tp}",
    ]
    lines += [f"- {line}" for line in source.losses_report()]
    if saved > 1:
        lines += [
            f"- spread between the replicas, stage {stage}: {spread:.3E}"
            for stage, spread in enumerate(stage_spreads(source.saved))
        ]
    lines += ["", "The run's configuration:", "", "```json", json.dumps(manifest.config, indent=1), "```", ""]
    return "\n".join(lines)
