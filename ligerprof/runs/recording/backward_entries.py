"""Find the few autograd nodes at which backward enters the code of another module, without walking the whole graph.

Autograd numbers nodes in the order of their creation, and backward runs them in the opposite order. So the nodes of a
module are runs of consecutive numbers, which the calls of other modules interrupt, and backward enters a run at its
highest number. Mostly, that is the node of a module's output, or of a tensor that the next module receives.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# nodes that are looked at before a call and at the end; a module rarely makes more outside of the calls of others
_MOST_NODES, _MOST_NODES_AT_END = 200, 10_000
_autograd: Any = torch.autograd
_sequence_number: Callable[[], int] = _autograd._get_sequence_nr

Hook = Callable[[Any], None]
# first number, and the one after the last
Gap = tuple[int, int]


class OpenCall:
    """The call of a module while it runs, or the code outside of all modules.

    Args:
        hook: callback for the nodes at which backward enters the module's own code.
    """

    __slots__ = ("_boundary", "_gaps", "_hook", "_inner_ends", "_inner_starts", "_last")

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._last = self._boundary = _sequence_number()
        # the module's own runs of numbers whose highest node is not found yet
        self._gaps: list[Gap] | None = None
        # numbers of the nodes that called modules made
        self._inner_starts: list[int] | None = None
        self._inner_ends: list[int] = []

    def enter_inner(self, values: Iterable[Any]) -> None:
        """Note that the module calls another one with these values."""
        self._last = now = _sequence_number()
        if now > self._boundary or self._gaps:
            self._resolve(values, now, self._hook, _MOST_NODES)

    def leave_inner(self) -> None:
        """Note that the called module has returned."""
        self._boundary = _sequence_number()
        if self._boundary > self._last:
            if self._inner_starts is None:
                self._inner_starts, self._inner_ends = [], []
            self._inner_starts.append(self._last)
            self._inner_ends.append(self._boundary)

    def finish(self, values: Any, hook: Hook | None = None) -> None:
        """Note what the module returns; its nodes get `hook` if it is given."""
        now = _sequence_number()
        if now > self._boundary or self._gaps:
            self._resolve((values,), now, hook or self._hook, _MOST_NODES_AT_END)

    def _resolve(self, values: Iterable[Any], now: int, hook: Hook, most: int) -> None:
        """Hook the highest node of each gap that the values lead to."""
        roots: list[Any] = []
        _add_roots(values, roots)
        if not self._gaps:
            for node in roots:
                # the usual case: the last node that the module made is the value's
                if node._sequence_nr() == now - 1:
                    node.register_prehook(hook)
                    return
        gaps = self._gaps = [] if self._gaps is None else self._gaps
        if now > self._boundary:
            gaps.append((self._boundary, now))
        if not roots:
            return
        highest = self._highest(roots, gaps, most)
        remaining = []
        for gap in gaps:
            number, node = highest.get(gap, (gap[0] - 1, None))
            if node is not None:
                node.register_prehook(hook)
            # another value may lead to a higher node
            if number + 1 < gap[1]:
                remaining.append((number + 1, gap[1]))
        self._gaps = remaining

    def _highest(self, pending: list[Any], gaps: list[Gap], most: int) -> dict[Gap, tuple[int, Any]]:
        """The highest node of each gap among the module's own nodes that lead to the pending ones."""
        found: dict[Gap, tuple[int, Any]] = {}
        seen: set[Any] = set()
        lowest = gaps[0][0]
        while pending and len(seen) < most:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            number = node._sequence_nr()
            # what a node reads was made before it
            if number < lowest or self._is_of_inner(number):
                continue
            for gap in gaps:
                if gap[0] <= number < gap[1] and number >= found.get(gap, (number, None))[0]:
                    found[gap] = number, node
            pending.extend(following for following, _ in node.next_functions)
        return found

    def _is_of_inner(self, number: int) -> bool:
        if self._inner_starts is None:
            return False
        place = bisect_right(self._inner_starts, number) - 1
        return place >= 0 and number < self._inner_ends[place]


def _add_roots(values: Iterable[Any], roots: list[Any]) -> None:
    """Add the nodes that computed the tensors in nested containers."""
    for value in values:
        if isinstance(value, Tensor):
            node = value.grad_fn
            if node is not None:
                roots.append(node)
        elif isinstance(value, (tuple, list)):
            _add_roots(value, roots)
        elif isinstance(value, dict):
            _add_roots(value.values(), roots)
