"""A slow and obvious caching allocator that writes snapshots and knows the truth about each moment."""

import random
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

KIB, MIB = 2**10, 2**20


@dataclass
class Piece:
    address: int
    size: int
    owner: int | None = None
    requested: int = 0
    waiting: bool = False
    mapped: bool = True

    @property
    def free(self) -> bool:
        return self.owner is None and self.mapped


@dataclass
class Segment:
    """Pieces lie side by side; an expandable segment has unmapped ones, too."""

    pieces: list[Piece]
    small: bool
    stream: int
    expandable: bool = False
    pool: tuple[int, int] = (0, 0)


@dataclass
class SlowAllocator:
    """Walks through every piece of every segment for each request.

    Attributes:
        allocated, reserved: bytes after each event; the first entry is before any.
        owners: for each event, who holds how many requested bytes.
    """

    expandable: bool = False
    top: int = 2**45
    segments: list[Segment] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    allocated: list[int] = field(default_factory=lambda: [0])
    reserved: list[int] = field(default_factory=lambda: [0])
    owners: list[dict[int, int]] = field(default_factory=lambda: [{}])

    def alloc(self, owner: int, requested: int, stream: int = 0) -> None:
        size = max(512, (requested + 511) // 512 * 512)
        small = size <= MIB
        found = self._best(size, small, stream)
        if found is None:
            self._grow(size, small, stream)
            found = self._best(size, small, stream)
        segment, piece = found
        rest = piece.size - size
        splits = rest >= 512 if small or self.expandable else rest > MIB
        if splits:
            at = segment.pieces.index(piece)
            segment.pieces.insert(at + 1, Piece(piece.address + size, rest))
            piece.size = size
        piece.owner, piece.requested = owner, requested
        self._event("alloc", piece.address, requested, stream)

    def request_free(self, owner: int) -> None:
        segment, piece = self._find(owner)
        piece.waiting = True
        self._event("free_requested", piece.address, piece.requested, segment.stream)

    def complete_free(self, owner: int) -> None:
        segment, piece = self._find(owner)
        address, requested = piece.address, piece.requested
        piece.owner, piece.waiting = None, False
        self._merge(segment)
        self._event("free_completed", address, requested, segment.stream)

    def empty_cache(self) -> None:
        for segment in list(self.segments):
            if segment.expandable:
                self._unmap(segment)
            elif all(piece.free for piece in segment.pieces):
                self.segments.remove(segment)
                self._event("segment_free", segment.pieces[0].address, segment.pieces[0].size, segment.stream)

    def _unmap(self, segment: Segment) -> None:
        """Unmap whole pages inside free pieces; what lies beside them stays."""
        page = _page(segment.small)
        for piece in [piece for piece in segment.pieces if piece.free]:
            start = -(-piece.address // page) * page
            end = (piece.address + piece.size) // page * page
            if start >= end:
                continue
            cut = [
                Piece(piece.address, start - piece.address),
                Piece(start, end - start, mapped=False),
                Piece(end, piece.address + piece.size - end),
            ]
            at = segment.pieces.index(piece)
            segment.pieces[at : at + 1] = [part for part in cut if part.size]
            self._event("segment_unmap", start, end - start, segment.stream)

    def live(self) -> list[int]:
        return [piece.owner for _, piece in self._pieces() if piece.owner is not None and not piece.waiting]

    def pending(self) -> list[int]:
        return [piece.owner for _, piece in self._pieces() if piece.owner is not None and piece.waiting]

    def snapshot(self, *, drop: int = 0) -> dict[str, Any]:
        """What torch would write, without the first `drop` events."""
        segments = [
            {
                "device": 0,
                "address": pieces[0].address,
                "total_size": sum(piece.size for piece in pieces),
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": segment.expandable,
                "blocks": [_block(piece) for piece in pieces],
            }
            for segment in self.segments
            for mapped, pieces in ((mapped, list(run)) for mapped, run in groupby(segment.pieces, _is_mapped))
            if mapped
        ]
        return {
            "segments": segments,
            "device_traces": [self.events[drop:]],
            "allocator_settings": {"expandable_segments": self.expandable, "max_split_size": -1},
        }

    def _pieces(self) -> list[tuple[Segment, Piece]]:
        return [(segment, piece) for segment in self.segments for piece in segment.pieces]

    def _find(self, owner: int) -> tuple[Segment, Piece]:
        return next(pair for pair in self._pieces() if pair[1].owner == owner)

    def _best(self, size: int, small: bool, stream: int) -> tuple[Segment, Piece] | None:
        fitting = [
            (piece.size, piece.address, segment, piece)
            for segment, piece in self._pieces()
            if piece.free and piece.size >= size and segment.small == small and segment.stream == stream
        ]
        return min(fitting, key=lambda found: found[:2])[2:] if fitting else None

    def _grow(self, size: int, small: bool, stream: int) -> None:
        step = _page(small)
        if not self.expandable:
            wanted = step if small or size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            self.top -= wanted
            self.segments.append(Segment([Piece(self.top, wanted)], small, stream))
            self._event("segment_alloc", self.top, wanted, stream)
            return
        segment = next((s for s in self.segments if s.small == small and s.stream == stream), None)
        if segment is None:
            self.top -= 2**40
            segment = Segment([], small, stream, expandable=True)
            self.segments.append(segment)
        hole = next((piece for piece in segment.pieces if not piece.mapped and piece.size >= size), None)
        wanted = -(-size // step) * step
        if hole is None:
            last = segment.pieces[-1] if segment.pieces else Piece(self.top, 0)
            start = last.address + last.size
            segment.pieces.append(Piece(start, wanted))
        else:
            start, wanted = hole.address, min(wanted, hole.size)
            at = segment.pieces.index(hole)
            rest = Piece(start + wanted, hole.size - wanted, mapped=False)
            segment.pieces[at : at + 1] = [Piece(start, wanted), *([rest] if rest.size else [])]
        self._merge(segment)
        self._event("segment_map", start, wanted, stream)

    @staticmethod
    def _merge(segment: Segment) -> None:
        merged: list[Piece] = []
        for piece in segment.pieces:
            if merged and merged[-1].free and piece.free:
                merged[-1].size += piece.size
            else:
                merged.append(piece)
        segment.pieces = merged

    def _event(self, action: str, address: int, size: int, stream: int) -> None:
        self.events.append({"action": action, "addr": address, "size": size, "stream": stream, "frames": []})
        held = [piece for _, piece in self._pieces() if piece.owner is not None and not piece.waiting]
        self.allocated.append(sum(piece.size for piece in held))
        self.reserved.append(sum(piece.size for _, piece in self._pieces() if piece.mapped))
        self.owners.append({piece.owner: piece.requested for piece in held})


def _page(small: bool) -> int:
    return 2 * MIB if small else 20 * MIB


def _is_mapped(piece: Piece) -> bool:
    return piece.mapped


def _block(piece: Piece) -> dict[str, Any]:
    state = "inactive" if piece.owner is None else "active_pending_free" if piece.waiting else "active_allocated"
    return {
        "address": piece.address,
        "size": piece.size,
        "requested_size": piece.requested if piece.owner is not None else 0,
        "state": state,
        "frames": [],
    }


def random_program(
    seed: int, *, events: int = 120, expandable: bool = False, small_only: bool = False
) -> SlowAllocator:
    """Allocate, free at once or later, on two streams, and empty the cache now and then."""
    draw = random.Random(seed)
    allocator = SlowAllocator(expandable=expandable)
    owner = 0
    while len(allocator.events) < events:
        choice = draw.random()
        live, pending = allocator.live(), allocator.pending()
        if choice < 0.5 or not live:
            owner += 1
            top = MIB if small_only else draw.choice([KIB, 200 * KIB, 3 * MIB, 30 * MIB])
            allocator.alloc(owner, draw.randint(1, top), stream=draw.choice([0, 0, 0, 7]))
        elif choice < 0.9:
            freed = draw.choice(live)
            allocator.request_free(freed)
            if draw.random() < 0.8:
                allocator.complete_free(freed)
        elif choice < 0.97 and pending:
            allocator.complete_free(draw.choice(pending))
        else:
            allocator.empty_cache()
    return allocator
