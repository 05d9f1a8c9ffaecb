"""What a module says about the model that it computes, as far as the trainer can say it as well."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron_noloco.model.families import FAMILIES, architecture_of


def model_of(modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return what decides which function the weights of a transformers model are of; see `Architecture`.

    Of a model without a config, or of another family, only a family is returned, which the trainer does not have.
    """
    config: Any = next((getattr(module, "config", None) for module in modules), None)
    if not hasattr(config, "to_dict"):
        return {"family": None}
    theirs = config.to_dict()
    family = theirs.get("model_type")
    if family not in FAMILIES:
        return {"family": f"{family} of transformers"}
    try:
        return architecture_of(theirs).of_function
    except ValueError as error:
        return {"family": f"{family} in which {error}"}
