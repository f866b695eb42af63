"""Run functions that spend their time in numpy at the same time: its loops let other threads run."""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def at_once(functions: Sequence[Callable[[], T]]) -> list[T]:
    """The results of some functions; the first runs in this thread, each other one in a thread of its own."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            found[place] = functions[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(1, len(functions))]
    for thread in threads:
        thread.start()
    run(0)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [found[place] for place in range(len(functions))]
