"""Run a whole model in one process: the trainer's forward pass, and text generation by transformers."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_noloco.data.auto_tokenizer import load_folder
from megatron_noloco.errors import UserError
from megatron_noloco.huggingface.pretrained import read_architecture
from megatron_noloco.huggingface.weight_files import PretrainedWeights, some_names
from megatron_noloco.job.activity import line_of
from megatron_noloco.job.join import join
from megatron_noloco.job.launcher import read_world
from megatron_noloco.job.start_up import before_engines
from megatron_noloco.model.architecture import Architecture, Compute
from megatron_noloco.model.families import table_of
from megatron_noloco.plans.topology import Topology

TOLERANCE = 1e-4  # difference of logits that an import and an export must stay below; see `check_logits`
_MEMORY_HEADROOM = 1.2  # of the memory of a model's weights: its cache of keys and values, and products


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
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    length = min(64 + (architecture.sliding_window or 0), architecture.seq_length)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(architecture.vocab_size, (2, length), generator=generator)
    model = WholeModel(architecture)
    model.load(read)
    ours = model.logits(tokens)[..., : architecture.vocab_size]
    logging.disable_progress_bar()
    with torch.no_grad():
        options: dict[str, Any] = {"trust_remote_code": False, "output_loading_info": True}
        result: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        loaded, found = result
        if missing := sorted(found["missing_keys"]):
            raise UserError(
                f"{folder}: no tensor {some_names(missing)}, which transformers' model of config.json has (as "
                "biases, with attention_bias true): it would make them up"
            )
        theirs = loaded.eval()(tokens).logits
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0))


def check_import(folder: Path) -> str:
    """Return a line with the difference of `check_logits`; raises UserError where it is not below TOLERANCE."""
    architecture = read_architecture(folder)
    with PretrainedWeights(folder, architecture) as read:
        difference = check_logits(folder, architecture, lambda name: read(name).float())
    if not difference < TOLERANCE:  # false for NaN, too
        raise UserError(
            f"{folder}: its logits under transformers differ from this trainer's by {difference:.1e} (must be "
            f"below {TOLERANCE:g}), so config.json says more than is read here; no run can start from it"
        )
    return f"logits: largest difference from those of transformers {difference:.1e} (must be below {TOLERANCE:g})"


def generate(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Print `prompt` and up to `tokens` generated tokens; temperature 0 takes the most likely token.

    Where the model's context is full before, a line on stderr says so.

    Raises UserError when the folder cannot be loaded, or the model cannot read the prompt.
    """
    from transformers import TextStreamer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # warnings would interrupt the text
    torch.manual_seed(seed)
    tokenizer, model = _load(folder)
    ids = prompt_tokens(tokenizer, prompt)
    if not ids and tokenizer.eos_token is None:
        raise UserError(f'--prompt "": {folder} has no end-of-document token to begin after; give a text')
    ids = ids or [tokenizer.eos_token_id]  # a document begins after the end of another
    if max(ids) >= model.config.vocab_size:
        raise UserError(
            f"--prompt: the tokenizer of {folder} reads token {max(ids)}, the model's vocabulary has "
            f"{model.config.vocab_size} (from 0 on)"
        )
    if (
        torch.cuda.is_available()
        and torch.cuda.mem_get_info()[0] > _MEMORY_HEADROOM * model.get_memory_footprint()
    ):
        model = model.to("cuda")
    inputs = torch.tensor([ids], device=model.device)
    context = model.config.max_position_embeddings
    prompted = inputs.size(1)
    room = context - prompted
    if room <= 0:
        raise UserError(
            f"--prompt: {prompted} tokens, which leave no room in the model's context of {context} tokens"
        )
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {"do_sample": False}
    )
    try:
        said = model.eval().generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=min(tokens, room),
            pad_token_id=tokenizer.eos_token_id,
            streamer=TextStreamer(tokenizer, skip_special_tokens=True),
            **sampling,
        )
    except RuntimeError as error:
        if "probability tensor" not in str(error):  # "... contains either `inf`, `nan`..." in torch 2.13
            raise
        raise UserError(
            f"--temperature {temperature:g}: the model's logits divided by it are not finite; give a higher one, "
            "or another checkpoint where the model has diverged"
        ) from None
    if said.size(1) == context and room < tokens:
        sys.stderr.write(
            f"stopped after {room} tokens: with the prompt they fill the model's context of {context} tokens\n"
        )


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt, BOS before them if the tokenizer of transformers adds it to a text."""
    ids: list[int] = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    bos = [tokenizer.bos_token_id]
    begin = bos if bos != [None] and tokenizer("the")["input_ids"][:1] == bos else []
    return ids if ids[:1] == begin else [*begin, *ids]  # a chat template may write BOS itself


def _load(folder: Path) -> tuple[Any, Any]:
    """Return tokenizer and model; of generation_config.json only the tokens that end a text count.

    Raises UserError, in one line.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    with PretrainedWeights(folder, read_architecture(folder)) as weights:
        weights.check_finite()
    try:
        tokenizer = load_folder(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
        ends = model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        known = [int(end) for end in ends if 0 <= end < model.config.vocab_size]
        model.generation_config = GenerationConfig(eos_token_id=known or None)
    except Exception as error:  # transformers raises anything for files that it does not expect
        reason = f"{type(error).__name__}: {line_of(error)}"
        raise UserError(f"{folder}: transformers cannot load it ({reason})") from None
    return tokenizer, model
