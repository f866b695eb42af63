"""Turn an exception that the model's own code raised into a one-line error."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ligerprof.errors import LigerprofError, ModelCodeError
from ligerprof.recipe.training import TrainingRecipe

_PACKAGE = str(Path(__file__).parents[1]) + "/"
_RUNS = str(Path(__file__).parent) + "/"
# frames between the calling code and the exception
_BETWEEN = (_RUNS, "/torch/", "<")
_LONGEST_REASON = 160


@contextmanager
def model_failures_in_a_line(recipe: TrainingRecipe, *passing: type[Exception]) -> Iterator[None]:
    """Turn what the model's code, or a library that it calls, raises into one line; bugs of this package pass.

    Args:
        passing: exceptions that the caller handles, such as running out of memory.

    Raises:
        ModelCodeError: the model does not run with these options.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if isinstance(error, (LigerprofError, *passing)) or _is_ours(frames):
            raise
        raise ModelCodeError(_describe(recipe, error, frames)) from error


def _asking_frame(frames: traceback.StackSummary) -> traceback.FrameSummary | None:
    """The innermost frame that is neither torch's nor of the code that runs the step; backward may have none."""
    asking = [frame for frame in frames if not any(part in frame.filename for part in _BETWEEN)]
    return asking[-1] if asking else None


def _is_ours(frames: traceback.StackSummary) -> bool:
    asking = _asking_frame(frames)
    return frames[-1].filename.startswith(_PACKAGE) or (asking is not None and asking.filename.startswith(_PACKAGE))


def _describe(recipe: TrainingRecipe, error: Exception, frames: traceback.StackSummary) -> str:
    asking = _asking_frame(frames)
    place = f"at {Path(asking.filename).name}:{asking.lineno}" if asking is not None else "in its backward pass"
    reason = " ".join(str(error).split())[:_LONGEST_REASON].rstrip(".") or "no reason given"
    return (
        f"{recipe.spec.name}: the code of {recipe.spec.model_type} fails {place} with {type(error).__name__}: {reason}."
        " Check the config, or try --attention eager, --no-checkpointing or another --precision."
    )
