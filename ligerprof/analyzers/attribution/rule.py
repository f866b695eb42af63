"""One rule of attribution: the conditions under which a block has a role."""

import re
from dataclasses import KW_ONLY, dataclass
from functools import cache, lru_cache

from ligerprof.analyzers.attribution.features import BlockFeatures, Feature
from ligerprof.roles import Phase, Role


@dataclass(frozen=True, slots=True)
class Rule:
    """A role for the blocks that meet every condition.

    Attributes:
        phases: any of these phases; empty allows any, also an unknown one.
        stack: pattern searched in the Python calls; `^` and `$` match at each line.
        inner: pattern searched in the Python calls below the innermost call of a module, which leaves out the wrappers
            whose forward method called the model.
        native: pattern searched in the C++ functions.
        node: pattern searched in the name of the autograd node.
        has: all of these features.
        has_one: at least one of these features; empty allows any.
        lacks: none of these features.
    """

    role: Role
    phases: tuple[Phase, ...] = ()
    _: KW_ONLY
    stack: str = ""
    inner: str = ""
    native: str = ""
    node: str = ""
    has: tuple[Feature, ...] = ()
    has_one: tuple[Feature, ...] = ()
    lacks: tuple[Feature, ...] = ()

    def matches(self, block: BlockFeatures) -> bool:
        """Whether all conditions hold."""
        return (
            (not self.phases or block.phase in self.phases)
            and block.features.issuperset(self.has)
            and (not self.has_one or not block.features.isdisjoint(self.has_one))
            and block.features.isdisjoint(self.lacks)
            and all(
                not pattern or _occurs(pattern, text)
                for pattern, text in (
                    (self.stack, block.stack),
                    (self.inner, block.inner_stack),
                    (self.native, block.native),
                    (self.node, block.node),
                )
            )
        )


# a recording has few stacks, and each is matched with the same patterns for thousands of blocks
@lru_cache(maxsize=20_000)
def _occurs(pattern: str, text: str) -> bool:
    return _compiled(pattern).search(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    # re's own cache is checked in Python
    return re.compile(pattern, re.MULTILINE)
