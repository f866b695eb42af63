"""Which micro-batches of a step are worth running: the later ones often repeat the allocations of earlier ones."""

from collections.abc import Callable, Hashable, Iterator


def different_micro_batches(count: int, state: Callable[[], Hashable] | None) -> Iterator[int]:
    """The numbers of the micro-batches to run, from 1.

    Args:
        count: micro-batches of the step, all of one shape.
        state: what decides about coming allocations, called after each micro-batch. Once a state comes back, whole
            rounds from that state to itself are left out. All micro-batches run if it is None.
    """
    number = 1
    seen: dict[Hashable, int] = {}
    while number <= count:
        yield number
        if state is not None and seen.setdefault(found := state(), number) != number:
            each = number - seen[found]
            number += (count - number) // each * each
            state = None
        number += 1
