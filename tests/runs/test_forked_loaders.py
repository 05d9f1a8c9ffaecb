"""A loop in plain torch forks workers of a DataLoader while exchanges are under way."""

import multiprocessing
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megatron_noloco.attach import attach
from megatron_noloco.settings import FederationSettings, NolocoSettings
from tests.kit.ranks import key_file

LOADERS, NUMBERS = 50, 64
MOST_STEPS = 100_000


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUMBERS

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((100,), float(index))


def job(slot: int, folder: str, loaders: int, queue: "multiprocessing.Queue[tuple[int, int]] | None") -> None:
    """Take steps with an exchange under way nearly always; begin a DataLoader with forked workers in each."""
    torch.set_num_threads(1)
    model = nn.Linear(1000, 2000)
    nn.init.constant_(model.weight, 0.1)
    nn.init.zeros_(model.bias)
    federation = FederationSettings(
        rendezvous=f"file://{folder}", key_file=key_file(Path(folder)), start_with=2
    )
    settings = NolocoSettings(local_steps=2, overlap_steps=1, payload="fp32", deadline_seconds=60.0)
    stop = threading.Event()
    noloco = attach(model, settings, federation=federation, slot=slot, stopped=stop.is_set)
    done = exchanged = 0
    for step in range(MOST_STEPS):
        if queue is not None:
            if step == loaders:
                break
            loader = DataLoader(
                Numbers(), batch_size=8, num_workers=2, multiprocessing_context="fork", timeout=60
            )
            done += sum(len(batch) for batch in loader) == NUMBERS
        reports = noloco.step()
        exchanged += sum(len(report.exchange.group) == 2 for report in reports)
    if queue is not None:
        queue.put((done, exchanged))
    noloco.close()


@pytest.mark.slow
def test_no_forked_loader_fails_during_exchanges(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[tuple[int, int]] = context.Queue()
    other = context.Process(target=job, args=(1, str(tmp_path), 0, None), daemon=True)
    # Not daemonic: it has children.
    forking = context.Process(target=job, args=(0, str(tmp_path), LOADERS, queue))
    other.start()
    forking.start()
    try:
        forking.join(600)
        assert forking.exitcode == 0
        done, exchanged = queue.get(timeout=60)
        assert done == LOADERS
        assert exchanged > LOADERS // 4
    finally:
        for process in (other, forking):
            process.kill()
            process.join()
