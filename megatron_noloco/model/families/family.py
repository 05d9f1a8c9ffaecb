"""What a model family has to say about itself."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families.table import Parameter


@dataclass(frozen=True)
class MegatronOptions:
    """What a family sets in Megatron-core beyond the sizes, which all families share."""

    config: dict[str, Any] = field(default_factory=dict)  # of TransformerConfig
    model: dict[str, Any] = field(default_factory=dict)  # of GPTModel
    attributes: dict[str, Any] = field(default_factory=dict)  # which GPTModel expects on a TransformerConfig


class Family(ABC):
    """What makes one model family different from another, all of it."""

    name: ClassVar[str]  # also Hugging Face's `model_type`
    # Fields of `Architecture` and `Compute` that not all families have, with their defaults in this one.
    own_fields: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def rows(self, architecture: Architecture) -> Sequence[Parameter]:
        """The rows of the table in the order of the model, those of the layers next to each other."""

    @abstractmethod
    def megatron_options(self, architecture: Architecture) -> MegatronOptions:
        """What Megatron-core is to build."""

    @abstractmethod
    def hf_config(
        self, architecture: Architecture, dtype: str, end_of_document: int | None
    ) -> dict[str, Any]:
        """The content of Hugging Face's `config.json`."""

    @abstractmethod
    def architecture(self, hf_config: Mapping[str, Any]) -> Architecture:
        """The inverse of `hf_config`, without padding of the vocabulary.

        Raises ValueError, in one line, for what this family is not.
        """
