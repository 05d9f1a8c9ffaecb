"""From the user's file to the settings of a run: called once, when the replicas are known; the result is final."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from megatron_noloco.config.noloco_block import TrainerSettings, recommended
from megatron_noloco.config.run_config import RunConfig
from megatron_noloco.errors import UserError
from megatron_noloco.settings import groups_problem


class Resolved(NamedTuple):
    """The settings of a run.

    Attributes:
        by_recipe: the settings of the method that the file leaves to its recipe, or to the run that is continued.
    """

    config: RunConfig
    by_recipe: dict[str, Any]


def resolve(
    config: RunConfig, replicas: int | None, hosts: Sequence[str] = (), saved: TrainerSettings | None = None
) -> Resolved:
    """Return the settings of a run: those of its file, its recipe, its hosts, and the run that it continues.

    Args:
        replicas: in this job; None: not known, and the recipe chooses nothing.
        hosts: of the replicas, for `noloco.sites` "hosts".
        saved: the settings of the run that is continued.

    Raises UserError where the method cannot have these replicas.
    """
    noloco, by_recipe = config.noloco, dict[str, Any]()
    if replicas is not None and _is_left_to_recipe(config):
        by_recipe = recommended(replicas)
        noloco = noloco.replace(**by_recipe)
        if saved is not None and (kept := _kept(noloco, saved, by_recipe, replicas)) is not None:
            by_recipe = {name: getattr(kept, name) for name in by_recipe}
            noloco = kept
    if hosts and noloco.sites == "hosts":
        noloco = noloco.replace(sites=[*map([*dict.fromkeys(hosts)].index, hosts)])
    if noloco is config.noloco:
        return Resolved(config, by_recipe)
    if problem := groups_problem(noloco, replicas):
        raise UserError(f"noloco.{problem}")
    return Resolved(config.replace(noloco=noloco), by_recipe)


def _is_left_to_recipe(config: RunConfig) -> bool:
    """Return whether the file leaves groups to its recipe: not for DiLoCo, separate jobs, or sites."""
    noloco = config.noloco
    if noloco.recipe != "recommended" or noloco.method != "noloco" or noloco.sites is not None:
        return False
    if config.federation.exists:
        return False
    return noloco.model_fields_set.isdisjoint(recommended(1))


def _kept(
    noloco: TrainerSettings, saved: TrainerSettings, names: Mapping[str, Any], replicas: int
) -> TrainerSettings | None:
    """Return the settings with those of a saved run, if method and recipe are the same; None where they cannot."""
    if (saved.method, saved.recipe) != (noloco.method, noloco.recipe):
        return None
    kept = noloco.replace(**{name: getattr(saved, name) for name in names})
    return None if groups_problem(kept, replicas) else kept
