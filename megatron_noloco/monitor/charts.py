"""The charts of TensorBoard's tab "Custom scalars": one number each, of all replicas.

A replica is a run of TensorBoard's, and a chart shows its tag of every run, in the run's color: with two tags in a
chart, curves of a replica could not be told apart. Each replica writes the same layout: TensorBoard takes equal
charts for one, and no replica needs to be there for the others, as in a federation.
"""

import re

_SECTIONS = {
    "Learning": {
        "training loss": "train/loss",
        "validation loss": "validation/loss",
        "validation loss of the mean model": "validation/mean_model_loss",
        "norm of the gradients": "train/grad_norm",
        "learning rate": "train/learning_rate",
    },
    "Replicas": {
        "spread": "round/spread",
        "seconds that the last round stopped training": "round/pause_seconds",
        "bytes sent in exchanges": "total/sent_bytes",
        "bytes sent along routes": "total/routed_bytes",
    },
    "Speed": {
        "tokens per second": "speed/tokens_per_second",
        "seconds of a local step": "speed/seconds_per_step",
        "of these: forward and backward": "time/forward_backward_seconds",
        "of these: inner optimizer": "time/optimizer_seconds",
        "of these: exchanges": "time/exchange_seconds",
        "of forward and backward: waiting for data": "data/wait_seconds",
        "of forward and backward: waiting for stages": "routing/wait_seconds",
    },
}


def layout() -> dict[str, dict[str, list[str | list[str]]]]:
    """For `SummaryWriter.add_custom_scalars`: section, chart, and its tag as a regular expression.

    TensorBoard matches an expression with the beginning of a tag: without the `$`, "validation/loss" would also
    take those of the datasets of a blend.
    """
    return {
        section: {title: ["Multiline", [f"{re.escape(tag)}$"]] for title, tag in charts.items()}
        for section, charts in _SECTIONS.items()
    }
