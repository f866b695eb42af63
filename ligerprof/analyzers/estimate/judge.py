"""Judge whether a prediction fits a limit on reserved bytes: the one rule of all commands."""

from collections.abc import Callable

from ligerprof.words import Word


class Answer(Word):
    """Whether a recipe fits a limit."""

    FITS = "fits"
    MAY_NOT_FIT = "may not fit"
    DOES_NOT_FIT = "does not fit"

    @property
    def fits(self) -> bool | None:
        """The answer in JSON: None where it may not fit."""
        return None if self is Answer.MAY_NOT_FIT else self is Answer.FITS


def judge(
    limit_bytes: int, completes: Callable[[int], bool], *, uncertain_share: float = 0.0, fits_host: bool = True
) -> Answer:
    """Judge a prediction.

    Args:
        limit_bytes: the limit on reserved bytes.
        completes: whether the predicted run completes under a limit.
        uncertain_share: how far the prediction may be off, as a share of the limit; 0 for a simulation, which runs
            under that limit.
        fits_host: whether main memory suffices.
    """
    if not fits_host:
        return Answer.DOES_NOT_FIT
    uncertain_bytes = int(limit_bytes * uncertain_share)
    if uncertain_bytes == 0:
        return Answer.FITS if completes(limit_bytes) else Answer.DOES_NOT_FIT
    # which blocks serve a request depends on the limit, so that a run may complete under a lower one alone
    answers = {completes(limit_bytes + shift_bytes) for shift_bytes in (-uncertain_bytes, 0, uncertain_bytes)}
    if len(answers) > 1:
        return Answer.MAY_NOT_FIT
    return Answer.FITS if answers.pop() else Answer.DOES_NOT_FIT
