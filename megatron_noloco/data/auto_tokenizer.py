"""Read a tokenizer's folder as transformers' AutoTokenizer does, once per host.

Importing transformers takes seconds. So the first process of a host that needs a tokenizer imports it, and keeps
in the cache what AutoTokenizer has read: `tokenizer.json`, settings and chat templates. All other processes and
commands read the kept folder with `tokenizers` alone.
"""

from importlib.metadata import version
from pathlib import Path
from typing import Any

from megatron_noloco.data.cache import Recipe, cache_folder, obtain
from megatron_noloco.data.fast_tokenizer import KEPT_MARK, deciding
from megatron_noloco.data.inputs import Input
from megatron_noloco.errors import UserError
from megatron_noloco.files import outside, write_text
from megatron_noloco.job.activity import line_of

_READ = (".json", ".txt", ".model", ".jinja", ".tiktoken")  # suffixes of the files that AutoTokenizer reads
_RANDOM = ("dropout", "alpha", "nbest_size")  # attributes of a model that draws other tokens each time


def kept_folder(folder: Path, cache: str | None) -> Path:
    """Return the folder in `cache` (see `cache_folder`) that keeps a tokenizer; `folder` itself if it is a copy.

    Raises UserError where AutoTokenizer cannot read the folder, or has no fast tokenizer for it.
    """
    if (folder / KEPT_MARK).exists():
        return folder
    found = [*folder.glob("*"), *folder.glob("additional_chat_templates/*")]
    files = [path for path in sorted(found) if path.suffix in _READ and path.is_file()]
    if not files:
        raise UserError(
            f"tokenizer_model {folder}: no folder with a tokenizer.json (looked from cwd {Path.cwd()}); give "
            "that of a Hugging Face tokenizer"
        )
    inputs = [Input(path, folder) for path in files]

    def keep(prefix: Path, _: Any) -> dict[str, Any]:
        _keep(folder, prefix.parent)
        return {}

    settings = {"kind": "Tokenizer", "transformers": version("transformers")}
    return obtain(cache_folder(cache), Recipe(f"tokenizer {folder}", inputs, settings, keep)).folder


def load_folder(folder: Path) -> Any:
    """Return the tokenizer that AutoTokenizer reads from a folder; raises anything where it cannot."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of classes that it takes in place of another
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _keep(folder: Path, kept: Path) -> None:
    try:
        theirs = load_folder(folder)
    except ImportError:  # a missing package, which the command names
        raise
    except Exception as error:  # it raises anything for files that it does not expect
        reason = outside(f"{type(error).__name__}: {line_of(error)}")
        raise UserError(f"tokenizer_model {folder}: transformers cannot read it ({reason})") from None
    backend = getattr(theirs, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            f"tokenizer_model {folder}: {type(theirs).__name__} of transformers has no fast tokenizer; give a "
            "folder with a tokenizer.json"
        )
    from transformers import PreTrainedTokenizerFast

    backend.no_truncation()
    backend.no_padding()
    random = {name: value for name in _RANDOM if (value := getattr(backend.model, name, None))}
    for name in random:
        setattr(backend.model, name, None)
    # Of this class, which takes tokenizer.json as it is; others may build rules of their own from its vocabulary.
    plain: Any = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=theirs.chat_template,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
        **theirs.special_tokens_map,
    )
    plain.save_pretrained(kept)
    write_text(kept / KEPT_MARK, ", ".join(f"{name} {value:g}" for name, value in random.items()))


def check_exported(folder: Path) -> str:
    """Return a line where AutoTokenizer does not read an export by its tokenizer.json; "" where it does.

    For some families AutoTokenizer takes a class of its own, whatever the files say.
    """
    from tokenizers import Tokenizer

    theirs, ours = load_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    if deciding(theirs.backend_tokenizer) == deciding(ours):
        return ""
    return (
        f"{folder}: for this family AutoTokenizer takes {type(theirs).__name__}, which reads other tokens than "
        "training did; load the tokenizer with PreTrainedTokenizerFast.from_pretrained"
    )
