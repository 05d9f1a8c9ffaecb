"""What the block `noloco` leaves out is chosen by the number of replicas, and kept by a run that continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_noloco.config import RunConfig, resolve, saved_config
from megatron_noloco.config.noloco_block import recommended
from megatron_noloco.preflight.short_run import shortened
from megatron_noloco.settings import NolocoSettings, groups_problem
from tests.kit.configs import FEDERATION, config, edited
from tests.kit.ranks import output_of

PAIRS, GROUPS, LARGE = (2, "int4"), (8, "int4"), (16, "int4")


def left_out(replicas: Any, **noloco: Any) -> RunConfig:
    return config(noloco={"local_steps": 5} | noloco, parallel__replicas=replicas)


def groups_of(run: RunConfig, saved: dict[str, Any] | None = None) -> tuple[int, str]:
    then = None if saved is None else saved_config(saved).noloco
    noloco = resolve(run, None if run.federation.exists else run.parallel.replicas, saved=then).config.noloco  # type: ignore[arg-type]
    return noloco.group_size, noloco.payload


def saved_by(run: RunConfig) -> dict[str, Any]:
    return resolve(run, run.parallel.replicas).config.to_dict()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("replicas", "chosen"), [(1, PAIRS), (8, PAIRS), (9, GROUPS), (31, GROUPS), (32, LARGE), (64, LARGE)]
)
def test_replicas_choose_groups_by_recipe(replicas: int, chosen: tuple[int, str]) -> None:
    assert groups_of(left_out(replicas)) == chosen
    found = resolve(left_out("auto"), left_out("auto").topology(2 * replicas).total_replicas)
    assert (found.config.noloco.group_size, found.config.noloco.payload) == chosen
    assert found.by_recipe == recommended(replicas)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"payload": "fp32"}, (2, "fp32")),
        ({"pairing": "cycle"}, PAIRS),
        ({"group_size": 4}, (4, "int4")),
        ({"recipe": "paper"}, (2, "fp32")),
        ({"method": "diloco"}, PAIRS),
    ],
    ids=str,
)
def test_given_group_setting_keeps_other_defaults(given: dict[str, Any], found: tuple[int, str]) -> None:
    assert groups_of(left_out(16, **given)) == found


def test_separate_jobs_exchange_in_pairs_however_many_they_are() -> None:
    run = RunConfig(**edited(FEDERATION | {"noloco": {"local_steps": 5}}))
    assert groups_of(run) == PAIRS


def test_groups_that_are_recommended_keep_together_what_pairs_do() -> None:
    """Whatever the outer step: a file that was accepted with pairs is not refused for its number of replicas."""
    for replicas in (3, 9, 12, 17, 31, 32, 33, 64):
        for alpha, nesterov in ((0.0, False), (0.5, False), (0.8, True), (0.9, True), (0.95, True)):
            for beta in (0.3, 0.7, 1.0, 1.3):
                outer: dict[str, Any] = {
                    "outer_momentum": alpha,
                    "outer_nesterov": nesterov,
                    "outer_lr": beta,
                }
                if not groups_problem(NolocoSettings(**outer), replicas):
                    groups = NolocoSettings(**outer, **recommended(replicas))
                    assert groups_problem(groups, replicas) == ""


def test_a_run_that_continues_keeps_its_groups() -> None:
    """Those of an earlier version, of which the file said nothing either, or of a file that said more."""
    began_in_pairs = saved_by(left_out(16, group_size=2))
    now = left_out(16)
    assert groups_of(now, began_in_pairs) == PAIRS
    del began_in_pairs["noloco"]["recipe"]  # which did not exist in the first version
    assert groups_of(now, began_in_pairs) == PAIRS
    assert groups_of(left_out(16, payload="fp32"), began_in_pairs) == (2, "fp32"), "given"


def test_a_run_that_continues_otherwise_chooses_anew() -> None:
    saved = saved_by(left_out(16))
    assert groups_of(left_out(12), saved) == GROUPS
    assert groups_of(left_out(4), saved) == PAIRS, "fewer replicas than a group has"
    for other in (left_out(16, recipe="paper"), left_out(16, method="diloco", payload="fp32")):
        assert groups_of(left_out(16), saved_by(other)) == GROUPS


def test_a_checkpoint_of_groups_is_read_as_it_was_saved() -> None:
    for run in (left_out(16), left_out(16, group_size=2)):
        assert RunConfig(**saved_by(run)).noloco == resolve(run, 16).config.noloco


def test_tune_leaves_fields_to_the_recipe() -> None:
    run = RunConfig(**shortened(left_out("auto"), 5, 1.0).given())
    assert resolve(run, 16).by_recipe == recommended(16)


def test_config_check_says_what_the_recipe_has_chosen(tmp_path: Path) -> None:
    def checked(replicas: Any, *options: str, **noloco: Any) -> str:
        raw = edited({"noloco": noloco, "parallel.replicas": replicas, "training.output_dir": str(tmp_path)})
        (tmp_path / "run.json").write_text(json.dumps(raw))
        return output_of("config", "--check", tmp_path / "run.json", *options)

    line = "by recipe: group_size 8, pairing auto, payload int4 (for 12 replicas, or as"
    assert line in checked(12)
    assert line in checked("auto", "--world-size", "24")
    assert "by recipe" not in checked(12, payload="int8")
