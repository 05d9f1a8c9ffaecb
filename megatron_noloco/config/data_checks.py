"""Rules between the fields of the block `data`, and with other blocks."""

from collections.abc import Iterator

from megatron_noloco.config.blocks import EvaluationConfig
from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.data.sources import Split


def check_data(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    names = ("text", "data_path", "train_data_path", "sft_data_path")
    given = [name for name in names if getattr(data, name) is not None]
    if not given:
        others = ", ".join(f"or data.{name}" for name in names[1:])
        yield f"data.text is missing ({others}): nothing says what is read"
    elif len(given) > 1:
        yield f"data.{given[0]} and data.{given[1]} both say what is read; give one of them"
    if data.valid_data_path is not None and data.train_data_path is None:
        yield "data.valid_data_path goes together with data.train_data_path, which is missing"
    if data.tokenizer_type == "byte" and data.tokenizer_model is not None:
        yield 'data.tokenizer_model needs data.tokenizer_type "HuggingFaceTokenizer"'
    elif data.tokenizer_type != "byte" and data.tokenizer_model is None:
        yield f'data.tokenizer_type "{data.tokenizer_type}" needs data.tokenizer_model, a folder with its files'
    if not evaluation.iters:
        return
    if data.train_data_path is not None and data.valid_data_path is None:
        yield (
            f"data.valid_data_path is missing, and evaluation.iters is {evaluation.iters}; set it to 0 "
            "or give text for validation"
        )
    elif data.train_data_path is None and Split.parse(data.split).validation == 0:
        yield (
            f'data.split "{data.split}" leaves no text for validation, and evaluation.iters is '
            f"{evaluation.iters}; set it to 0 or give validation a weight"
        )


def check_documents(data: DataConfig, model: ModelConfig) -> Iterator[str]:
    if data.reset_position_ids and not data.reset_attention_mask:
        yield (
            "data.reset_position_ids needs data.reset_attention_mask: a rotary embedding knows differences of "
            "positions only, which have no meaning between documents that restart"
        )
    if data.sft_data_path is None and not data.sft_packing:
        yield "data.sft_packing has a meaning only with data.sft_data_path"
    for name in ("reset_attention_mask", "eod_mask_loss"):
        if data.sft_data_path is not None and getattr(data, name):
            yield (
                f"data.{name} does not go together with data.sft_data_path, whose records are told apart by "
                "data.sft_packing, and whose answers alone have a loss; leave it out"
            )
    if data.separate_documents and model.transformer_impl == "transformer_engine":
        name = "sft_packing" if data.sft_data_path is not None else "reset_attention_mask"
        yield (
            f'data.{name} needs model.transformer_impl "local" (or "auto"): the mask is that of our own attention'
        )
