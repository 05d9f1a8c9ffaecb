"""Reads arguments from a shell script that starts a program, or from a file of arguments; nothing is run.

Assignments, arrays, variables that the script itself sets, and conditions on them are followed. A value that only
a shell knows, such as $1 or $(date), becomes a mark: `why_unread` says what is wrong with a word that has one.
"""

import operator
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

from megatron_noloco.errors import UserError

_NAME = r"[A-Za-z_]\w*"
_EXPANDED = rf"""
    (?P<computed>\$\(\(.*?\)\)|\$\([^()]*(?:\([^()]*\)[^()]*)*\)|`[^`]*`)
  | \$(?P<variable>{_NAME}|[0-9@*\#?$!-]|\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}})
"""
_TOKEN = re.compile(
    rf"""
    (?P<space>[ \t]+|\\\n)
  | (?P<end>\n|;+|&&|\|\|?|&(?!>))
  | (?P<redirect>[0-9&]?>>?\s*(?:&[0-9-]|[^\s;&|]*)|<\S*)
  | (?P<comment>\#[^\n]*)
  | (?P<bracket>[()])
  | '(?P<single>[^']*)'
  | "(?P<double>(?:[^"\\]|\\.)*)"
  | {_EXPANDED}
  | \\(?P<escaped>.)
  | (?P<plain>[^\s;&|<>()'"$\\`]|\$)
    """,
    re.VERBOSE | re.DOTALL,
)
_IN_QUOTES = re.compile(
    rf"{_EXPANDED} | (?P<space>\\\n) | \\(?P<escaped>[\"\\$`]) | (?P<plain>.)", re.VERBOSE | re.DOTALL
)
_PARAMETER = re.compile(rf"({_NAME}|[0-9]+)(?P<all>\[[@*]\])?(?::?[-=](?P<default>.*))?", re.DOTALL)
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_HERE_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(\w+)\1([^\n]*\n).*?\n\s*\2(?=\n|$)", re.DOTALL)
_REDIRECTION = re.compile(r"[0-9&]?>|<|\||2>&1")
_OPENING, _CLOSING = ("if", "for", "while", "until", "case", "function"), ("fi", "done", "esac", "}")
_BETWEEN = ("then", "else", "elif", "do", "{")
_BEFORE = ("export", "local", "readonly", "declare", "eval", "exec", "nohup")
_DEPENDS = "depends on a condition"
_PRINTING = ("echo", "printf")
_COMPARISONS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_BREAK = "\x1f"  # inside a word that a variable divides into several
_EMPTY = "\ue002"  # a word of quotes with nothing between
_MARK = re.compile("\ue000([0-9]+)\ue001")


class Script:
    """A shell script, or a file of arguments, read once from top to bottom.

    Raises UserError for a quote that is not closed.
    """

    def __init__(self, text: str) -> None:
        self._text = _HERE_DOCUMENT.sub(lambda found: "\n" * found[0].count("\n"), text.replace("\r\n", "\n"))
        self._commands: list[list[str]] = []
        self._variables: dict[str, list[str]] = {}  # an array, or one text
        self._unread: list[str] = []
        # Of each condition, loop or function around: whether its lines are run; None: not known
        self._branches: list[bool | None] = []
        self._tests = False  # whether a condition has begun, whose lines have not
        self._read()

    def why_unread(self, word: str) -> str:
        """Return why the value of a word is not known; "" if it is."""
        found = _MARK.search(word)
        return self._unread[int(found[1])] if found else ""

    def arguments(self) -> list[str]:
        """Return the words of the command that starts a Python program with options.

        Without such a command: all words of a file that begins with an option, else of the variables that do.
        Raises UserError where there are several commands.
        """
        found = [
            words
            for words in self._commands
            if any(map(_is_program, words)) and any(map(_may_be_option, words)) and words[0] not in _PRINTING
        ]
        if len(found) > 1:
            names = ", ".join(_MARK.sub("...", next(filter(_is_program, words))) for words in found)
            raise UserError(f"{len(found)} commands start a program ({names}); keep one of them")
        if found:
            return self._checked(found[0])
        words = [word for command in self._commands for word in command]
        if words and _is_option(words[0]):
            return self._checked(words)
        values = [[word for text in value for word in text.split()] for value in self._variables.values()]
        return self._checked([word for value in values if value and _is_option(value[0]) for word in value])

    def _checked(self, words: list[str]) -> list[str]:
        """Return words up to a redirection; raises UserError for words that may stand for further options."""
        words = list(takewhile(lambda word: not _REDIRECTION.match(word), words))
        problems = [why for word in words if _DEPENDS in (why := self.why_unread(word))]
        if problems:
            raise UserError("\n".join(dict.fromkeys(problems)))
        return words

    def _read(self) -> None:
        """Divide the text into words and commands."""
        place, line, joined = 0, 1, ""  # with "&&" or "||" to the command before
        words, current, array_name = list[str](), None, ""
        while found := _TOKEN.match(self._text, place):
            kind, place = found.lastgroup or "", found.end()
            if kind == "comment" and current is not None:
                kind, place = "plain", found.start() + 1
            if kind == "bracket" and self._tests:  # of conditions, which are read from left to right
                self._branches[-1], self._tests = None, False
            if kind in ("space", "end", "redirect", "comment", "bracket"):
                if kind == "bracket" and found[0] == "(" and current is not None and current.endswith("="):
                    self._carry_out(words, line, joined)
                    words, current, array_name = [], None, f"{current}("
                    continue
                words += [] if current is None else [current]
                current = None
                if found[0] == ")" and array_name:
                    self._assign(array_name, _divided(words), line, joined)
                    words, array_name = [], ""
                elif kind == "end" and not array_name:
                    self._carry_out(words, line, joined)
                    words, joined = [], found[0] if found[0] in ("&&", "||") else ""
            else:
                piece = self._text[found.start()] if kind == "plain" else self._piece(found, line)
                current = (current or "") + (piece or _EMPTY * (kind in ("single", "double")))
            line += found[0].count("\n") if kind != "plain" else 0
        if place < len(self._text):
            raise UserError(f"line {line}: a quote begins here and does not end")
        self._carry_out([*words, *([] if current is None else [current])], line, joined)

    def _piece(self, found: re.Match[str], line: int) -> str:
        """Return a part of a word, outside of double quotes or inside."""
        parts = found.groupdict()
        if parts.get("double") is not None:
            return "".join(self._piece(inner, line) for inner in _IN_QUOTES.finditer(parts["double"]))
        if parts["computed"]:
            return self._mark(line, _shown(parts["computed"]), "is computed by the shell")
        if parts["variable"]:
            separator = _BREAK if "[@]" in parts["variable"] or found.re is _TOKEN else " "
            value = separator.join(self._value(parts["variable"], line))
            return value if found.re is _IN_QUOTES else re.sub(r"\s+", _BREAK, value)
        if parts["space"]:
            return " "
        return parts["escaped"] or parts["plain"] or parts.get("single") or ""

    def _value(self, variable: str, line: int) -> list[str]:
        """Return the value of a variable, whose name stands after $."""
        name = variable[1:-1] if variable.startswith("{") else variable
        found = _PARAMETER.fullmatch(name)
        if found and found[1] in self._variables:
            value = self._variables[found[1]]
            return value if found["all"] else value[:1]
        if found and found["default"] is not None:
            default = found["default"].strip("'\"")
            return ["".join(self._piece(inner, line) for inner in _IN_QUOTES.finditer(default))]
        is_argument = name[0].isdigit() or name in "@*#"
        source = "is given when the script is called" if is_argument else "is not set in the file"
        return [self._mark(line, f"${variable}", source)]

    def _mark(self, line: int, what: str, why: str) -> str:
        advice = "keep the lines that hold, without the condition" if why == _DEPENDS else "write its value"
        self._unread.append(f"line {line}: {what} {why}; {advice}")
        return f"\ue000{len(self._unread) - 1}\ue001"

    def _carry_out(self, words: list[str], line: int, joined: str) -> None:
        """Carry out the assignments at the beginning of a command, and keep its other words."""
        if joined and self._tests:
            self._branches[-1] = _both(self._branches[-1], joined, self._holds(words))
        while words and words[0] in (*_OPENING, *_CLOSING, *_BETWEEN, *_BEFORE):
            self._enter(words)
            words = words[1:]
        if False in self._branches:
            return
        while words and (found := _ASSIGNMENT.fullmatch(words[0])):
            self._assign(words[0], [found[3].replace(_BREAK, " ").replace(_EMPTY, "")], line, joined)
            words = words[1:]
        if words:
            self._commands.append(_divided(words))

    def _enter(self, words: list[str]) -> None:
        """Note where a condition, its branches, a loop or a function begin and end."""
        self._tests = words[0] == "if"
        if words[0] in _OPENING:
            self._branches.append(self._holds(words[1:]) if words[0] == "if" else None)
        elif words[0] in _CLOSING and self._branches:
            self._branches.pop()
        elif words[0] in ("else", "elif") and self._branches:
            before = self._branches[-1]
            holds = self._holds(words[1:]) if words[0] == "elif" else True
            self._branches[-1] = False if before else None if before is None else holds
            self._tests = words[0] == "elif" and before is False

    def _holds(self, words: list[str]) -> bool | None:
        """Return whether a test of one comparison holds; None: not known."""
        if not words or words[0] not in ("[", "[[") or any(map(self.why_unread, words)):
            return None
        match words[1:-1]:
            case ["-n" | "-z" as test, *text]:
                return bool("".join(text)) == (test == "-n")
            case [left, "=" | "==", right]:
                return left == right
            case [left, "!=", right]:
                return left != right
            case [left, test, right] if test in _COMPARISONS and left.isdecimal() and right.isdecimal():
                return bool(_COMPARISONS[test](int(left), int(right)))
        return None

    def _assign(self, assignment: str, value: list[str], line: int, joined: str) -> None:
        found = _ASSIGNMENT.fullmatch(assignment)
        assert found is not None
        if False in self._branches:
            return
        if joined or None in self._branches:
            value = [self._mark(line, f"the value of {found[1]}", _DEPENDS)]
        before = self._variables.get(found[1], []) if found[2] else []
        is_text = not found[3].startswith("(") and len(before) == len(value) == 1
        self._variables[found[1]] = [before[0] + value[0]] if is_text else [*before, *value]


def _both(first: bool | None, operator: str, second: bool | None) -> bool | None:
    """Return whether two conditions hold that "&&" or "||" joins; None: not known."""
    decides = operator == "||"
    if decides in (first, second):
        return decides
    return None if None in (first, second) else not decides


def options(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each option, with underscores, and the words that follow it."""
    name, values = "", list[str]()
    for word in words:
        if name and (_is_option(word) or _is_program(word)):
            yield name, values
            name = ""
        if _is_option(word):
            name, _, value = word[2:].partition("=")
            name, values = name.replace("-", "_"), [value] if value else []
        elif name:
            values.append(word.strip("'\""))
    if name:
        yield name, values


def _is_option(word: str) -> bool:
    return word.startswith("--") and len(word) > 2


def _may_be_option(word: str) -> bool:
    return _is_option(word) or _MARK.match(word) is not None


def _is_program(word: str) -> bool:
    return word.endswith(".py")


def _divided(words: Sequence[str]) -> list[str]:
    return [part.replace(_EMPTY, "") for word in words for part in word.split(_BREAK) if part]


def _shown(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:37]}..."
