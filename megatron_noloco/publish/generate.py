"""`python -m megatron_noloco generate`: text out of a model, through transformers, as it comes."""

from pathlib import Path


def generate(folder: Path, prompt: str, tokens: int, temperature: float, seed: int) -> None:
    """Print `prompt` and up to `tokens` more tokens to standard output; temperature 0 takes the likeliest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
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
