"""The charts of TensorBoard's tab "Custom scalars", each with all replicas in it.

A replica is a run of TensorBoard's, and a chart shows its tags of every run. Each replica writes the same layout:
TensorBoard takes equal charts for one, and no replica needs to be there for the others, as in a federation.
"""

import re

_SECTIONS = {
    "Learning": {
        "training loss": ["train/loss"],
        "validation loss, and the mean model's": ["validation/loss", "validation/mean_model_loss"],
        "norm of the gradients": ["train/grad_norm"],
        "learning rate": ["train/learning_rate"],
    },
    "Replicas": {
        "spread": ["round/spread"],
        "seconds that the last round stopped training": ["round/pause_seconds"],
        "bytes sent: exchanges, routed activations": ["total/sent_bytes", "total/routed_bytes"],
    },
    "Speed": {
        "tokens per second": ["speed/tokens_per_second"],
        "seconds of a local step": ["speed/seconds_per_step"],
        "of these: pipeline, inner optimizer, exchanges": [
            "time/forward_backward_seconds",
            "time/optimizer_seconds",
            "time/exchange_seconds",
        ],
        "of these: waiting for data and for other stages": ["data/wait_seconds", "routing/wait_seconds"],
    },
}


def layout() -> dict[str, dict[str, list[str | list[str]]]]:
    """For `SummaryWriter.add_custom_scalars`: section, chart, and its tags as regular expressions.

    TensorBoard matches an expression with the beginning of a tag: without the `$`, "validation/loss" would also
    take those of the datasets of a blend.
    """
    return {
        section: {
            title: ["Multiline", [f"{re.escape(tag)}$" for tag in tags]] for title, tags in charts.items()
        }
        for section, charts in _SECTIONS.items()
    }
