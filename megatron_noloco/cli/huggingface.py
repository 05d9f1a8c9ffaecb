"""The commands `export`, `import`, `generate` and `evaluate`."""

import argparse
import json
import math
import shlex
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_noloco.cli.exit_codes import StoppedError
from megatron_noloco.cli.options import (
    CHECKPOINT,
    Commands,
    add_command,
    add_data,
    at_least_one,
    at_least_zero,
    dtype,
    say,
    seed,
    size,
    utf8,
)
from megatron_noloco.errors import UserError, prefix_errors_with
from megatron_noloco.files import write_text, writing

if TYPE_CHECKING:
    from megatron_noloco.config import RunConfig
    from megatron_noloco.huggingface.evaluate import Result

_SHARD_BYTES = 500 * 10**6
_IMPORT = """\
Without --config the run has AdamW with a small learning rate, samples of the model's context (at most 4,096
tokens), bf16 on GPUs, and for separate jobs a layout for the GPUs of this machine. Change the file as you like
before the run starts."""
_MODEL = f"a Hugging Face folder, or a checkpoint: {CHECKPOINT}"


def add_commands(commands: Commands) -> None:
    export = add_command(
        commands,
        "export",
        "write a checkpoint as a Hugging Face folder, and compare the logits",
        "export runs/my-run --output my-model",
    )
    add = export.add_argument
    add("checkpoint", nargs="+", type=Path, help=CHECKPOINT)
    add("--output", required=True, help="the folder to write")
    combine = (
        "weights: the mean of all replicas, the replica with the lowest loss, or replica K (default: mean)"
    )
    add("--combine", default="mean", metavar="mean|best|replica=K", help=combine)
    precisions = "fp32|bf16|fp16"
    precision = "precision of the weights (default: fp32)"
    add("--dtype", type=dtype, default="float32", metavar=precisions, help=precision)
    largest = "size of the largest weight file (default: 500MB)"
    add("--max-shard-size", type=size, default=_SHARD_BYTES, metavar="SIZE", help=largest)
    export.set_defaults(run=_export)
    _add_tokenizer(export)

    import_ = add_command(
        commands,
        "import",
        "write the config of a run that starts from a Hugging Face folder",
        "import my-model --data my-texts --rendezvous tcp://first:29600 --output my-run.json",
        _IMPORT,
    )
    add = import_.add_argument
    add("folder", help="a Hugging Face model with safetensors")
    config = (
        "a config file; its block model is replaced, and may lack sizes (default: settings for this model)"
    )
    add("--config", help=config)
    add_data(import_, "what the run reads", "text")
    rendezvous = (
        "for replicas that are separate jobs, where they find each other: tcp://HOST:PORT of this machine, or a "
        "folder or bucket, see federation.rendezvous; also makes the key, if there is none"
    )
    add("--rendezvous", metavar="URL", help=rendezvous)
    add("--output", required=True, help="the config file to write")
    without = "do not compare the logits of a text with those of transformers, which takes 8 bytes per weight"
    add("--no-check", action="store_true", help=without)
    import_.set_defaults(run=_import)

    generate = add_command(
        commands,
        "generate",
        "continue a text with a checkpoint or a Hugging Face folder",
        'generate runs/my-run --prompt "def "',
    )
    add = generate.add_argument
    add("model", nargs="+", type=Path, help=_MODEL)
    add("--prompt", type=utf8, required=True, help='the text to continue; "": the beginning of a document')
    add("--chat", action="store_true", help="the prompt is a message, to which the model answers")
    add("--tokens", type=at_least_one, default=200, help="largest number of new tokens (default: 200)")
    temperature = "0: always the likeliest token (default: 0.8)"
    add("--temperature", type=at_least_zero, default=0.8, help=temperature)
    add("--seed", type=seed, default=0, help="seed with which tokens are drawn (default: 0)")
    generate.set_defaults(run=_generate)
    _add_tokenizer(generate)

    evaluate = add_command(
        commands,
        "evaluate",
        "print the loss of each replica and of their mean",
        "evaluate runs/my-run --data other.txt",
    )
    add = evaluate.add_argument
    add("model", nargs="+", type=Path, help=_MODEL)
    data = (
        "a text, records, a folder of them, or a dataset's prefix (default: the run's own validation split)"
    )
    add("--data", help=data)
    add("--samples", type=at_least_one, help="number of samples of each dataset (default: all)")
    add("--seq-length", type=at_least_one, help="tokens in a sample (default: the model's)")
    evaluate.set_defaults(run=_evaluate)
    _add_tokenizer(evaluate)


def _add_tokenizer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FOLDER",
        help="folder of a checkpoint's tokenizer (default: the run's copy, or the folder that its config names)",
    )


def _export(args: argparse.Namespace) -> int:
    from megatron_noloco.data.auto_tokenizer import check_exported
    from megatron_noloco.huggingface.export import check_export, export
    from megatron_noloco.huggingface.source import open_source
    from megatron_noloco.huggingface.whole_model import TOLERANCE

    source = open_source(args.checkpoint, args.combine, args.tokenizer)
    output = Path(args.output)
    unchecked = export(source, output, args.dtype, args.max_shard_size)
    say(*source.losses_report())
    difference = check_export(source, unchecked)
    say(f"logits: largest difference from the trainer's own {difference:.1e} (must be below {TOLERANCE:g})")
    if not difference < TOLERANCE:  # false for NaN, too
        raise StoppedError(f"{unchecked}: the exported model differs from the trained one")
    if note := check_exported(output, source.tokenizer):
        say(note)
    say(f"exported {source.saved} to {output}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from megatron_noloco.data.sources import IndexedSource
    from megatron_noloco.federation.keys import Keys
    from megatron_noloco.huggingface.folder import ModelFolder
    from megatron_noloco.huggingface.pretrained import import_folder
    from megatron_noloco.huggingface.whole_model import check_import
    from megatron_noloco.preflight.newcomer import memory_of_gpus, proposed
    from megatron_noloco.settings import FederationSettings
    from megatron_noloco.training.prepare import check_data, check_start

    output = Path(args.output)
    if output.exists():
        raise UserError(f"{output}: exists; give another --output, or remove it")
    folder = ModelFolder(Path(args.folder))
    template = _template(args, folder.sizes)
    config, length = import_folder(folder, template)
    lines = [length]
    if args.data:
        alone = config.replace(federation=FederationSettings())
        tokenizer, architecture = check_start(alone, pretrained=folder)
        check_data(config, None, tokenizer, architecture)
    if not args.no_check:
        lines.append(check_import(folder))
    federation = config.federation
    if args.config is None and federation.exists:
        config, _ = proposed(config, memory_of_gpus())
    if args.rendezvous is not None and not (key := Path(str(federation.key_file))).exists():
        with writing(key, "federation.key_file"):
            Keys.make(key)
        lines.append(f"{key}: the key of the run, which `invite` needs")
    with writing(output, "--output"):
        write_text(output, json.dumps(config.given(), indent=2) + "\n")
    if config.data != template.data and isinstance(config.data.source, IndexedSource):
        say("data.tokenizer_model: the model's own; a dataset in data_path must have been made with it")
    say(*lines, f"{output}: starts from {args.folder}")
    file = shlex.quote(str(output))
    if args.rendezvous is not None:
        say(
            f"Start it with: megatron-noloco train {file} --replica 0",
            f"Then, for each further machine: megatron-noloco invite {file}",
        )
    elif not federation.exists:
        say(f"Start it with: launch/mpirun.sh N {file}, for N ranks")
    return 0


def _template(args: argparse.Namespace, sizes: dict[str, Any]) -> "RunConfig":
    """Return the config that `import` gives a model of these sizes, see `ModelFolder`."""
    from megatron_noloco.config import load_config
    from megatron_noloco.federation.network import meeting_place
    from megatron_noloco.huggingface.pretrained import config_to_continue

    output = Path(args.output)
    data = {name or "text": path for name, path in args.data}
    if args.config is not None:
        config = load_config(args.config, sizes)
        if data:
            config = config.replace(data=config.data.reading(data))
    elif not data:
        raise UserError(
            "import: --data is missing: a file or folder of text to train on; or --config, a file that has it"
        )
    else:
        config = config_to_continue(sizes, data, f"runs/{output.stem}", in_one_job=args.rendezvous is None)
    if args.rendezvous is not None:
        with prefix_errors_with("import: --rendezvous"):
            meeting_place(args.rendezvous)
        key_file = config.federation.key_file or str(output.with_suffix(".key"))
        config = config.replace(
            federation=config.federation.replace(rendezvous=args.rendezvous, key_file=key_file)
        )
    return config


def _generate(args: argparse.Namespace) -> int:
    from megatron_noloco.huggingface.export import export
    from megatron_noloco.huggingface.source import hugging_face, open_source
    from megatron_noloco.huggingface.whole_model import generate

    with tempfile.TemporaryDirectory() as folder:
        model = args.model[0]
        if hugging_face(args.model, args.tokenizer) is None:
            source = open_source(args.model, "mean", args.tokenizer)
            model = export(source, Path(folder), "float32", _SHARD_BYTES)
        generate(model, args.prompt, args.chat, args.tokens, args.temperature, args.seed)
    return 0


def _evaluate(args: argparse.Namespace) -> int:
    from megatron_noloco.huggingface.evaluate import evaluate, open_weights

    weights = open_weights(args.model, args.data, args.seq_length, args.tokenizer)
    _say_losses(evaluate(*weights, args.samples))
    return 0


def _say_losses(results: "Iterable[Result]") -> None:
    """Write a line for each loss; raises StoppedError in the end where a loss is not finite."""
    diverged = []
    for result in results:
        if not math.isfinite(result.loss):
            diverged.append(f"{result.model} on {result.dataset}")
        say(
            f"{result.model} on {result.dataset}: loss {result.loss:.4f} nats per token, "
            f"perplexity {result.perplexity:.4f}, {result.bits_per_byte:.4f} bits per byte of text "
            f"({result.tokens} tokens)"
        )
    if diverged:
        raise StoppedError(
            f"the loss is not finite: {', '.join(diverged)}; training has diverged, evaluate an earlier checkpoint"
        )
