"""The policy of `--selective`: a name, operators, or a file that lists operators."""

from pathlib import Path
from typing import Any

from ligerprof.errors import RecipeError
from ligerprof.files import FileKind, is_file, read_listed
from ligerprof.text import short_repr
from ligerprof.torch_memory.saved_tensors import NAMES, SavePolicy, find_policy, policy_text

_HINT = "--selective names a policy or a file with one operator per line."
_FILE = FileKind(error=RecipeError, hint=_HINT, max_bytes=2**16)


def canonical_policy(value: Any) -> str:
    """A policy as a recipe stores it: a name, or operators joined by `+`.

    A file has one operator per line, such as `aten.mm.default`, or `aten.mm.default/2` to keep the first of each two
    calls; `#` starts a comment. `find_policy` says what else may follow.

    Raises:
        RecipeError: not a policy, or a file that cannot be read.
    """
    text = str(value)
    if text.partition("-")[0] in NAMES and not is_file(text):
        _read(text, "")
        return text
    if is_file(text):
        operators, where = read_listed(Path(text), _FILE), f"{text}: "
    else:
        operators, where = text.split("+"), ""
    if not operators:
        raise RecipeError(f"{where}names no operator. {_HINT}")
    return policy_text(_read("+".join(operators), where))


def _read(text: str, where: str) -> SavePolicy:
    try:
        return find_policy(text)
    except ValueError as error:
        raise RecipeError(
            f"{where}{short_repr(str(error))} is neither a file nor an operator such as aten.mm.default."
            f" Known policies: {', '.join(NAMES)}."
        ) from None
