"""`python -m megatron_noloco generate`: text out of a model, through transformers, as it comes."""

from pathlib import Path


def generate(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Print `prompt` and up to `tokens` more tokens to standard output; temperature 0 takes the likeliest.

    Raises ValueError when the folder cannot be loaded.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns in the middle of the text
    torch.manual_seed(seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{folder}: {' '.join(str(error).split())}") from None
    # Nothing to go on from: a document begins where another ended.
    inputs = tokenizer(prompt or tokenizer.eos_token, return_tensors="pt", add_special_tokens=False)
    sampling = (
        {"do_sample": True, "temperature": temperature, "top_k": 50} if temperature else {"do_sample": False}
    )
    model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id,
        streamer=TextStreamer(tokenizer, skip_special_tokens=True),
        **sampling,
    )
