"""NoLoCo with TRL's `SFTTrainer` and PEFT: a job that trains a LoRA adapter, as one replica of several.

    megatron-noloco keys my-run.key
    python examples/trl_sft.py --slot 0 --slots 2 --folder my-run &
    python examples/trl_sft.py --slot 1 --slots 2 --folder my-run

Only the adapter is exchanged. Each may be killed and started again on its own. `--slots 1` trains alone.

Needs `pip install '.[federation,huggingface]' trl peft`. The lines that NoLoCo adds are marked.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from megatron_noloco.attach.hf_trainer import NolocoCallback
from megatron_noloco.settings import FederationSettings, NolocoSettings

LENGTH = 64  # tokens of a sample


def texts() -> list[str]:
    """Return pieces of some of Python's source files."""
    library = Path(argparse.__file__).parent
    text = "".join((library / name).read_text() for name in ("argparse.py", "ast.py"))
    return [text[start : start + LENGTH] for start in range(0, len(text), LENGTH)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slot", type=int, required=True, help="which replica this job is, from 0")
    parser.add_argument("--slots", type=int, required=True, help="how many replicas there are")
    parser.add_argument("--folder", type=Path, required=True, help="for checkpoints and the adapter")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    folder = options.folder / f"replica_{options.slot}"  # its own output_dir
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        max_length=LENGTH,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=10,
        logging_steps=10,
        save_steps=30,
        seed=0,  # every replica starts from the same weights
        data_seed=options.slot,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    torch.set_num_threads(1)  # for several jobs on one machine
    torch.manual_seed(args.seed)  # also the adapter's first weights
    tokenizer = ByT5Tokenizer()  # of bytes: has no file
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    held_out = texts()[::10]
    own = [text for text in texts() if text not in held_out][options.slot :: options.slots]
    trainer = SFTTrainer(
        model,
        args,
        train_dataset=Dataset.from_dict({"text": own}),
        eval_dataset=Dataset.from_dict({"text": held_out}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["lm_head"]),
    )
    if options.slots > 1:
        federation = FederationSettings(
            rendezvous=f"file://{options.folder}/rendezvous",
            key_file=f"{options.folder}.key",  # a copy on each machine
            skip_local_steps=False,  # a slow job lets its partners wait
            start_with=options.slots,  # wait for all at the beginning
            rounds_behind=1,  # a job that comes back goes on where the others are
        )
        settings = NolocoSettings(local_steps=10, deadline_seconds=120)
        trainer.add_callback(NolocoCallback(trainer, federation, settings, slot=options.slot))  # NoLoCo
    checkpoint = get_last_checkpoint(str(folder)) if folder.exists() else None
    print(f"begins; checkpoint: {checkpoint}", flush=True)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(str(folder / "final"))  # the one adapter of all replicas
    print(f"finished; loss on held-out text {trainer.evaluate()['eval_loss']:.4f}", flush=True)


if __name__ == "__main__":
    main()
