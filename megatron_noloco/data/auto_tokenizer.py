"""Compare the tokens of training with those of transformers' AutoTokenizer, on texts in which tokenizers differ.

AutoTokenizer does not always read tokenizer.json as it is. It builds the classes of some families from the
vocabulary alone, with rules of their own, and adds tokens that only tokenizer_config.json names.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_noloco.data.tokenizer import Tokenizer
from megatron_noloco.errors import UserError
from megatron_noloco.files import read_object

_AS_WRITTEN = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the name before transformers 5, and since

# Spaces at the ends and in rows, lines, digits, signs, two forms of accents, a ligature, scripts, emoji, NUL.
_TEXTS = (
    "Byte by byte, \n\té 中",
    "the",
    " the  end ",
    "   def f(x):\n\n\treturn x\n",
    "\n the\r\n",
    "3.14 and 1234567, (don't) -> 'IT'!",
    "e\u0301 ﬁ İ ß \u00a0½",
    "日本語 한국어 עברית 👩‍👩‍👧",
    "a\u0000b\u200bc",
)


def sample_texts(special_tokens: Any) -> list[str]:
    """Return the texts of a comparison, in which each special token stands next to letters, spaces and lines."""
    with_special = (
        form.format(token) for token in special_tokens for form in ("{}the", "the {} end", "the{}\n")
    )
    return [*_TEXTS, *with_special]


def folder_problem(tokenizer: Tokenizer) -> str:
    """Return a line that says where transformers reads the files of a run's tokenizer otherwise; "" if nowhere.

    Files that transformers does not load, such as a tokenizer.json without others, say nothing else.
    """
    if not (found := _difference(tokenizer, load_folder)):
        return ""
    folder = tokenizer.folder
    return (
        f"tokenizer_model {folder}: its tokenizer.json reads {found}; "
        'to train with the first, set tokenizer_class in its tokenizer_config.json to "PreTrainedTokenizerFast"; '
        f'with the second, give what AutoTokenizer.from_pretrained("{folder}").save_pretrained(...) writes'
    )


def auto_differs(tokenizer: Tokenizer) -> str:
    """Return a line where AutoTokenizer takes another class than the files of a run's tokenizer name, and says so.

    "" if it reads the same, or the files name no class. The files hold, here and in `generate`.
    """
    as_written = tokenizer.folder is not None and _is_as_written(tokenizer.folder)
    found = _difference(tokenizer, _load_auto) if as_written else ""
    return found and _auto_advice(tokenizer.folder, found)


def _difference(tokenizer: Tokenizer, load: Callable[[Path], Any]) -> str:
    """Return the first difference to what transformers loads of a folder; "" where it loads nothing."""
    if tokenizer.folder is None or find_spec("transformers") is None:
        return ""
    try:
        theirs = load(tokenizer.folder)
    except Exception:  # it raises anything for files that it does not expect
        return ""
    return _first_difference(tokenizer, "AutoTokenizer", theirs, with_ends=False)


def check_folder(tokenizer: Tokenizer) -> None:
    """Raise UserError, with the line of `folder_problem`, where there is one."""
    if problem := folder_problem(tokenizer):
        raise UserError(problem)


def folder_adds_bos(folder: Path) -> bool:
    """Return whether transformers puts a BOS before a text; not where it cannot load the folder."""
    try:
        return adds_bos(load_folder(folder))
    except Exception:  # see `_difference`
        return False


def check_exported(tokenizer: Tokenizer, folder: Path) -> str:
    """Return a line where AutoTokenizer reads an export otherwise than training; "" where it reads the same.

    What training puts before each document counts, too. For some families AutoTokenizer takes a class of its own,
    whatever the files say. Raises UserError where the files themselves read a text as other tokens.
    """
    if found := _first_difference(tokenizer, "the exported tokenizer", load_folder(folder), with_ends=True):
        raise UserError(f"{folder}: training reads {found}")
    found = _first_difference(tokenizer, "AutoTokenizer", _load_auto(folder), with_ends=True)
    return found and _auto_advice(folder, found)


def _auto_advice(folder: Path | None, found: str) -> str:
    return (
        f"{folder}: training reads {found}, whatever the files there say; load the tokenizer with "
        "PreTrainedTokenizerFast.from_pretrained"
    )


def adds_bos(theirs: Any) -> bool:
    """Return whether an AutoTokenizer puts its BOS before a text."""
    return theirs.bos_token_id is not None and theirs("the").input_ids[:1] == [theirs.bos_token_id]


def load_folder(folder: Path) -> Any:
    """Return the tokenizer of a folder: as its tokenizer.json has it if its files say so, else AutoTokenizer's.

    For some families AutoTokenizer takes a class of its own, whatever the files say. Raises anything where it
    cannot.
    """
    if not _is_as_written(folder):
        return _load_auto(folder)
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def _is_as_written(folder: Path) -> bool:
    """Return whether tokenizer_config.json names the class that takes tokenizer.json as it is."""
    path = folder / "tokenizer_config.json"
    return path.is_file() and read_object(path, "copy it again").get("tokenizer_class") in _AS_WRITTEN


def _load_auto(folder: Path) -> Any:
    """Return what AutoTokenizer loads from a folder; raises anything where it cannot."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it warns of classes that it takes in place of another
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _first_difference(ours: Tokenizer, who: str, theirs: Any, with_ends: bool) -> str:
    """Return in words the first text that has other tokens, with both lists; "" where there is none.

    Special tokens in a text are these tokens. `who` names the other tokenizer.
    """
    for text in sample_texts(
        [*ours.special_tokens, *theirs.get_added_vocab()] if ours.special_tokens else ()
    ):
        tokens = ours.encode_batch([text], from_template=True)[0].tolist()
        if with_ends:
            tokens = [*ours.before_document, *tokens]
        other = list(theirs(text, add_special_tokens=with_ends, verbose=False).input_ids)
        if tokens != other:
            return f"{text!r} as {tokens}, {who} as {other}"
    return ""
