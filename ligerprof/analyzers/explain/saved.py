"""Read the JSON of `ligerprof explain` back, as a baseline for `ligerprof diff`."""

from typing import Any

from ligerprof.analyzers.explain.groups import BlockGroup
from ligerprof.analyzers.explain.peak import PeakReport
from ligerprof.analyzers.result_reader import ResultReader
from ligerprof.errors import ResultFormatError
from ligerprof.roles import Backend, Phase, Role
from ligerprof.serialization import SCHEMA
from ligerprof.text import printable

_HINT = "Write it with `ligerprof explain --json`."
_MOST_BLOCKS = 1_000_000


def report_from_json(values: object, source: str) -> PeakReport:
    """The peak in the JSON of `explain`, with every value checked; suggestions, steps and failure are left out.

    Raises:
        ResultFormatError: it is not the JSON of `explain`, has an invalid value, or its roles do not add up.
    """
    result = ResultReader(values, source)
    if (result.get("schema"), result.get("kind")) != (SCHEMA, "peak"):
        raise ResultFormatError(f"{source}: not a peak of schema {SCHEMA}. {_HINT}")
    figures = result.figures(Backend.SNAPSHOT)
    if figures.roles.total_bytes != figures.peak_bytes:
        raise ResultFormatError(f"{source}: the roles do not add up to the peak. {_HINT}")
    entries = result.get("blocks")
    if not isinstance(entries, list) or len(entries) > _MOST_BLOCKS:
        raise ResultFormatError(f"{source}: 'blocks' is missing or not a list. {_HINT}")
    blocks = tuple(_block(entry, f"{source}: block {number}") for number, entry in enumerate(entries, 1))
    sums = dict.fromkeys(Role, 0)
    for block in blocks:
        sums[block.role] += block.size_bytes
    if any(sums[role] != figures.roles[role] for role in Role if role is not Role.ALLOCATOR_ROUNDING):
        raise ResultFormatError(f"{source}: the blocks do not add up to the roles. {_HINT}")
    notes = ("memory ran out, so its peak is what was reached",) if figures.oom is not None else ()
    return PeakReport(
        device=result.size("device"),
        peak_bytes=figures.peak_bytes,
        reserved_bytes=result.size("reserved_bytes"),
        complete=result.get("complete") is True,
        roles=figures.roles,
        blocks=blocks,
        phases=figures.phases,
        peak_phase=_phase(result.text("peak_phase"), source),
        notes=notes,
    )


def _block(entry: object, where: str) -> BlockGroup:
    values = ResultReader(entry, where)
    role, phase = values.text("role"), _phase(values.text("phase"), where)
    if role not in set(Role) or phase is None:
        raise ResultFormatError(f"{where}: no known role and phase. {_HINT}")
    layers: Any = values.get("layers")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise ResultFormatError(f"{where}: 'layers' is not a list of integers. {_HINT}")
    return BlockGroup(
        role=Role(role),
        size_bytes=values.size("bytes"),
        count=values.size("count"),
        module=printable(values.text("module") or ""),
        frame=printable(values.text("frame") or ""),
        phase=phase,
        layers=tuple(layers),
    )


def _phase(word: str | None, where: str) -> Phase | None:
    if word is not None and word not in set(Phase):
        raise ResultFormatError(f"{where}: phase {word!r:.40} is unknown. Did a newer version write it?")
    return None if word is None else Phase(word)
