"""NoLoCo with the `Trainer` of Hugging Face: a job that trains a small Llama, as one replica of several.

    megatron-noloco keys my-run.key
    python examples/hf_trainer.py --slot 0 --slots 2 --folder my-run &
    python examples/hf_trainer.py --slot 1 --slots 2 --folder my-run

On several machines `--rendezvous tcp://first:29600` in addition, and a copy of the key
(docs/several-machines.md).
Each may be stopped and started again on its own; it continues from the Trainer's last checkpoint. Several ranks
for each replica: torchrun --nproc-per-node 2 in place of python, for all jobs. `--deepspeed FILE`: a ds_config.

Needs `pip install '.[federation,huggingface]'`. What NoLoCo adds is marked.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from megatron_noloco.attach.hf_trainer import NolocoCallback
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH = 64  # bytes of a sample


class Text(Dataset[dict[str, Tensor]]):
    """The bytes of some of Python's source files; each replica has every `slots`-th sample."""

    def __init__(self, slot: int, slots: int) -> None:
        library = Path(argparse.__file__).parent
        text = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py"))
        samples = torch.tensor(list(text)).split(LENGTH)[:-1]
        self._samples = samples[slot::slots]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._samples[index], "labels": self._samples[index]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True, help="which replica this job is, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many replicas there are")
    parser.add_argument(
        "--folder", type=Path, required=True, help="for checkpoints and the model; the key is FOLDER.key"
    )
    parser.add_argument(
        "--rendezvous", help="tcp://HOST:PORT of one replica or more; else a folder in FOLDER"
    )
    parser.add_argument("--listen", help='"off" where others cannot connect; else the port of the rendezvous')
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--deepspeed", help="a ds_config")
    options = parser.parse_args()
    folder = options.folder / f"replica_{options.slot}"  # its own output_dir
    folder.mkdir(parents=True, exist_ok=True)
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=10,
        logging_steps=10,
        save_steps=30,
        seed=0,  # every replica starts from the same weights
        data_seed=options.slot,
        report_to="none",
        disable_tqdm=True,
        deepspeed=options.deepspeed,
    )
    torch.set_num_threads(1)  # for several jobs on one machine
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        max_position_embeddings=LENGTH,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, args, train_dataset=Text(options.slot, options.slots))
    federation = FederationSettings(
        rendezvous=options.rendezvous or f"file://{options.folder}/rendezvous",
        listen=options.listen,
        key_file=f"{options.folder}.key",
        skip_local_steps=False,  # a slow job lets its partners wait; True: it leaves out steps
        start_with=options.slots,  # wait for all at the beginning, ten minutes at most
    )
    settings = NolocoSettings(local_steps=10, deadline_seconds=120)
    trainer.add_callback(NolocoCallback(trainer, federation, settings, slot=options.slot))  # NoLoCo
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.save_model(str(folder / "final"))  # the one model of all replicas


if __name__ == "__main__":
    main()
