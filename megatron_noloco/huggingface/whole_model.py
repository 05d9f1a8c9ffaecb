"""Run a whole model in one process: the trainer's forward pass, and text generation by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.data.auto_tokenizer import load_folder
from megatron_noloco.errors import UserError
from megatron_noloco.huggingface.folder import ModelFolder
from megatron_noloco.huggingface.weight_files import PretrainedWeights, some_names
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.launcher import read_world
from megatron_noloco.job.start_up import before_engines
from megatron_noloco.job.world import join
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Topology

TOLERANCE = 1e-4  # difference of logits that an import and an export must stay below; see `check_logits`


class WholeModel:
    """The trainer's model, unsplit, in fp32, on the GPU if there is one. Call `load` first.

    Raises UserError where the GPU has no room for the weights.
    """

    def __init__(self, architecture: Architecture) -> None:
        check_room(torch.float32.itemsize * table_of(architecture).parameter_count)
        before_engines()
        from megatron_noloco.model.dropout import seed_dropout
        from megatron_noloco.model.stage import empty_stage
        from megatron_noloco.pipeline import cpu
        from megatron_noloco.pipeline.groups import build_groups

        if not dist.is_initialized():
            join(read_world({}), "gloo")
        cpu.prepare()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        groups = build_groups(Topology(), routed=False)
        seed_dropout(0, groups)  # on a GPU Megatron-core needs its generators, though nothing is dropped
        # Not Transformer Engine: it multiplies fp32 as TF32, and its causal attention takes no mask.
        compute = Compute(transformer_impl="local")
        torch.backends.cuda.matmul.allow_tf32 = False
        self._stage = empty_stage(architecture, compute, groups).to(self.device).eval()

    def load(self, read: Callable[[str], Tensor]) -> None:
        """Load the weights, which `read` returns by their names in the unsplit model."""
        self._stage.fill(read)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of int64 tokens [batch, tokens]: [batch, tokens, padded vocabulary], on the host."""
        return self._stage.chunks[0](tokens.to(self.device), None, None).float().cpu()

    @torch.no_grad()
    def losses(self, tokens: Tensor, labels: Tensor, documents: Tensor | None) -> Tensor:
        """Return the loss of each label in nats, shape [batch, tokens], on the host; undefined for a label < 0.

        Args:
            documents: the number of each token's document, int64 [batch, tokens]; None: one document.
        """
        tokens, labels = tokens.to(self.device), labels.to(self.device)
        documents = None if documents is None else documents.to(self.device)
        return self._stage.chunks[0](tokens, None, documents, labels=labels).float().cpu()


def check_room(weights_bytes: int) -> None:
    """Raise UserError where there is a GPU, but no room on it for this many bytes."""
    free = torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else weights_bytes
    if weights_bytes > free:
        raise UserError(
            f"the whole model needs {weights_bytes / 1e9:.0f} GB in fp32, the GPU has {free / 1e9:.0f} GB free; "
            "put CUDA_VISIBLE_DEVICES= before the command to compute on the host"
        )


def check_logits(folder: Path, architecture: Architecture, read: Callable[[str], Tensor]) -> float:
    """Return the largest difference of logits between transformers' model and the trainer's, both in fp32.

    Divided by the largest logit where that is above 1. Both read the same tokens, more than a sliding window.

    Raises UserError where the folder lacks tensors of transformers' model.

    Args:
        folder: of the model that transformers loads.
        read: returns the trainer's weights by their names in the unsplit model.
    """
    length = min(64 + (architecture.sliding_window or 0), architecture.seq_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(architecture.vocab_size, (2, length), generator=generator)
    model = WholeModel(architecture)
    model.load(read)
    ours = model.logits(tokens)[..., : architecture.vocab_size]
    with torch.no_grad():
        theirs = _loaded(folder, dtype=torch.float32)(tokens).logits
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def _loaded(folder: Path, **options: Any) -> Any:
    """Return transformers' model of a folder; raises UserError where the folder lacks tensors of it."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    auto: Any = AutoModelForCausalLM
    options |= {"trust_remote_code": False, "output_loading_info": True}
    model, found = auto.from_pretrained(folder, **options)
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{folder}: no tensor {some_names(missing)}, which transformers' model of config.json has (as biases, "
            "with attention_bias true): it would make them up"
        )
    return model.eval()


def check_import(folder: ModelFolder) -> str:
    """Return a line with the difference of `check_logits`; raises UserError where it is not below TOLERANCE."""
    path, architecture = folder.path, folder.architecture
    with PretrainedWeights(path, architecture) as read:
        difference = check_logits(path, architecture, lambda name: read(name).float())
    if not difference < TOLERANCE:  # false for NaN, too
        raise UserError(
            f"{path}: its logits under transformers differ from this trainer's by {difference:.1e} (must be "
            f"below {TOLERANCE:g}), so config.json says more than is read here; no run can start from it"
        )
    return f"logits: largest difference from those of transformers {difference:.1e} (must be below {TOLERANCE:g})"


def generate(folder: Path, prompt: str, chat: bool, tokens: int, temperature: float, seed: int) -> None:
    """Print `prompt` and up to `tokens` tokens that transformers generates, until the model's context is full.

    The tokens are drawn; with temperature 0 they are the most likely ones.

    Args:
        chat: whether the prompt is a user's message, which the chat template writes.

    Raises UserError where transformers cannot load the folder, or generate.
    """
    from transformers import TextStreamer, pipeline

    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    try:
        tokenizer = load_folder(folder)
        generator = pipeline("text-generation", _loaded(folder), tokenizer=tokenizer)
        text = prompt or tokenizer.eos_token  # a document begins after the end of another
        if chat:
            asked = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        # A chat template writes BOS itself.
        has_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        read = len(tokenizer(text, add_special_tokens=not has_bos).input_ids)
        context = generator.model.config.max_position_embeddings
        if read >= context:
            raise UserError(
                f"--prompt: {read} tokens, and the model's context has {context}; give a shorter text"
            )
        generator(
            text,
            add_special_tokens=not has_bos,
            max_new_tokens=min(tokens, context - read),
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            **sampling,
        )
    except UserError:
        raise
    except Exception as error:  # transformers raises anything for files that it does not expect
        raise UserError(f"{folder}: transformers: {type(error).__name__}: {line_of(error)}") from None
