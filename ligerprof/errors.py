"""Errors for the user: one line that names the problem, its place and a remedy."""


class LigerprofError(Exception):
    """An expected failure. The command line prints the message as one line and exits with `exit_code`."""

    exit_code = 1


class RecipeError(LigerprofError):
    """An invalid option, or options that exclude each other: a usage error."""

    exit_code = 2


class UnknownModelError(RecipeError):
    """A model name, config.json or folder that does not describe a supported model."""


class ModelCodeError(LigerprofError):
    """The model's code, in transformers or a library below it, failed on a recipe."""


class UnsupportedError(LigerprofError):
    """A combination of options that this version does not support; `what` leaves out where it is and what to try."""

    def __init__(self, message: str, what: str = "") -> None:
        super().__init__(message)
        self.what = what or message


class MissingDependencyError(LigerprofError):
    """A missing package, driver or device that the command needs."""


class KernelUnavailableError(LigerprofError):
    """A requested kernel cannot run on this machine; the message has the reason."""


class UnknownKernelError(KernelUnavailableError, RecipeError):
    """A kernel that the named provider lacks: a usage error."""

    exit_code = 2


class KernelInputError(LigerprofError, ValueError):
    """Tensors that a kernel does not accept (mismatched shapes), or a layer that it cannot replace."""


class LabelError(KernelInputError, IndexError, AssertionError):
    """A label outside the vocabulary: an IndexError as in torch on a CPU, an AssertionError as in liger-kernel."""


class SnapshotFormatError(LigerprofError):
    """A file that is not a snapshot of torch.cuda.memory, or that is unsafe to read."""


class EmptySnapshotError(SnapshotFormatError):
    """A snapshot without events and segments."""


class RulesError(LigerprofError):
    """A file of attribution rules that is unreadable or invalid."""


class TraceFormatError(LigerprofError):
    """A file that is not a trace of torch.profiler, or that contains no GPU work."""


class RunDirectoryError(LigerprofError):
    """A run directory that is not empty, cannot be created, or lacks a required file."""


class OutputError(LigerprofError):
    """An output file that already exists or cannot be written."""


class ResultFormatError(LigerprofError):
    """A JSON file that was not written by a ligerprof command."""


class WrongTypeError(LigerprofError, TypeError):
    """An argument of a library function has a type that the function does not accept."""


class DoesNotFitError(LigerprofError):
    """The training step does not fit the memory limit."""

    exit_code = 3
