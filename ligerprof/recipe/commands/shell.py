"""Take training commands apart without running anything: shell text, its commands, their launchers and arguments.

Variables that the text sets are filled in. A launcher decides the number of processes.
"""

import ast
import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import PurePath
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
    """A command and the variables where it runs; parts of words that only a running shell fills in are as written."""

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
        if operator is not None and name not in self._set and name not in self.environment:
            return _Kind.TEXT, [" ".join(self._inner_words(default))]
        kind, value = self._value(name, written)
        return (_Kind.LIST if kind is not _Kind.OPEN and is_list else kind), value

    def _value(self, name: str, written: str) -> "tuple[_Kind, list[str]]":
        """The value of a variable; as written if it is not known."""
        if name in "*@":
            return _Kind.LIST, self.environment.get("@", "").split()
        text = self.environment.get(name)
        value = self._set.get(name, None if text is None else [text])
        return (_Kind.OPEN, [written]) if value is None else (_Kind.TEXT, value)

    def _array(self) -> None:
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


_NUMBER = re.compile(r"[+-]?(?:\d+|(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?)")
OPTION = re.compile(r"--?[A-Za-z]")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=")
_TRUTHS = {"true": True, "false": False}


@dataclass(frozen=True, kw_only=True, slots=True)
class Arguments:
    """The arguments of a program: those with a key, whose hyphens are underscores, and the others."""

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
        if not OPTION.match(word):
            positional.append(word)
            continue
        key, equals, first = word.lstrip("-").partition("=")
        given = [first] if equals else []
        while not equals and place < len(words) and not OPTION.match(words[place]) and words[place] != "--":
            # a variable after a value may hold further arguments
            (positional if given and OPEN.fullmatch(words[place]) else given).append(words[place])
            place += 1
        found = [scalar(each) for each in given]
        values[key.replace("-", "_")] = True if not found else found[0] if len(found) == 1 else found
    return Arguments(values=values, positional=tuple(positional))


def split_variables(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables in front of a command, and the command."""
    given, rest = {}, list(words)
    while rest and _VARIABLE.match(rest[0]):
        name, _, given[name] = rest.pop(0).partition("=")
    return given, rest


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


# commands that run the rest of their line; their own options may take values
_WRAPPER_NAMES = (
    "env sudo nohup time exec command nice ionice numactl stdbuf timeout srun uv poetry pdm pipenv conda mamba hatch"
    " singularity apptainer docker podman nsys ncu unbuffer setsid taskset chrt ligerprof py-spy viztracer"
)
_WRAPPERS = frozenset(_WRAPPER_NAMES.split())
_ONE_PROCESS_EACH = frozenset({"srun"})
_TORCHRUN = frozenset({"torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic.run"})
# options of launchers that take no value, with underscores in place of hyphens
_SWITCH_NAMES = (
    "standalone m module no_python run_path use_env virtual_local_rank quiet q cpu multi_gpu tpu enable_cpu_affinity"
    " dynamo_use_fullgraph dynamo_use_dynamic dynamo_use_regional_compilation use_deepspeed use_fsdp use_xpu"
    " use_parallelism_config use_megatron_lm same_network tpu_cluster no_tpu_cluster tpu_use_sudo downcast_bf16"
    " fp8_use_autocast_during_eval debug ipex no_local_rank no_ssh no_ssh_check force_multi bind_cores_to_rank"
    " use_torchrun"
)
_SWITCHES = frozenset(_SWITCH_NAMES.split())
_PYTHON_SWITCHES = frozenset(("-u", "-O", "-OO", "-B", "-E", "-I", "-s", "-S", "-v", "-q", "-d", "-x", "-b", "-P"))
_ACCELERATE_TYPES = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "use_megatron_lm": "MEGATRON_LM"}
# starts of the names of options that stand in a section of accelerate's file
_SECTIONS = {
    "fsdp_": "fsdp_config",
    "parallelism_config_": "parallelism_config",
    "megatron_lm_": "megatron_lm_config",
    "fp8_": "fp8_config",
}
_OF_DEEPSPEED = ("deepspeed_", "zero", "offload_", "gradient_")


@dataclass(kw_only=True)
class Launch:
    """A program and how it is launched.

    Attributes:
        program: the script, module or command, as typed.
        is_module: whether `program` is the name of a Python module.
        processes: number of processes with one GPU each; None if the command does not say it.
        launcher: the option or command that says it.
        open: what only a running shell knows of the number of processes, or an empty text.
        accelerate: keys of accelerate's file that the command sets.
        accelerate_file: accelerate's file, or None.
    """

    program: str
    words: list[str]
    is_module: bool = False
    processes: int | None = None
    launcher: str = ""
    open: str = ""
    accelerate: dict[str, Any] = field(default_factory=dict)
    accelerate_file: str | None = None
    uses_accelerate: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the program without its folder."""
        return PurePath(self.program).name


def find_launch(words: Sequence[str], environment: Mapping[str, str], is_start: Callable[[str], bool]) -> Launch | None:
    """The program that a command starts, without launchers; None if it is neither Python's nor passes `is_start`."""
    known = {
        "torchrun": _of_torchrun,
        "deepspeed": _of_deepspeed,
        "accelerate": _of_accelerate,
        "accelerate-launch": _of_accelerate,
    }

    def begins(word: str) -> bool:
        return _is_python(word) or word.endswith(".py") or PurePath(word).name in known or is_start(word)

    wrapped, words = "", list(words)
    if words and PurePath(words[0]).name in _WRAPPERS:
        start = next((place for place, word in enumerate(words) if place and begins(word)), len(words))
        assigned = (word.partition("=") for word in words[:start] if not word.startswith("-"))
        environment = {**environment, **{name: value for name, equals, value in assigned if equals}}
        wrapped, words = PurePath(words[0]).name, words[start:]
    if not words or not begins(words[0]):
        return None
    first = PurePath(words[0]).name
    if first in known:
        launch = known[first](words[1:], environment)
    elif _is_python(words[0]):
        launch = _of_python(words[1:], environment)
    else:
        launch = Launch(program=words[0], words=words[1:], launcher=words[0])
    if launch is None:
        return None
    if "--" in launch.words and not is_start(launch.program):
        # a script that submits the command after it
        inner = find_launch(launch.words[launch.words.index("--") + 1 :], environment, is_start)
        if inner is not None:
            return inner
    launch.environment = environment
    if wrapped in _ONE_PROCESS_EACH and launch.launcher == "python":
        launch.processes = None
    return launch


def has_launcher(words: Sequence[str]) -> bool:
    """Whether a command names a launcher of several processes, such as torchrun."""
    launch = find_launch(words, {}, lambda _: False)
    return launch is not None and launch.launcher != "python"


def visible_gpus(environment: Mapping[str, str]) -> int | None:
    """How many GPUs CUDA_VISIBLE_DEVICES shows; None if it is not set or not known."""
    text = environment.get("CUDA_VISIBLE_DEVICES", "")
    return len(_named_gpus(text)) or None if OPEN.search(text) is None else None


def _named_gpus(text: str) -> list[str]:
    return [name for name in text.split(",") if name.strip()]


def _is_python(word: str) -> bool:
    name = PurePath(word).name
    return name.startswith("python") and not name.removeprefix("python").strip("0123456789.w")


def _launcher_options(words: list[str]) -> tuple[dict[str, str | bool], list[str]]:
    """The options of a launcher by name, and the words from the program on."""
    found: dict[str, str | bool] = {}
    place = 0
    while place < len(words) and words[place].startswith("-") and words[place] != "--":
        name, equals, value = words[place].lstrip("-").partition("=")
        name = name.replace("-", "_")
        place += 1
        if equals:
            found[name] = value
        elif name in _SWITCHES:
            found[name] = True
        elif place < len(words):
            found[name] = words[place]
            place += 1
    return found, words[place + (words[place : place + 1] == ["--"]) :]


def _of_python(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    while words and (words[0] in _PYTHON_SWITCHES or words[0].startswith(("-X", "-W"))):
        words = words[2 if words[0] in ("-X", "-W") else 1 :]
    if words[:1] == ["-m"] and len(words) > 1:
        module, rest = words[1], words[2:]
        if module in _TORCHRUN:
            return _of_torchrun(rest, environment)
        if module in ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"):
            return _of_accelerate(rest, environment)
        if module in ("deepspeed.launcher.runner", "deepspeed"):
            return _of_deepspeed(rest, environment)
        return Launch(program=module, words=rest, is_module=True, processes=1, launcher="python")
    if not words or words[0].startswith("-"):
        return None
    return Launch(program=words[0], words=words[1:], processes=1, launcher="python")


def _started(options: Mapping[str, str | bool], words: list[str]) -> Launch | None:
    is_module = bool(options.get("m") or options.get("module"))
    if words and _is_python(words[0]):
        # torchrun --no-python python train.py
        return _of_python(words[1:], {})
    return Launch(program=words[0], words=words[1:], is_module=is_module) if words else None


def _times(launch: Launch, each: Any, nodes: Any, launcher: str, nodes_option: str) -> Launch:
    """Set the number of processes from those per node and the number of nodes."""
    low, _, high = str(nodes).partition(":")
    launch.launcher, launch.processes = launcher, None
    counts = (str(each), low if high in ("", low) else str(nodes))
    if all(count.isdecimal() for count in counts):
        launch.processes = int(counts[0]) * int(counts[1])
    elif still_open := [count for count in counts if OPEN.search(count) is not None or ":" in count]:
        launch.open = still_open[0]
        # the second option has the number of nodes
        launch.launcher = launcher if still_open[0] == counts[0] else nodes_option
    return launch


def _of_torchrun(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    options, rest = _launcher_options(words)
    launch = _started(options, rest)
    each = options.get("nproc_per_node", environment.get("PET_NPROC_PER_NODE", "1"))
    if each in ("gpu", "auto"):
        each = str(visible_gpus(environment) or each)
    nodes = options.get("nnodes", environment.get("PET_NNODES", "1"))
    return launch and _times(launch, each, nodes, "--nproc_per_node", "--nnodes")


def _of_deepspeed(words: list[str], environment: Mapping[str, str]) -> Launch | None:
    options, rest = _launcher_options(words)
    launch = _started(options, rest)
    chosen = str(options.get("include", options.get("i", "")))
    if launch is not None and ":" in chosen:
        # worker-0:0,1@worker-1:0,1
        launch.processes = sum(len(_named_gpus(node.partition(":")[2])) for node in chosen.split("@"))
        launch.launcher = "--include"
        launch.open = chosen if OPEN.search(chosen) is not None else ""
        return launch
    each = options.get("num_gpus", "" if "hostfile" in options else str(visible_gpus(environment) or ""))
    nodes = options.get("num_nodes", "" if "hostfile" in options or "H" in options else "1")
    return launch and _times(launch, each, nodes, "--num_gpus", "--num_nodes")


def _of_accelerate(words: list[str], _environment: Mapping[str, str]) -> Launch | None:
    if words[:1] == ["launch"]:
        words = words[1:]
    options, rest = _launcher_options(words)
    launch = _started(options, rest)
    if launch is None:
        return None
    launch.processes, launch.launcher, launch.uses_accelerate = None, "accelerate launch", True
    file = options.pop("config_file", None)
    launch.accelerate_file = str(file) if file else None
    keys = _accelerate_keys(options)
    if OPEN.search(str(keys.get("num_processes", ""))) is not None:
        launch.open, launch.launcher = str(keys.pop("num_processes")), "--num_processes"
    launch.accelerate = keys
    return launch


def _accelerate_keys(options: Mapping[str, str | bool]) -> dict[str, Any]:
    """The keys of accelerate's file that options of `accelerate launch` replace."""
    keys: dict[str, Any] = {}
    for name, value in options.items():
        kind = _ACCELERATE_TYPES.get(name)
        section = next((each for start, each in _SECTIONS.items() if name.startswith(start)), None)
        if kind is not None:
            keys["distributed_type"] = kind
        elif section is not None:
            keys.setdefault(section, {})[name] = scalar(str(value))
        elif name.startswith(_OF_DEEPSPEED):
            keys.setdefault("deepspeed_config", {})[name] = scalar(str(value))
        elif name == "cpu":
            keys["use_cpu"] = True
        elif name not in _SWITCHES or name == "downcast_bf16":
            keys[name] = scalar(str(value))
    if "multi_gpu" in options and "distributed_type" not in keys:
        keys["distributed_type"] = "MULTI_GPU"
    return keys
