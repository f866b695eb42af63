"""Turn an exception that the model's own code raised into a one-line error."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ligerprof.errors import LigerprofError, ModelCodeError
from ligerprof.recipe.training import TrainingRecipe

_PACKAGE = str(Path(__file__).parents[1]) + "/"
# files of frames between the failing call and the exception: this folder's, the simulated GPU's, torch's, and generated
# code
_BETWEEN = (str(Path(__file__).parent) + "/", f"{_PACKAGE}simulated_gpu/", "/torch/", "<")


@contextmanager
def model_failures_in_a_line(recipe: TrainingRecipe, *passing: type[Exception]) -> Iterator[None]:
    """Turn exceptions of the model's code, and of libraries that it calls, into one line; bugs of this package pass.

    Args:
        passing: exceptions that the caller handles, such as running out of memory.

    Raises:
        ModelCodeError: the model does not run with these options.
    """
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # backward may have no frame of the calling code
        callers = [frame for frame in frames if not any(part in frame.filename for part in _BETWEEN)]
        ours = any(frame.filename.startswith(_PACKAGE) for frame in (frames[-1], *callers[-1:]))
        if ours or isinstance(error, (LigerprofError, *passing)):
            raise
        raise ModelCodeError(_describe(recipe, error, callers[-1] if callers else None)) from error


def _describe(recipe: TrainingRecipe, error: Exception, caller: traceback.FrameSummary | None) -> str:
    place = f"at {Path(caller.filename).name}:{caller.lineno}" if caller is not None else "in its backward pass"
    reason = " ".join(str(error).split())[:160].rstrip(".") or "no reason given"
    return (
        f"{recipe.spec.name}: the code of {recipe.spec.model_type} fails {place} with {type(error).__name__}: {reason}."
        " Check the config, or try --attention eager, --no-checkpointing or another --precision."
    )
