"""Split shell text into simple commands, without running anything: variables that the text sets are filled in."""

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ligerprof.errors import RecipeError

_LONGEST = 60
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


def computed(expression: str) -> str | None:
    """The value of sums, products and quotients of whole numbers; None for any other expression."""
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body)) if len(expression) <= _LONGEST else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _value(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("not an arithmetic expression of whole numbers")


# what stays in a word because only a shell that runs can fill it in: $NAME, ${NAME}, $(command), `command`
OPEN = re.compile(r"\$(?:\w+|[#?!$-]|\{[^{}]*\}|\(.*?\)+)|`[^`]*`")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"\$(?:(\w+)|([*@])|\{([^{}]*)\})")
_BRACED = re.compile(r"([A-Za-z_]\w*|\d+|[*@])(\[[*@]\])?(?::?([-=])(.*))?", flags=re.DOTALL)
_HEREDOC = re.compile(r"<<(-?)\s*(['\"]?)(\w+)\2")
_REDIRECTION = re.compile(r"&?(?:>>|>&|<&|>\||<>|>|<)\s*")
_OPENING = frozenset({"if", "for", "while", "until", "case", "select"})
_CLOSING = frozenset({"fi", "done", "esac"})
_LOOPS = frozenset({"for", "select"})
_LEADING = frozenset({"then", "do", "else", "elif", "!", "{", *_OPENING})
_EXPORTING = frozenset({"export", "declare", "local", "readonly", "typeset"})
_ENDS = frozenset("\n;&|()")
# words, in which parts that are not known may contain blanks
_PIECES = re.compile(rf"(?:{OPEN.pattern}|\S)+")
_NAME = re.compile(r"\$?\b([A-Za-z_]\w*)\b|\$\{(\w+)\}")
_COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#.*$")
_MOST_EXPANDED = 2**20
_ARGUMENT = re.compile(r"\$\{?[1-9]")


class _Kind(Enum):
    """What an expansion gives: a text, a list of words, or what only a running shell knows."""

    TEXT = "text"
    LIST = "list"
    OPEN = "open"


@dataclass(frozen=True, kw_only=True, slots=True)
class SimpleCommand:
    """A command with the variables that are set where it runs.

    Attributes:
        words: the command and its arguments; parts that only a running shell fills in are left as written.
        environment: variables by name.
    """

    words: tuple[str, ...]
    environment: Mapping[str, str]


def simple_commands(text: str, environment: Mapping[str, str]) -> list[SimpleCommand]:
    """The commands of a shell text in order, with its own variables and those of `environment` filled in.

    A variable that the text sets under a condition or in a loop is left as written.

    Raises:
        RecipeError: nested too deep, or variables that expand to too much.
    """
    try:
        return list(_Script(text, environment).commands())
    except RecursionError:
        raise RecipeError("a shell text is nested too deep.") from None


@dataclass
class _Word:
    """A word while it is read; None is a word that has not begun."""

    text: str | None = None
    # a redirection takes the next word
    is_dropped: bool = False

    def add(self, text: str) -> None:
        self.text = (self.text or "") + text


@dataclass
class _Script:
    text: str
    environment: Mapping[str, str]
    _at: int = 0
    _depth: int = 0
    _set: dict[str, list[str] | None] = field(default_factory=dict)
    _words: list[str] = field(default_factory=list)
    _word: _Word = field(default_factory=_Word)
    _heredocs: list[str] = field(default_factory=list)
    _expanded: int = 0

    def commands(self) -> Iterator[SimpleCommand]:
        before = ""
        while self._at < len(self.text):
            if self.text[self._at] in _ENDS and not self._starts_array():
                end = self._operator()
                yield from self._ended(is_conditional=before in ("&&", "||"))
                before = end
            else:
                self._step()
        yield from self._ended(is_conditional=before in ("&&", "||"))

    def _operator(self) -> str:
        """Go past the end of a command, and past the bodies of here-documents."""
        two = self.text[self._at : self._at + 2]
        operator = two if two in ("&&", "||", ";;") else self.text[self._at]
        self._at += len(operator)
        if operator == "\n":
            for delimiter in self._heredocs:
                body = re.compile(rf"^\s*{re.escape(delimiter)}$", flags=re.MULTILINE).search(self.text, self._at)
                self._at = len(self.text) if body is None else body.end()
            self._heredocs.clear()
        return operator

    def _starts_array(self) -> bool:
        """Whether the next character opens the list of `NAME=(…)`, or belongs to a redirection such as `&>`."""
        rest = self.text[self._at : self._at + 3]
        if rest[0] == "(":
            return self._word.text is not None and _ASSIGNMENT.fullmatch(self._word.text) is not None
        return rest.startswith("&>")

    def _step(self) -> None:
        """Read the next part of a word."""
        text, at = self.text, self._at
        char = text[at]
        if char == "\\":
            self._at += 3 if text.startswith("\\\r\n", at) else 2
            if text[at + 1 : at + 2] not in ("\n", "\r", ""):
                self._word.add(text[at + 1])
        elif char == "'":
            end = self._closing("'", at + 1)
            self._word.add(text[at + 1 : end])
            self._at = end + 1
        elif char == '"':
            self._at += 1
            self._quoted()
        elif char in " \t\r":
            self._at += 1
            self._end_word()
        elif char == "#" and self._word.text is None:
            end = text.find("\n", at)
            self._at = len(text) if end < 0 else end
        elif char == "(":
            self._array()
        elif char in "<>&":
            self._redirection()
        elif char in "$`":
            self._unquoted()
        else:
            self._word.add(char)
            self._at += 1

    def _closing(self, mark: str, at: int) -> int:
        end = self.text.find(mark, at)
        return len(self.text) if end < 0 else end

    def _quoted(self) -> None:
        """The rest of a text in double quotes; a list in it makes words of its own, an empty one none."""
        begins, is_empty_list = self._word.text is None, False
        self._word.add("")
        while self._at < len(self.text) and self.text[self._at] != '"':
            char, following = self.text[self._at], self.text[self._at + 1 : self._at + 2]
            if char == "\\" and following and following in '\\"$`\n':
                self._word.add("" if following == "\n" else following)
                self._at += 2
            elif char in "$`":
                kind, parts = self._expansion()
                is_empty_list = kind is _Kind.LIST and not parts
                self._add_words(parts if kind is _Kind.LIST else [" ".join(parts)])
            else:
                self._word.add(char)
                self._at += 1
        self._at += 1
        if begins and is_empty_list and self._word.text == "":
            self._word.text = None

    def _unquoted(self) -> None:
        """An expansion outside quotes, which blanks split into words."""
        kind, parts = self._expansion()
        joined = " ".join(parts)
        if kind is _Kind.OPEN:
            self._word.add(joined)
            return
        if joined[:1].isspace():
            self._end_word()
        self._add_words(_PIECES.findall(joined))

    def _add_words(self, parts: Sequence[str]) -> None:
        for place, part in enumerate(parts):
            if place:
                self._end_word()
            self._word.add(part)
            self._expanded += len(part) + 1
        if self._expanded > _MOST_EXPANDED:
            raise RecipeError(f"the variables of a shell text expand to more than {_MOST_EXPANDED} characters.")

    def _expansion(self) -> "tuple[_Kind, list[str]]":
        """Read `$…` or backquotes: its text, as written if it is not known."""
        text, at = self.text, self._at
        if text.startswith("$((", at) and (end := self._parenthesis(at + 1)) < len(text):
            self._at = end + 1
            inner = _NAME.sub(self._number, text[at + 3 : end - 1])
            value = computed(inner)
            return (_Kind.OPEN, [f"$(({inner}))"]) if value is None else (_Kind.TEXT, [value])
        if text[at] == "`" or text.startswith("$(", at):
            end = self._closing("`", at + 1) if text[at] == "`" else self._parenthesis(at + 1)
            self._at = end + 1
            return _Kind.OPEN, [text[at : end + 1]]
        found = _PLAIN.match(text, at)
        if found is None:
            self._at += 1
            return _Kind.TEXT, [text[at]]
        self._at = found.end()
        if found[3] is None:
            return self._value(found[1] or found[2], found[0])
        return self._braced(found[3], found[0])

    def _number(self, found: re.Match[str]) -> str:
        return " ".join(self._value(found[1] or found[2], found[0])[1])

    def _parenthesis(self, at: int) -> int:
        depth = 0
        while at < len(self.text):
            depth += {"(": 1, ")": -1}.get(self.text[at], 0)
            if depth == 0:
                return at
            at += 1
        return at

    def _braced(self, inner: str, written: str) -> "tuple[_Kind, list[str]]":
        """`${NAME}`, `${NAME[@]}` and `${NAME:-default}`; other forms stay as written."""
        found = _BRACED.fullmatch(inner)
        if found is None:
            return _Kind.OPEN, [written]
        name, is_list, operator, default = found.groups()
        if operator is not None and self._is_unset(name):
            return _Kind.TEXT, [" ".join(self._inner_words(default))]
        kind, value = self._value(name, written)
        return (_Kind.LIST if kind is not _Kind.OPEN and is_list else kind), value

    def _is_unset(self, name: str) -> bool:
        return name not in self._set and name not in self.environment

    def _value(self, name: str, written: str) -> "tuple[_Kind, list[str]]":
        """The value of a variable; as written if it is not known."""
        if name in "*@":
            return _Kind.LIST, self.environment.get("@", "").split()
        value = self._set[name] if name in self._set else _listed(self.environment.get(name))
        return (_Kind.OPEN, [written]) if value is None else (_Kind.TEXT, value)

    def _array(self) -> None:
        """The list of `NAME=(…)`."""
        end = self._parenthesis(self._at)
        inner = _COMMENT.sub("", self.text[self._at + 1 : end])
        self._assign(self._word.text or "", self._inner_words(inner), is_conditional=self._depth > 0)
        self._word = _Word()
        self._at = end + 1

    def _inner_words(self, text: str) -> list[str]:
        inner = simple_commands("x " + text.replace("\n", " "), {**self.environment, **self._texts()})
        return list(inner[0].words[1:]) if inner else []

    def _redirection(self) -> None:
        heredoc = _HEREDOC.match(self.text, self._at)
        if heredoc is not None:
            self._heredocs.append(heredoc[3])
            self._at = heredoc.end()
            return
        if (self._word.text or "").isdecimal():
            self._word = _Word()
        self._end_word()
        found = _REDIRECTION.match(self.text, self._at)
        self._at = found.end() if found is not None else self._at + 1
        self._word.is_dropped = True

    def _end_word(self) -> None:
        if self._word.text is not None:
            if not self._word.is_dropped:
                self._words.append(self._word.text)
            self._word = _Word()

    def _ended(self, *, is_conditional: bool) -> Iterator[SimpleCommand]:
        self._end_word()
        self._word = _Word()
        words, self._words = self._words, []
        while words and words[0] in _LEADING:
            self._depth += words[0] in _OPENING
            if words[0] in _LOOPS and len(words) > 1:
                self._set[words[1]] = None
            words = words[1:]
        if words and words[0] in _CLOSING:
            self._depth = max(self._depth - 1, 0)
            words = words[1:]
        if words and words[0] in _EXPORTING:
            words = [word for word in words[1:] if _ASSIGNMENT.match(word)]
        own = []
        while words and _ASSIGNMENT.match(words[0]):
            own.append(words[0])
            words = words[1:]
        if words:
            prefix = {name: value for name, _, value in (word.partition("=") for word in own)}
            yield SimpleCommand(words=tuple(words), environment={**self.environment, **self._texts(), **prefix})
        else:
            for word in own:
                self._assign(word, None, is_conditional=is_conditional or self._depth > 0)

    def _assign(self, word: str, items: list[str] | None, *, is_conditional: bool) -> None:
        found = _ASSIGNMENT.match(word)
        assert found is not None
        name, adds = found[1], found[2]
        if is_conditional and _ARGUMENT.search(word[found.end() :]):
            # for a script that is given arguments
            return
        value = [word[found.end() :]] if items is None else items
        old = self._set.get(name, [self.environment.get(name, "")])
        if adds and old is not None:
            value = [*old, *value] if items is not None else ["".join((*old, *value))]
        is_known = not is_conditional or (name in self._set and self._set[name] == value)
        self._set[name] = value if is_known and not (adds and old is None) else None

    def _texts(self) -> dict[str, str]:
        return {name: " ".join(value) for name, value in self._set.items() if value is not None}


def _listed(text: str | None) -> list[str] | None:
    return None if text is None else [text]


_NUMBER = re.compile(r"[+-]?(?:\d+|(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?)")
_OPTION = re.compile(r"--?[A-Za-z]")
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a program.

    Attributes:
        values: by key, with underscores.
        positional: arguments without a key.
    """

    values: Mapping[str, Any]
    positional: tuple[str, ...]


def read_arguments(words: Sequence[str]) -> Arguments:
    """Group words by their keys; a key without a value is a switch, several values are a list, the last one wins."""
    values: dict[str, Any] = {}
    positional: list[str] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _OPTION.match(word):
            positional.append(word)
            continue
        key, equals, first = word.lstrip("-").partition("=")
        given = [first] if equals else []
        while not equals and place < len(words) and not _OPTION.match(words[place]) and words[place] != "--":
            # a variable after a value may hold further arguments
            (positional if given and OPEN.fullmatch(words[place]) else given).append(words[place])
            place += 1
        found = [scalar(each) for each in given]
        values[key.replace("-", "_")] = True if not found else found[0] if len(found) == 1 else found
    return Arguments(values=values, positional=tuple(positional))


def negated(values: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The values with `no_flag` as `flag: false`, where that is the key that is known."""

    def is_negation(key: str) -> bool:
        return key.startswith("no_") and key not in known and key.removeprefix("no_") in known

    return {
        key.removeprefix("no_") if is_negation(key) else key: False if is_negation(key) else value
        for key, value in values.items()
    }


def scalar(text: str) -> Any:
    """A value as a configuration file has it: a number, true, false, null, or the text."""
    if _NUMBER.fullmatch(text) and len(text) < 20:
        return int(text) if text.lstrip("+-").isdecimal() else float(text)
    if text == "null":
        return None
    return _TRUTHS.get(text.lower(), text)
