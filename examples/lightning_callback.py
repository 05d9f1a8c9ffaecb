"""NoLoCo with Lightning's `Trainer`, by a callback: a job that trains a small model, as one replica of several.

    megatron-noloco keys my-run.key
    python examples/lightning_callback.py --slot 0 --slots 2 --folder my-run &
    python examples/lightning_callback.py --slot 1 --slots 2 --folder my-run

Copy `NolocoCallback`. It is for one device, and for a constant learning rate. `--slots 1` trains alone.

Needs `pip install '.[federation]' pytorch-lightning`.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from megatron_noloco.attach import Attached, attach
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH = 64


class NolocoCallback(Callback):
    """Runs rounds with the other jobs. Its state is in Lightning's checkpoints.

    Give `Trainer` max_steps=-1, and the number of steps here: steps that this job was away for count.
    """

    def __init__(
        self, federation: FederationSettings, settings: NolocoSettings, slot: int, steps: int
    ) -> None:
        self._federation, self._settings, self._slot, self._steps = federation, settings, slot, steps
        self._saved: dict[str, Any] | None = None
        self._noloco: Attached | None = None
        self._seen = 0  # optimizer steps of Lightning

    def on_train_start(self, trainer: lightning.Trainer, module: lightning.LightningModule) -> None:
        self._noloco = attach(  # here the checkpoint is loaded
            trainer.model,
            self._settings,
            federation=self._federation,
            slot=self._slot,
            state=self._saved,
            inner=trainer.optimizers,
            stopped=lambda: trainer.received_sigterm,
        )
        self._seen = trainer.global_step

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        assert self._noloco is not None
        if trainer.global_step == self._seen:
            return  # gradients are accumulated
        self._seen = trainer.global_step
        for report in self._noloco.step():
            partner = [slot for slot in report.exchange.group if slot != self._slot] or [-1]
            print(f"step {self._noloco.done}: partner {partner[0]}, spread {report.spread:.5f}", flush=True)
        if self._noloco.done >= self._steps:
            trainer.should_stop = True

    def on_train_end(self, *_: Any) -> None:
        assert self._noloco is not None
        self._noloco.average()
        self._noloco.close()

    def on_exception(self, *_: Any) -> None:
        if self._noloco is not None:
            self._noloco.close(at_once=True)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._noloco is None else self._noloco.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict


class Bytes(lightning.LightningModule):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(256, 64), nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, 256)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        found = self.head(self.recurrent(self.embedding(batch[:, :-1]))[0])
        return nn.functional.cross_entropy(found.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples() -> Tensor:
    """Return the bytes of some of Python's source files, shape [samples, LENGTH]."""
    library = Path(argparse.__file__).parent
    text = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py"))
    return torch.tensor(list(text)).unfold(0, LENGTH, LENGTH)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True, help="which replica this job is, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many replicas there are")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the model")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for several jobs on one machine
    folder = options.folder / f"replica_{options.slot}"  # its own
    lightning.seed_everything(0)  # every replica starts from the same weights
    module, text = Bytes(), samples()
    data = text[torch.arange(len(text)) % 10 > 0][options.slot :: options.slots]
    callbacks: list[Callback] = [
        ModelCheckpoint(folder, every_n_train_steps=30, save_last=True, save_top_k=1)
    ]
    if options.slots > 1:
        federation = FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=options.slots,  # wait for all at the beginning
            rounds_behind=1,  # a job that comes back goes on where the others are
        )
        settings = NolocoSettings(local_steps=10, deadline_seconds=120)
        callbacks.append(NolocoCallback(federation, settings, options.slot, options.steps))  # NoLoCo
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.steps if options.slots == 1 else -1,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    checkpoint = folder / "last.ckpt"
    path = str(checkpoint) if checkpoint.exists() else None
    print(f"begins; checkpoint: {path}", flush=True)
    loader = DataLoader(cast("Dataset[Tensor]", data), batch_size=8, shuffle=True)
    trainer.fit(module, loader, ckpt_path=path)
    torch.save(module.state_dict(), folder / "final.pt")
    with torch.no_grad():
        print(f"finished; loss on held-out text {module.training_step(text[::10], 0).item():.4f}", flush=True)


if __name__ == "__main__":
    main()
