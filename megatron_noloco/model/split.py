"""How the layers of a model are divided over its pipeline stages."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PipelineSplit:
    """In Megatron's words; by default evenly.

    Attributes:
        num_layers_in_first_pipeline_stage: all others have equal parts of the rest, but for the next one.
        num_layers_in_last_pipeline_stage: likewise.
        account_for_embedding_in_pipeline_split: the embedding takes the place of a layer in the first stage.
        account_for_loss_in_pipeline_split: the output layer and the loss, in the last stage.
    """

    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
