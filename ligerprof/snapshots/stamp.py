"""The stamp that our recorders attach to each allocator event: step, phase and module as text."""

from dataclasses import dataclass

from ligerprof.roles import Phase
from ligerprof.text import printable, whole_number

_MARK = "ligerprof"
RECOMPUTE = ";recompute"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stamp:
    """Where in training an allocator event happened.

    Attributes:
        step: 0 for the build, then the training step, counted from 1.
        module: dotted name of the module that ran, "" for the model itself.
        node: autograd node in backward (`MmBackward0`), else "".
        recompute: whether backward was recomputing a checkpointed forward pass.
    """

    step: int
    phase: Phase
    module: str = ""
    node: str = ""
    recompute: bool = False

    def to_text(self) -> str:
        """The stamp as `user_metadata` of a snapshot event."""
        tail = RECOMPUTE if self.recompute else ""
        return f"{self.prefix(step=self.step, phase=self.phase)}{self.module};{self.node}{tail}"

    @staticmethod
    def prefix(*, step: int, phase: Phase) -> str:
        """The part of the text that precedes `module;node`, followed by `RECOMPUTE` if backward recomputes."""
        return f"{_MARK};{step};{phase.value};"

    @classmethod
    def parse(cls, text: str) -> "Stamp | None":
        """Read `user_metadata`; None if the text is not a stamp."""
        parts = text.split(";")
        if len(parts) not in (5, 6) or parts[0] != _MARK or (step := whole_number(parts[1])) is None:
            return None
        try:
            phase = Phase(parts[2])
        except ValueError:
            return None
        module, node = printable(parts[3]), printable(parts[4])
        return cls(step=step, phase=phase, module=module, node=node, recompute=len(parts) == 6)
