"""The result of a kernel's check, row by row; torch is not imported."""

from dataclasses import dataclass

from ligerprof.words import Word


class Result(Word):
    """The outcome of one row."""

    PASS = "pass"  # noqa: S105 - a result, not a password
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckRow:
    """One case of one check.

    Attributes:
        check: memory, values, arguments, gradients, strides, repeat, compile or bytes.
        case: what was called.
        error: the largest relative error, or None if nothing was compared.
        bound: the largest error that passes.
        tensor: the output or gradient (`d_weight`) with the largest error, or what was counted.
        note: why the row failed or was skipped, or what was compared.
    """

    check: str
    case: str
    result: Result
    error: float | None = None
    bound: float | None = None
    tensor: str = ""
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCheck:
    """All rows of one kernel.

    Attributes:
        device: where it ran, in words.
    """

    kernel: str
    provider: str
    slot: str
    device: str
    rows: tuple[CheckRow, ...]

    @property
    def passed(self) -> bool:
        """Whether no row failed."""
        return all(row.result is not Result.FAIL for row in self.rows)
