"""Find the call site of each block, its stack and stamp, and group consecutive blocks of one call."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ligerprof.analyzers.attribution.stacks import Stack, StackReader
from ligerprof.models.module_names import layer_index
from ligerprof.snapshots.distinct import distinct_numbers, number_pairs, numbered
from ligerprof.snapshots.replay import Replay
from ligerprof.snapshots.stamp import Stamp
from ligerprof.snapshots.trace import Int64s

Mask = npt.NDArray[np.bool_]

# a program of thousands of modules has about as many; each takes time
_MOST_SITES = 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class CallSite:
    """The place in the program that allocated some blocks: its stack, and the recorder's stamp if there is one."""

    stack: Stack
    stamp: Stamp | None

    @property
    def module(self) -> str:
        """Dotted module name, "" if unknown."""
        return self.stamp.module if self.stamp else ""

    @property
    def node(self) -> str:
        """The autograd node that ran, or ""."""
        return self.stamp.node if self.stamp and self.stamp.node else self.stack.node

    @property
    def place(self) -> tuple[object, ...]:
        """What is equal for the same place in any step; stamps name nodes in some steps alone."""
        return self.stack.calls, self.stack.node or self.node, self.module, self.recomputes

    @property
    def recomputes(self) -> bool:
        """Whether backward was recomputing a checkpointed forward pass."""
        return self.stamp.recompute if self.stamp else self.stack.recomputes

    @property
    def layer(self) -> int | None:
        """Index of the decoder layer in the module's name."""
        return layer_index(self.module)

    @property
    def description(self) -> str:
        """The most informative call or autograd node, or ""."""
        return self.stack.description or self.node

    @property
    def operation(self) -> str:
        """The torch operator, Python function or autograd node that allocated, or ""."""
        return self.stack.operation or self.node

    @property
    def is_known(self) -> bool:
        """Whether the recording has a stamp or a stack for this call site."""
        return self.stamp is not None or bool(self.stack.calls or self.stack.node)

    @property
    def has_calls(self) -> bool:
        """Whether the recording has a call, a module or an autograd node; without, at most a phase and a step."""
        return bool(self.stack.calls or self.stack.native or self.module or self.node)


class CallSites:
    """The call site of each of a device's blocks, and the calls that allocated consecutive blocks.

    Attributes:
        sites: the distinct call sites, each with its first stamp less the step.
        is_cut: whether there are more call sites than any program has; blocks of the others share one without a stack.
        site_of: index into `sites` of each block.
        index_in_call: number of blocks that the same call had allocated before each block.
        blocks_in_call: number of blocks that the call allocated in all.
        next_call: index of the next call's first allocation event; past the end for the last call.
    """

    def __init__(self, replayed: Replay) -> None:
        self.sites: list[CallSite] = []
        self.is_cut = False
        self._requested_bytes = replayed.requested_bytes
        self.site_of = self._find_sites(replayed)
        self._site_by_block: list[int] = self.site_of.tolist()
        self.index_in_call, self.blocks_in_call, self.next_call = self._group_calls(replayed)

    @cached_property
    def place_of(self) -> Int64s:
        """A number for each block, ascending without gaps from 0; equal for the same place in any step."""
        numbers: dict[object, int] = {}
        of_site = [numbers.setdefault(site.place, len(numbers)) for site in self.sites]
        return np.array(of_site, dtype=np.int64)[self.site_of]

    @cached_property
    def surroundings(self) -> Int64s:
        """A number for each block: its place, its index in the call, and the place of the block before the call.

        Lines with several calls, such as `down(act(gate(x)) * up(x))`, are one place with several surroundings.
        """
        before = np.arange(len(self.place_of)) - self.index_in_call - 1
        places = np.append(self.place_of, -1)
        return number_pairs(number_pairs(self.place_of, places[before] + 1), self.index_in_call)

    @cached_property
    def sizes(self) -> tuple[Int64s, Int64s]:
        """The distinct numbers of requested bytes, ascending, and the index of each block's among them."""
        return numbered(self._requested_bytes)

    @cached_property
    def size_at_place(self) -> Int64s:
        """A number for each block; equal for the same place and size in any step."""
        return number_pairs(self.place_of, self.sizes[1])

    def of(self, block: int) -> CallSite:
        """The call site of one block."""
        return self.sites[self._site_by_block[block]]

    def at(self, chosen: Callable[[CallSite], bool]) -> Mask:
        """Whether each block was allocated at a chosen site."""
        of_sites: Mask = np.array([chosen(site) for site in self.sites], dtype=bool)
        return of_sites[self.site_of]

    def matching(self, pattern: re.Pattern[str]) -> Mask:
        """Whether a pattern occurs in the Python calls of each block."""
        return self._of_stacks(pattern, lambda stack: stack.text)

    def matching_inner(self, pattern: re.Pattern[str]) -> Mask:
        """Whether a pattern occurs in the Python calls of each block below the innermost call of a module."""
        return self._of_stacks(pattern, lambda stack: stack.inner_text)

    def _of_stacks(self, pattern: re.Pattern[str], text_of: Callable[[Stack], str]) -> Mask:
        stacks, stack_of = self._stacks
        search = pattern.search
        matches: Mask = np.array([search(text_of(stack)) is not None for stack in stacks], dtype=bool)
        return matches[stack_of]

    @cached_property
    def _stacks(self) -> tuple[tuple[Stack, ...], Int64s]:
        """The distinct stacks, which sites with different stamps share, and the index of each block's among them."""
        numbers: dict[int, int] = {}
        of_site = [numbers.setdefault(id(site.stack), len(numbers)) for site in self.sites]
        stacks = {id(site.stack): site.stack for site in self.sites}
        return tuple(stacks.values()), np.array(of_site, dtype=np.int64)[self.site_of]

    def _find_sites(self, replayed: Replay) -> Int64s:
        """The site of each block; thousands of events share stacks and stamps, which are compared by `id` first."""
        older = replayed.older_blocks.frames
        allocated = replayed.allocated_by[len(older) :]
        frame_codes, frames = replayed.trace.objects("frames")
        text_codes, texts = replayed.trace.objects("user_metadata")
        frame_of = np.append(np.arange(len(older)) + len(frames), frame_codes[allocated])
        text_of = np.append(np.full(len(older), len(texts)), text_codes[allocated])
        frames, texts = [*frames, *older], [*texts, None]
        first, site_of_pair = distinct_numbers(frame_of * len(texts) + text_of, len(frames) * len(texts))
        reader, unknown = StackReader(), Stack(calls=(), native=())
        known: dict[tuple[int, Stamp | None], int] = {}
        sites = np.zeros(len(first), dtype=np.int64)
        for pair in np.argsort(first).tolist():
            # frames and stacks outlive this loop, so that each id stays unique
            listed, text = frames[frame_of[first[pair]]], texts[text_of[first[pair]]]
            is_full = len(known) >= _MOST_SITES
            stack = reader.known(listed) if is_full else reader.read(listed)
            stamp = Stamp.parse(text) if isinstance(text, str) and text else None
            # the same call in another step
            key = (id(stack), replace(stamp, step=0) if stamp else None)
            if key not in known and is_full:
                self.is_cut = True
                stack, key = unknown, (id(unknown), None)
            if key not in known:
                known[key] = len(self.sites)
                self.sites.append(CallSite(stack=stack or unknown, stamp=key[1]))
            sites[pair] = known[key]
        return sites[site_of_pair]

    def _group_calls(self, replayed: Replay) -> tuple[Int64s, Int64s, Int64s]:
        """Group consecutive blocks that have the same stack, node and stamp into calls."""
        numbers: dict[object, int] = {}
        keys = ((site.stack.calls, site.stack.node, site.stamp) for site in self.sites)
        calls = [numbers.setdefault(key, len(numbers)) for key in keys]
        if not calls:
            return self.site_of, self.site_of, self.site_of
        call_of = np.array(calls, dtype=np.int64)[self.site_of]
        starts = np.flatnonzero(np.append(True, np.diff(call_of)))
        ends = np.append(starts[1:], len(call_of))
        lengths = ends - starts
        allocated = np.append(replayed.allocated_by, len(replayed.trace))
        index_in_call = np.arange(len(call_of)) - np.repeat(starts, lengths)
        return index_in_call, np.repeat(lengths, lengths), np.repeat(allocated[ends], lengths)
