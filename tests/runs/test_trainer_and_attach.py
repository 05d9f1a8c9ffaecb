"""A job of the trainer and a job that is attached to a loop of transformers, as partners."""

import math
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from megatron_noloco.attach import attach
from megatron_noloco.checkpoint.catalog import read_manifests
from megatron_noloco.config import RunConfig
from megatron_noloco.data.tokenizer import ByteTokenizer
from megatron_noloco.federation.compatibility import differences
from megatron_noloco.federation.membership import network_of
from megatron_noloco.federation.network import Network
from megatron_noloco.model.architecture import Architecture
from megatron_noloco.model.families import family_of
from megatron_noloco.training.identity import first_weights, identity_of
from tests.kit.disturbed import command
from tests.kit.federation import Federation, begin_alone
from tests.kit.jobs import SECONDS, network_of_attach
from tests.kit.ranks import key_file, run_ranks, slow
from tests.kit.tiny import FAMILY_MODELS, MIXTURES, TINY, VOCABULARY, tiny, write_text

STEPS = 9  # the last one is after the last round


def of_transformers(architecture: Architecture, seed: int = 0, **keys: Any) -> Any:
    torch.manual_seed(seed)
    theirs = family_of(architecture).hf_config(architecture, "float32") | keys
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**theirs))


def changes(folder: Path, **more: Any) -> dict[str, Any]:
    base = {
        "training": {"train_iters": STEPS, "pretrained": str(folder / "first")},
        "checkpoint": {"save_interval": STEPS},
        "noloco": {"final_average": True},
        "federation": {"start_with": 2, "rounds_behind": STEPS, "skip_local_steps": False},
    }
    return tiny(more, base)


TP, PP, DP = ({f"{axis}_parallel_size": 2} for axis in ("tensor_model", "pipeline_model", "data"))


@pytest.mark.parametrize(
    "jobs",
    [
        {0: {}},
        slow({0: TP}),
        slow({0: TP | DP, 2: PP}),
    ],
    ids=["one rank", "tp 2", "tp 2 x dp 2 and pp 2"],
)
def test_they_train_together_and_end_with_one_model(tmp_path: Path, jobs: dict[int, dict[str, int]]) -> None:
    """The attached job is replica 1."""
    slots = len(jobs) + 1
    text = {"data": {"text": write_text(tmp_path)}, "federation": {"start_with": slots}}
    with Federation(tmp_path, changes(tmp_path, **text)) as federation:
        config = RunConfig(**federation.raw)
        of_transformers(config.architecture(VOCABULARY)).save_pretrained(tmp_path / "first")
        for slot, parallel in jobs.items():
            federation.start(slot, math.prod(parallel.values()), {"parallel": parallel})
        loop = Loop(config, tmp_path / "first")
        while loop.noloco.done < STEPS:
            loop.step()
        rounds = STEPS // config.noloco.local_steps
        assert len(loop.groups) == rounds
        if slots == 2:
            assert loop.groups == [(0, 1)] * rounds
        assert any(len(group) == 2 for group in loop.groups), "one of three is left over in each round"
        (report,) = loop.noloco.average()
        assert report.group == tuple(range(slots))
        assert report.standard_deviation > 0
        loop.noloco.close()
        federation.wait()
    for slot in jobs:
        saved = read_manifests(next(tmp_path.glob(f"replica_{slot:02d}/checkpoints/step_*")))
        assert all(manifest.first_weights for manifest in saved), "which a resume does not read again"
        last = exported(tmp_path / f"replica_{slot:02d}", tmp_path / f"last_{slot}")
        for name, parameter in loop.model.named_parameters():
            assert torch.equal(last[name], parameter), name


class Loop:
    """A loop of transformers, of a job of one rank in slot 1."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.noloco = attach(
            self.model,
            config.noloco,
            federation=config.federation,
            slot=1,
            seed=config.training.seed,
            inner=self.optimizer,
        )
        self.groups: list[tuple[int, ...]] = []
        self._draw = torch.Generator().manual_seed(1)

    def step(self) -> None:
        tokens = torch.randint(VOCABULARY, (2, 16), generator=self._draw)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.groups += [report.exchange.group for report in self.noloco.step()]


def exported(path: Path, output: Path) -> dict[str, Tensor]:
    (outcome,) = run_ranks(1, command, ["export", str(path), "--output", str(output), "--dtype", "float32"])
    assert outcome.code == 0, outcome
    found: dict[str, Tensor] = load_file(output / "model.safetensors")
    return found


def endless(folder: Path) -> dict[str, Any]:
    federation = {"start_with": 1, "rounds_behind": 2, "leave_seconds": 60.0}
    saves = {"save_interval": 1, "keep_last": 1000}
    text = {"text": write_text(folder)}
    return changes(
        folder, data=text, federation=federation, training={"train_iters": 100_000}, checkpoint=saves
    )


def test_attached_job_takes_over_trainer_state(tmp_path: Path) -> None:
    with Federation(tmp_path, endless(tmp_path)) as federation:
        config = RunConfig(**federation.raw)
        of_transformers(config.architecture(VOCABULARY)).save_pretrained(tmp_path / "first")
        federation.start(0, disturb=partial(begin_alone, 0.05))
        federation.until(0, 12)
        loop = Loop(config, tmp_path / "first")
        done, slow = loop.noloco.done, loop.noloco.outer.slow_weights.clone()
        assert done >= 11
        assert {float(state["step"]) for state in loop.optimizer.state.values()} == {float(done)}
        assert all(state["exp_avg"].any() for state in loop.optimizer.state.values())
        deadline = time.monotonic() + SECONDS
        while (0, 1) not in loop.groups:
            assert time.monotonic() < deadline, federation.log(0)
            loop.step()
        loop.step()
        before = loop.noloco.done
        (report,) = loop.noloco.leave()
        assert report.exchange.group == (0, 1)
        assert before % config.noloco.local_steps
        assert before < loop.noloco.done == (report.round_index + 1) * config.noloco.local_steps
        loop.noloco.close()
        federation.stop()
    step = tmp_path / "replica_00" / "checkpoints" / f"step_{done:08d}"
    expected = exported(step, tmp_path / "taken")
    names = [name for name, _ in loop.model.named_parameters()]
    assert torch.equal(slow, torch.cat([expected[name].flatten() for name in names]))


def test_the_trainer_takes_over_the_state_of_an_attached_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Federation(tmp_path, endless(tmp_path)) as federation:
        config = RunConfig(**federation.raw)
        of_transformers(config.architecture(VOCABULARY)).save_pretrained(tmp_path / "first")
        with monkeypatch.context() as alone:
            alone.setattr("megatron_noloco.federation.membership.FIRST_SECONDS", 0.0)
            loop = Loop(config, tmp_path / "first")
        while loop.noloco.done < 11:
            loop.step()
        federation.start(0, 2, {"parallel": {"pipeline_model_parallel_size": 2}})
        deadline = time.monotonic() + SECONDS
        while (0, 1) not in loop.groups:
            assert time.monotonic() < deadline, federation.log(0)
            loop.step()
            time.sleep(0.3)
            if "recovered" in federation.log(0) and not federation.rows(0, "checkpoint"):
                time.sleep(3.0)  # else the job leaves out the steps that this loop takes meanwhile
        loop.noloco.close()
        federation.stop()
    (done,) = re.findall(r"recovered from replica 1: its state after local step (\d+)", federation.log(0))
    assert "anew" not in federation.log(0)
    first = federation.rows(0, "checkpoint")[0]["step"]
    assert first == int(done) + 1
    counts = {float(one) for name, one in federation.state(0, first).items() if "inner.step" in name}
    assert counts == {first}


def compared_by_attach(model: Any, config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> Network:
    there = {"federation": config.federation, "slot": 1, "seed": config.training.seed}
    return network_of_attach(monkeypatch, model, config.noloco, **there)


def compared_by_trainer(config: RunConfig) -> Network:
    architecture = config.architecture(VOCABULARY)
    alike = identity_of(config, ByteTokenizer(), architecture)
    alike = alike._replace(shared={**alike.shared, "first weights": [first_weights(config, architecture)]})
    return network_of(config.federation, config.noloco, alike)


@pytest.mark.parametrize("family", FAMILY_MODELS)
@pytest.mark.parametrize("tied", [False, True])
def test_they_compare_the_same(
    family: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for experts, which transformers 5 computes in stacks."""
    more = {"model": FAMILY_MODELS[family] | {"untie_embeddings_and_output_weights": not tied}}
    config = RunConfig(**tiny(changes(tmp_path, **more), with_rendezvous(tmp_path)))
    model = of_transformers(config.architecture(VOCABULARY))
    model.save_pretrained(tmp_path / "first")
    trainer, attached = compared_by_trainer(config), compared_by_attach(model, config, monkeypatch)
    stacked = FAMILY_MODELS[family]["family"] in MIXTURES and "mlp.experts.gate_up_proj" in " ".join(
        name for name, _ in model.named_parameters()
    )
    assert differences(trainer.digests, attached.digests) == (
        "first weights, names and shapes" if stacked else ""
    )
    assert (trainer.run == attached.run) == (not stacked)


def with_rendezvous(folder: Path) -> dict[str, Any]:
    return tiny({"federation": {"rendezvous": f"file://{folder}", "key_file": key_file(folder)}}, TINY)


def rotary(base: float) -> dict[str, Any]:
    return {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}


@pytest.mark.parametrize(
    ("keys", "seed", "named"),
    [
        (rotary(5e5), 0, "model.rotary_base"),
        ({"attention_bias": True}, 0, "first weights, names and shapes"),
        ({"max_position_embeddings": 2048, "attention_dropout": 0.1}, 0, ""),
        ({}, 1, "first weights"),
    ],
)  # fmt: skip
def test_both_name_what_differs(
    keys: dict[str, Any], seed: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RunConfig(**tiny(changes(tmp_path), with_rendezvous(tmp_path)))
    architecture = config.architecture(VOCABULARY)
    of_transformers(architecture).save_pretrained(tmp_path / "first")
    attached = compared_by_attach(of_transformers(architecture, seed, **keys), config, monkeypatch)
    trainer = compared_by_trainer(config)
    assert differences(trainer.digests, attached.digests) == named
    assert differences(attached.digests, trainer.digests) == named
    assert (trainer.run == attached.run) == (not named)
