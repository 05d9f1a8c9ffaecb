"""NoLoCo with LLaMA-Factory: a job that trains a LoRA adapter, as one replica of several.

    megatron-noloco keys my-run.key
    python examples/llamafactory_lora.py --slot 0 --slots 2 --folder my-run &
    python examples/llamafactory_lora.py --slot 1 --slots 2 --folder my-run

LLaMA-Factory takes callbacks before there is a trainer, which this callback needs. So a subclass of the trainer
adds it, in the place of the class that the stage's `workflow` module names. `--slots 1` trains alone.

Needs `pip install '.[federation]' llamafactory`. The lines that NoLoCo adds are marked.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from llamafactory.train.pt import workflow
from llamafactory.train.tuner import run_exp
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from megatron_noloco.attach.hf_trainer import NolocoCallback
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH = 64


def prepare(folder: Path, slot: int, slots: int) -> None:
    """Write a small model, and texts of Python's source files, as LLaMA-Factory reads them."""
    tokenizer = ByT5Tokenizer()  # of bytes
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    torch.manual_seed(0)  # the same model for every replica
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    library = Path(argparse.__file__).parent
    text = (library / "argparse.py").read_text()[: 800 * LENGTH]
    pieces = [{"text": text[start : start + LENGTH]} for start in range(0, len(text), LENGTH)]
    own = [piece for index, piece in enumerate(pieces) if index % 10][slot::slots]
    (folder / "own.json").write_text(json.dumps(own))
    (folder / "held_out.json").write_text(json.dumps(pieces[::10]))
    files = {
        name: {"file_name": f"{name}.json", "columns": {"prompt": "text"}} for name in ("own", "held_out")
    }
    (folder / "dataset_info.json").write_text(json.dumps(files))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True, help="which replica this job is, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many replicas there are")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the adapter")
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    torch.set_num_threads(1)  # for several jobs on one machine
    inputs = options.folder / f"inputs_{options.slot}"
    inputs.mkdir(parents=True, exist_ok=True)
    prepare(inputs, options.slot, options.slots)
    folder = options.folder / f"replica_{options.slot}"  # its own output_dir
    checkpoint = get_last_checkpoint(str(folder)) if folder.exists() else None
    args = {
        "stage": "pt",
        "do_train": True,
        "do_eval": True,
        "model_name_or_path": str(inputs / "model"),
        "finetuning_type": "lora",
        "lora_target": "all",
        "additional_target": "lm_head",
        "dataset_dir": str(inputs),
        "dataset": "own",
        "eval_dataset": "held_out",
        "cutoff_len": LENGTH,
        "output_dir": str(folder),
        "resume_from_checkpoint": checkpoint,
        "max_steps": options.steps,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 10,
        "save_steps": 20,
        "seed": 0,  # every replica starts from the same weights
        "data_seed": options.slot,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    if options.slots > 1:
        federation = FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=options.slots,  # wait for all at the beginning
            rounds_behind=1,  # a job that comes back goes on where the others are
        )
        settings = NolocoSettings(local_steps=10, deadline_seconds=120)

        class JoinedTrainer(workflow.CustomTrainer):
            def __init__(self, *args: Any, **others: Any) -> None:
                super().__init__(*args, **others)
                self.add_callback(NolocoCallback(self, federation, settings, slot=options.slot))  # NoLoCo

        workflow.CustomTrainer = JoinedTrainer  # NoLoCo
    print(f"begins; checkpoint: {checkpoint}", flush=True)
    run_exp(args)  # saves the one adapter of all replicas
    found = json.loads((folder / "eval_results.json").read_text())
    print(f"finished; loss on held-out text {found['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
