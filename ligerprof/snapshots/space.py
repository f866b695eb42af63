"""The free space inside a device's segments: taken from the front, merged with its neighbours when given back."""


class FreeSpace:
    """Free blocks by address, merged wherever two touch inside one segment.

    Attributes:
        starts: start address to size of every free block.
        ends: end address to start of every free block.
        borders: addresses where memory from cudaMalloc begins; free blocks never merge across one.
    """

    __slots__ = ("borders", "ends", "starts")

    def __init__(self) -> None:
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.borders: set[int] = set()

    def copy(self) -> "FreeSpace":
        """The same space, to be changed by itself."""
        twin = FreeSpace()
        twin.starts, twin.ends, twin.borders = dict(self.starts), dict(self.ends), set(self.borders)
        return twin

    def give(self, start: int, size: int) -> None:
        """Add a free block and merge it with those that touch it."""
        starts, ends = self.starts, self.ends
        end = start + size
        if end in starts and end not in self.borders:
            end += starts.pop(end)
        if start in ends and start not in self.borders:
            start = ends.pop(start)
        starts[start] = end - start
        ends[end] = start

    def take(self, start: int, size: int) -> bool:
        """Take the first `size` bytes of the free block that begins at `start`; False where there is none."""
        free = self.starts.get(start, -1)
        if free < size:
            return False
        del self.starts[start]
        if free == size:
            del self.ends[start + free]
        else:
            self.starts[start + size] = free - size
            self.ends[start + free] = start + size
        return True

    def around(self, address: int) -> tuple[int, int] | None:
        """Start and size of the free block that holds `address`; slow, for what is rare."""
        size = self.starts.get(address)
        if size is not None:
            return address, size
        return next(((start, size) for start, size in self.starts.items() if start < address < start + size), None)

    def cut(self, start: int, size: int) -> bool:
        """Take `[start, start + size)` out of the free block that holds it; False where none does."""
        holder = self.around(start)
        if holder is None or start + size > holder[0] + holder[1]:
            return False
        if holder[0] != start:
            # two halves: the front stays, and the rest is taken from the front
            begin, whole = holder
            self.starts[begin] = start - begin
            self.ends[start] = begin
            self.starts[start] = begin + whole - start
            self.ends[begin + whole] = start
        return self.take(start, size)
