"""The folder of a Hugging Face model: config, architecture, tokenizer and weights."""

from collections.abc import Container
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megatron_noloco.config.data_block import DataConfig
from megatron_noloco.config.model_block import ModelConfig
from megatron_noloco.data.auto_tokenizer import build_tokenizer, has_tokenizer
from megatron_noloco.data.tokenizer import ByteTokenizer, Tokenizer, TokenizerChoice
from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object
from megatron_noloco.huggingface.weight_files import PretrainedWeights
from megatron_noloco.job.activity import line_of
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import FAMILIES, architecture_of, families_with, family_of


class ModelFolder:
    """A Hugging Face folder. Each part is read once, when it is first used; `tokenizer` once for each cache.

    Attributes:
        path: of the folder.
        tokenizer: see `_tokenizer`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = cache(self._tokenizer)

    @cached_property
    def config(self) -> Any:
        """What transformers reads of config.json, with its defaults; raises UserError, in one line."""
        path = self.path / "config.json"
        model_type = read_object(path, "give the folder of a Hugging Face model").get("model_type")
        if model_type not in FAMILIES:
            known = ", ".join(f'"{name}"' for name in FAMILIES)
            raise UserError(f"{path}: model_type is {model_type!r}; only {known} can be imported")
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except Exception as error:  # it raises anything for values that it does not expect
            raise UserError(f"{path}: transformers cannot read it ({line_of(error)})") from None

    @cached_property
    def architecture(self) -> Architecture:
        """The model that config.json describes; raises UserError, a line per problem."""
        config = self.config
        try:
            architecture = architecture_of(config)
            ModelConfig(**model_fields(architecture) | self.dropouts(("hidden_dropout",)))
        except UserError as error:
            lines = str(error).replace("ModelConfig.", "model.").splitlines()
            raise UserError("\n".join(f"{self.path / 'config.json'}: {line}" for line in lines)) from None
        return architecture

    @property
    def sizes(self) -> dict[str, Any]:
        """The values of the fields of a block `model` that all families have; raises UserError."""
        given = model_fields(self.architecture)
        return {name: value for name, value in given.items() if not families_with(name)}

    def dropouts(self, given: Container[str]) -> dict[str, Any]:
        """Return the dropout probabilities above 0, as fields of a run's block `model`.

        Raises UserError where two keys of config.json are one field of a run, and differ, unless it is given.
        """
        found: dict[str, Any] = {}
        for key, ours in FAMILIES[self.config.model_type].hf_dropouts.items():
            value = getattr(self.config, key, None) or 0.0
            if found.setdefault(ours, value) != value and ours not in given:
                raise UserError(
                    f"{key} is {value}, of others {found[ours]}; model.{ours} is one value: give it in --config"
                )
        return {ours: value for ours, value in found.items() if value}

    def _tokenizer(self, cache: str | None) -> Tokenizer | None:
        """Return the model's tokenizer, with the BOS that it adds; None: it has none.

        It is the byte-level one where that is the same, as in our exports. Raises UserError as `build_tokenizer`
        does.

        Args:
            cache: see `TokenizerChoice`.
        """
        if not has_tokenizer(self.path):
            return None
        theirs = build_tokenizer(TokenizerChoice(str(self.path), prepend_bos=None, cache=cache))
        byte = ByteTokenizer()
        same = theirs.end_of_document == byte.end_of_document and byte.extends(theirs)
        return byte if same and not theirs.adds_bos else theirs

    def missing_bos(self, data: DataConfig) -> str:
        """Return a line where texts of the model begin with BOS, and the block `data` says nothing about it."""
        theirs = None if "prepend_bos" in data.model_fields_set else self.tokenizer(data.cache)
        if theirs is None or not theirs.adds_bos:
            return ""
        return (
            f"data.prepend_bos: {self.path} puts BOS before each text, and this run does not; set it to true, or "
            "to false to train without"
        )

    def check_fits(self, architecture: Architecture, tokenizer: Tokenizer, cache: str | None) -> None:
        """Raise UserError, one line per problem, unless the folder has this model, its weights and token ids.

        A folder without a tokenizer is accepted: its model may have been trained with the run's tokenizer. The
        run's may have further tokens.

        Args:
            tokenizer: of the run.
            cache: see `TokenizerChoice`.
        """
        ours = model_fields(architecture)
        lines = [
            f"training.pretrained: model.{name} is {ours.get(name)!r}, but {value!r} in "
            f"{self.path / 'config.json'}"
            for name, value in model_fields(self.architecture).items()
            if name != "seq_length" and ours.get(name) != value
        ]
        if lines:
            raise UserError("\n".join(lines))
        PretrainedWeights(self.path, architecture).close()
        if architecture.vocab_size < tokenizer.vocab_size:
            raise UserError(
                f"{self.path}: a vocabulary of {architecture.vocab_size} is smaller than the run's tokenizer's "
                f"{tokenizer.vocab_size} (the byte-level tokenizer has 257)"
            )
        theirs = self.tokenizer(cache)
        if theirs is not None and not tokenizer.extends(theirs):
            place = f"in {tokenizer.folder}" if tokenizer.folder else "of bytes"
            raise UserError(
                f"{self.path}: the model's tokenizer reads texts as other tokens than the run's {place}; to take "
                f"the model's, set data.tokenizer_model {self.path}"
            )


def model_fields(architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a run's `model` block that determine its weights, and `seq_length`."""
    excluded = ("tied_embeddings", "padded_vocab_size", "init_method_std")
    own = family_of(architecture).own_fields
    return {
        **{
            name: value
            for name, value in asdict(architecture).items()
            if name not in excluded and (name in own or not families_with(name))
        },
        "untie_embeddings_and_output_weights": not architecture.tied_embeddings,
    }
