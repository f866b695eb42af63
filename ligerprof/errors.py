"""The one family of errors a user is meant to read: one line that says what, where and what to try."""


class LigerprofError(Exception):
    """An expected failure. The command line prints it as one line and ends with `exit_code`."""

    exit_code = 1


class RecipeError(LigerprofError):
    """Options that are wrong by themselves or do not go together: a usage error."""

    exit_code = 2


class UnknownModelError(RecipeError):
    """A model name, config.json or folder that names no model this package can describe."""


class ModelCodeError(LigerprofError):
    """A model's own code, in transformers or beneath it, fails on a recipe."""


class NotBuiltError(LigerprofError):
    """An option that is part of the contract and that this version cannot carry out yet."""


class MissingDependencyError(LigerprofError):
    """A package, a driver or a device that the command needs and that is not here."""


class KernelUnavailableError(LigerprofError):
    """A kernel that was asked for and cannot run here; the message carries the reason."""


class KernelInputError(LigerprofError, ValueError):
    """Tensors that a kernel cannot work on: shapes that do not go together, or a layer it must not replace."""


class SnapshotFormatError(LigerprofError):
    """A snapshot file that is not what torch.cuda.memory writes, or that is not safe to read."""


class RulesError(LigerprofError):
    """A file of attribution rules that cannot be read, or that holds something else."""


class TraceFormatError(LigerprofError):
    """A file that is not what torch.profiler writes, or that holds no GPU work."""


class RunDirectoryError(LigerprofError):
    """A run directory that is not empty, cannot be made, or lacks a file it should have."""


class OutputError(LigerprofError):
    """A file that exists already, or cannot be written."""


class ResultFormatError(LigerprofError):
    """A JSON file that is not what a command of this package writes."""


class DoesNotFitError(LigerprofError):
    """The training step needs more memory than there is."""

    exit_code = 3
