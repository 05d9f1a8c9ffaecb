"""What the jobs of a run must have alike: the model, its first weights, the end of training, the tokenizer."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.federation.compatibility import RunIdentity
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.canonical import Block
from megatron_noloco.plans.fingerprint import digest_of, digest_of_shapes, fingerprint


def identity_of(config: RunConfig, tokenizer: Tokenizer, architecture: Architecture) -> RunIdentity:
    """Return what decides what a weight means, and where the training ends. `first_weights` are added later."""
    model = architecture.of_function
    shared = {
        "seed": config.training.seed,
        "names and shapes": [digest_of_shapes(table_of(architecture).exported_shapes)],
        "model": model,
    }
    own = config.shared()
    own["model"] |= asdict(architecture)
    own["model"] = {
        name: value for name, value in own["model"].items() if name not in {*model, "padded_vocab_size"}
    }
    del own["training"]["seed"]  # which attach knows, too
    own |= {
        "tokenizer": tokenizer.digest,
        "chat template": tokenizer.chat_template.digest if config.data.sft_data_path is not None else None,
    }
    return RunIdentity(shared, "trainer", own, config.replica_batch)


def first_weights(config: RunConfig, architecture: Architecture) -> str | None:
    """Return a digest of the pretrained weights, whatever their files and precision; None where there are none.

    Reads all of them. Raises UserError as `PretrainedWeights` does.
    """
    if config.training.pretrained is None:
        return None
    tensors, total = table_of(architecture).exported(), 0
    with PretrainedWeights(Path(config.training.pretrained), architecture) as weights:
        for row in table_of(architecture):
            parts = row.to_hf(weights(row.name)) if row.same_as is None else {}
            for name, tensor in parts.items():
                bits = tensor.float().contiguous().view(-1).numpy().view(np.uint32)
                total += fingerprint(bits, Block(0, tensors[name], *tensors[name].whole))
    return digest_of("", total)


def with_first_weights(alike: RunIdentity, digest: str | None) -> RunIdentity:
    """Return what jobs must have alike, with the digest that `first_weights` returns."""
    return alike._replace(shared={**alike.shared, "first weights": [digest]})
