"""Read a user's rules for roles, which take precedence over the built-in rules."""

from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ligerprof.analyzers.attribution.features import BlockFeatures
from ligerprof.errors import RulesError
from ligerprof.files import FileKind, parse_json, parse_toml, read_text
from ligerprof.roles import Phase, Role

_FILE = FileKind(error=RulesError, hint="See docs/roles.md.", max_bytes=2**20)
_LONGEST_PATTERN = 500
_MOST_RULES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class UserRule:
    """A role for the blocks that meet every given condition.

    Conditions are shell patterns (`*`, `?`, `[a-z]`) for a whole name. Unlike regular expressions,
    they match in time proportional to the text for any pattern.

    Attributes:
        frame: pattern for any Python call of the stack, as `path/file.py:function`.
        phase: the phase that allocated the block.
    """

    role: Role
    module: str = ""
    frame: str = ""
    node: str = ""
    phase: Phase | None = None

    def matches(self, block: BlockFeatures) -> bool:
        """Whether all conditions hold."""
        return (
            (self.phase is None or block.phase is self.phase)
            and (not self.module or fnmatchcase(block.module, self.module))
            and (not self.node or fnmatchcase(block.node, self.node))
            and (not self.frame or any(fnmatchcase(call, self.frame) for call in block.stack.split("\n")))
        )


_KEYS = tuple(each.name for each in fields(UserRule))


def read_rules(path: str | Path) -> tuple[UserRule, ...]:
    """Read a file of rules: JSON if its name ends in `.json`, else TOML.

    Raises:
        RulesError: the file cannot be read, or something in it is not a rule.
    """
    file = Path(path)
    text = read_text(file, _FILE)
    parse = parse_json if file.suffix == ".json" else parse_toml
    values = parse(text, str(file), _FILE)
    rules = values.get("rule") if isinstance(values, dict) else None
    if not isinstance(rules, list) or not 0 < len(rules) <= _MOST_RULES:
        raise RulesError(f"{file}: needs a list `rule` of 1 to {_MOST_RULES} rules. See docs/roles.md.")
    return tuple(_rule(entry, f"{file}: rule {number}") for number, entry in enumerate(rules, 1))


def _rule(entry: Any, where: str) -> UserRule:
    if not isinstance(entry, dict) or not {"role"} < entry.keys() <= set(_KEYS):
        raise RulesError(f"{where}: needs `role` and at least one of {', '.join(_KEYS[1:])}, and nothing else.")
    for key, value in entry.items():
        if not isinstance(value, str) or not 0 < len(value) <= _LONGEST_PATTERN:
            raise RulesError(f"{where}: `{key}` must be a text of 1 to {_LONGEST_PATTERN} characters.")
    words = {key: value for key, value in entry.items() if key not in ("role", "phase")}
    phase = _word(Phase, entry["phase"], where) if "phase" in entry else None
    return UserRule(role=_word(Role, entry["role"], where), phase=phase, **words)


def _word(kind: Any, word: str, where: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        known = ", ".join(each.value for each in kind)
        raise RulesError(f"{where}: unknown {kind.__name__.lower()} {word!r:.60}. Known: {known}.") from None
