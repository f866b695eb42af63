"""What our recorders add to a snapshot: each event's stamp (step, phase, module), and tensors that autograd saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ligerprof.errors import SnapshotFormatError
from ligerprof.roles import Phase
from ligerprof.snapshots.trace import ADDRESS_LIMIT, SIZE_LIMIT
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
    def parse(cls, text: object) -> "Stamp | None":
        """Read `user_metadata`; None if it is not the text of a stamp."""
        parts = text.split(";") if isinstance(text, str) else []
        if len(parts) not in (5, 6) or parts[0] != _MARK or (step := whole_number(parts[1])) is None:
            return None
        try:
            phase = Phase(parts[2])
        except ValueError:
            return None
        module, node = printable(parts[3]), printable(parts[4])
        return cls(step=step, phase=phase, module=module, node=node, recompute=len(parts) == 6)


KEY = "ligerprof"
_TIME_LIMIT_US = 2**62
_DEVICE_LIMIT = 2**16


class SavedTensor(NamedTuple):
    """A storage that an autograd node had saved at some time.

    Attributes:
        time_us: by the clock of the snapshot's events.
        address: of the storage, the block's address.
        size_bytes: of the storage up to the tensor's end; the block's request is not smaller.
        node: the node that saved it (`MulBackward0`).
        module: dotted name of the node's module.
        operation: what computed it (`silu`), "" if not known.
    """

    time_us: int
    device: int
    address: int
    size_bytes: int
    node: str
    module: str
    operation: str


_LIMITS = {"time_us": _TIME_LIMIT_US, "device": _DEVICE_LIMIT, "address": ADDRESS_LIMIT, "size_bytes": SIZE_LIMIT}
_NAMES = ("node", "module", "operation")


def with_saved_tensors(
    snapshot: Mapping[str, Any], rows: Sequence[SavedTensor], phase_peaks: Mapping[Phase, int] | None = None
) -> dict[str, Any]:
    """A snapshot's dict with saved tensors: columns of numbers, and each name once.

    Args:
        phase_peaks: allocated bytes that a phase reached at least, in events that the snapshot leaves out.
    """
    numbers: dict[str, int] = {}
    columns: dict[str, list[int]] = {key: [getattr(row, key) for row in rows] for key in _LIMITS}
    for key in _NAMES:
        columns[key] = [numbers.setdefault(getattr(row, key), len(numbers)) for row in rows]
    ours: dict[str, Any] = {"saved_tensors": {**columns, "names": list(numbers)}}
    if phase_peaks:
        ours["phase_peaks"] = {phase.value: size_bytes for phase, size_bytes in phase_peaks.items()}
    return {**snapshot, KEY: ours}


def phase_peaks_of(values: Mapping[str, Any], source: str) -> Mapping[Phase, int]:
    """Read the peaks of phases in events that a snapshot leaves out; errors as of `saved_tensors_of`."""
    ours = values.get(KEY)
    table = ours.get("phase_peaks") if isinstance(ours, dict) else None
    if table is None:
        return {}
    known = {phase.value for phase in Phase}
    if not isinstance(table, dict) or not known.issuperset(table) or not {int}.issuperset(map(type, table.values())):
        raise _damaged(source)
    if not all(0 <= size_bytes < SIZE_LIMIT for size_bytes in table.values()):
        raise _damaged(source)
    return {Phase(word): size_bytes for word, size_bytes in table.items()}


def saved_tensors_of(values: Mapping[str, Any], source: str) -> Sequence[SavedTensor]:
    """Read the saved tensors of a snapshot's dict; empty if it has none.

    Raises:
        SnapshotFormatError: what the snapshot has under `KEY` has another shape.
    """
    ours = values.get(KEY)
    table = ours.get("saved_tensors") if isinstance(ours, dict) else None
    if table is None:
        return ()
    if not isinstance(table, dict):
        raise _damaged(source)
    names = table.get("names")
    if not isinstance(names, list) or not {str}.issuperset(map(type, names)):
        raise _damaged(source)
    names = [printable(name) for name in names]
    columns = [_column(table, key, _LIMITS.get(key, len(names)), source) for key in (*_LIMITS, *_NAMES)]
    if len(set(map(len, columns))) != 1:
        raise _damaged(source)
    numbers, texts = columns[: len(_LIMITS)], columns[len(_LIMITS) :]
    return [SavedTensor(*row[:4], *(names[index] for index in row[4:])) for row in zip(*numbers, *texts, strict=True)]


def _column(table: Mapping[str, Any], key: str, limit: int, source: str) -> list[int]:
    column = table.get(key)
    if not isinstance(column, list) or not {int}.issuperset(map(type, column)):
        raise _damaged(source)
    if column and not (min(column) >= 0 and max(column) < limit):
        raise _damaged(source)
    return column


def _damaged(source: str) -> SnapshotFormatError:
    return SnapshotFormatError(f"{source}: '{KEY}' is not what a recorder of ligerprof writes. Was the file damaged?")
