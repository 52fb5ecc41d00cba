"""A model of PyTorch's caching allocator: what it reserves on a card for the allocations and frees of a step.

After `c10/cuda/CUDACachingAllocator.cpp` and torch's notes on CUDA memory management. Reserved bytes are what runs out:
blocks are cut from segments, segments are given back only when the driver has no more, and a free block of another
stream, of the other pool or too small helps nobody. Not modelled: private pools (CUDA graphs), fragmentation inside the
driver, and `roundup_power2_divisions`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

MIN_BLOCK = 512
"""Every size is rounded up to a multiple of this."""
SMALL_SIZE = 1 << 20
"""Requests up to this come from the small pool."""
SMALL_BUFFER = 2 << 20
"""Segments of the small pool, and the pages in which expandable ones grow there."""
LARGE_BUFFER = 20 << 20
"""Segments for requests below `MIN_LARGE_ALLOC`, and the pages in which expandable ones grow in the large pool."""
MIN_LARGE_ALLOC = 10 << 20
"""Requests from this size on get a segment of their own size, rounded up to `ROUND_LARGE`."""
ROUND_LARGE = 2 << 20


class DeviceFullError(Exception):
    """Raised when neither the driver nor the cache has room for a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """Hold the settings of `PYTORCH_CUDA_ALLOC_CONF` that the model knows.

    Attributes:
        expandable_segments: Grow one segment for each pool and stream by pages instead of adding segments.
        max_split_bytes: Blocks from this size on are not split; None splits all.
        collection_threshold: Share of the capacity above which old, whole, free segments are given back before a new
            one is made; 0 leaves them.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    collection_threshold: float = 0.0

    @staticmethod
    def of(environment: Mapping[str, str]) -> AllocatorSettings:
        """Read them from a process's environment, as torch does; what the model does not know is left out."""
        text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
        given = dict(pair.split(":", 1) for pair in text.replace(" ", "").split(",") if ":" in pair)
        limit = given.get("max_split_size_mb")
        return AllocatorSettings(
            expandable_segments=given.get("expandable_segments") == "True",
            max_split_bytes=None if limit is None else int(limit) << 20,
            collection_threshold=float(given.get("garbage_collection_threshold", 0.0)),
        )


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment: free, in use, or (expandable segments only) address space without memory."""

    stream: int
    small: bool
    nbytes: int
    address: int
    free: bool = False
    mapped: bool = True
    expandable: bool = False
    before: _Block | None = None
    after: _Block | None = None
    freed_at: int = 0
    streams: set[int] = field(default_factory=set)

    def alone(self) -> bool:
        return self.before is None and self.after is None


_Pool = tuple[int, bool]


class CachingAllocator:
    """Replay allocations and frees; count what is allocated and what is reserved.

    Attributes:
        allocated_bytes: Of the blocks in use, rounded.
        reserved_bytes: Of all segments.
        peak_allocated_bytes: Most of the former at any moment.
        peak_reserved_bytes: Most of the latter.
    """

    def __init__(self, settings: AllocatorSettings | None = None, *, capacity_bytes: int | None = None) -> None:
        """Begin with nothing reserved.

        Args:
            settings: Default: torch's defaults.
            capacity_bytes: What the driver can give altogether; None is without limit.
        """
        self.allocated_bytes = self.reserved_bytes = 0
        self.peak_allocated_bytes = self.peak_reserved_bytes = 0
        self._settings = settings or AllocatorSettings()
        self._capacity = capacity_bytes
        self._free: dict[_Pool, list[tuple[int, int, _Block]]] = {}
        self._unmapped: dict[_Pool, list[_Block]] = {}
        self._used: dict[int, _Block] = {}
        self._pending: list[_Block] = []
        self._next_address = 0
        self._next_handle = 0
        self._clock = 0

    def allocate(self, nbytes: int, *, stream: int = 0) -> int:
        """Take memory for a tensor and return a handle; nothing is taken for 0 bytes.

        Raises:
            DeviceFullError: There is none left.
        """
        self._next_handle += 1
        if nbytes == 0:
            return self._next_handle
        size = max(MIN_BLOCK, _round_up(nbytes, MIN_BLOCK))
        small = size <= SMALL_SIZE
        self._clock += not small
        block = self._best_fit(size, stream, small) or self._new_block(size, stream, small)
        self._split(block, size)
        block.free = False
        self._used[self._next_handle] = block
        self.allocated_bytes += block.nbytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        return self._next_handle

    def free(self, handle: int) -> None:
        """Give a tensor's memory back to its pool; at `synchronize`, where other streams may still use it."""
        block = self._used.pop(handle, None)
        if block is None:
            return
        self.allocated_bytes -= block.nbytes
        if block.streams:
            self._pending.append(block)
        else:
            self._give_back(block)

    def record_stream(self, handle: int, stream: int) -> None:
        """Note that another stream works on a tensor: freed, it stays taken until the streams have met."""
        block = self._used.get(handle)
        if block is not None and block.stream != stream:
            block.streams.add(stream)

    def synchronize(self) -> None:
        """Let all streams come to an end."""
        waiting, self._pending = self._pending, []
        for block in waiting:
            block.streams.clear()
            self._give_back(block)

    def empty_cache(self) -> None:
        """Give every segment, and every page of an expandable one, back in which nothing is allocated."""
        self.synchronize()
        for pool in list(self._free):
            for entry in list(self._free[pool]):
                self._release(entry[2])

    def _best_fit(self, size: int, stream: int, small: bool) -> _Block | None:
        """Take the smallest free block of the stream's pool that is large enough."""
        blocks = self._free.setdefault((stream, small), [])
        position = bisect_left(blocks, (size, -1))
        if position == len(blocks):
            return None
        found = blocks[position][2]
        if found.expandable:
            # A block that can grow is as large as it can become: a larger one that cannot fits better.
            for k in range(position + 1, len(blocks)):
                if _could_be(blocks[k][2]) >= _could_be(found):
                    break
                found, position = blocks[k][2], k
        limit = self._settings.max_split_bytes
        if limit is not None and size < limit <= found.nbytes:
            return None
        if limit is not None and size >= limit and found.nbytes >= size + LARGE_BUFFER:
            return None
        del blocks[position]
        return found

    def _new_block(self, size: int, stream: int, small: bool) -> _Block:
        if self._settings.expandable_segments:
            return self._grown(size, stream, small)
        nbytes = segment_bytes(size)
        self._collect()
        self._reserve(nbytes)
        block = _Block(stream=stream, small=small, nbytes=nbytes, address=self._next_address)
        self._next_address += nbytes
        return block

    def _reserve(self, nbytes: int) -> None:
        """Take memory from the driver; where it has none, after giving everything back that is not in use."""
        if self._capacity is not None and self.reserved_bytes + nbytes > self._capacity:
            self.empty_cache()
            if self.reserved_bytes + nbytes > self._capacity:
                raise DeviceFullError(
                    f"{nbytes} bytes do not fit: {self.reserved_bytes} of {self._capacity} are reserved, "
                    f"{self.allocated_bytes} allocated"
                )
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _collect(self) -> None:
        """Give free whole segments back where the threshold is passed, those first that are free for long."""
        threshold = self._settings.collection_threshold
        if not threshold or self._capacity is None:
            return
        target = self.reserved_bytes - int(threshold * self._capacity)
        while target > 0:
            whole = [
                entry[2]
                for (_, small), entries in self._free.items()
                if not small
                for entry in entries
                if entry[2].alone() and not entry[2].expandable
            ]
            if not whole:
                return
            mean = sum(self._clock - block.freed_at for block in whole) / len(whole)
            for block in whole:
                if self._clock - block.freed_at >= mean:
                    target -= block.nbytes
                    self._release(block)

    def _grown(self, size: int, stream: int, small: bool) -> _Block:
        """Map pages behind the free end of the pool's expandable segment until it is large enough."""
        pool = (stream, small)
        page = SMALL_BUFFER if small else LARGE_BUFFER
        candidate = self._room(pool, size)
        if candidate is None:
            # Address space costs nothing; torch takes an eighth more than the card has.
            space = max(1 << 50, size)
            candidate = _Block(
                stream=stream, small=small, nbytes=space, address=self._next_address, mapped=False, expandable=True
            )
            self._next_address += space
            self._unmapped.setdefault(pool, []).append(candidate)
        if candidate.mapped:
            self._remove(candidate)
        else:
            candidate = self._mapped(candidate, min(size, candidate.nbytes), page)
        while candidate.nbytes < size:
            following = candidate.after
            assert following is not None
            assert not following.mapped
            grown = self._mapped(following, min(size - candidate.nbytes, following.nbytes), page)
            candidate = self._joined(candidate, grown)
        return candidate

    def _room(self, pool: _Pool, size: int) -> _Block | None:
        """Find address space with a free block before it, if there is one, that can hold a size."""
        for unmapped in sorted(self._unmapped.get(pool, []), key=lambda block: (block.nbytes, block.address)):
            start = unmapped
            if unmapped.before is not None and unmapped.before.free:
                start = unmapped.before
            nbytes, block = 0, start
            while nbytes < size and block is not None and (block.free or not block.mapped):
                nbytes += block.nbytes
                block = block.after
            if nbytes >= size:
                return start
        return None

    def _mapped(self, unmapped: _Block, nbytes: int, page: int) -> _Block:
        """Give memory to the beginning of a piece of address space."""
        nbytes = min(_round_up(nbytes, page), unmapped.nbytes)
        self._reserve(nbytes)
        block = _Block(
            stream=unmapped.stream,
            small=unmapped.small,
            nbytes=nbytes,
            address=unmapped.address,
            expandable=True,
            before=unmapped.before,
            after=unmapped,
        )
        if unmapped.before is not None:
            unmapped.before.after = block
        unmapped.before = block
        unmapped.address += nbytes
        unmapped.nbytes -= nbytes
        if unmapped.nbytes == 0:
            self._unmapped[unmapped.stream, unmapped.small].remove(unmapped)
            block.after = unmapped.after
            if unmapped.after is not None:
                unmapped.after.before = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Put what a request leaves of a block back into its pool, where torch would split the block."""
        remaining = block.nbytes - size
        if block.small or self._settings.expandable_segments:
            if remaining < MIN_BLOCK:
                return
        else:
            limit = self._settings.max_split_bytes
            if remaining <= SMALL_SIZE or (limit is not None and size >= limit):
                return
        rest = _Block(
            stream=block.stream,
            small=block.small,
            nbytes=remaining,
            address=block.address + size,
            expandable=block.expandable,
            before=block,
            after=block.after,
        )
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.nbytes = size
        self._insert(rest)

    def _give_back(self, block: _Block) -> None:
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove(neighbour)
                first, second = (neighbour, block) if neighbour is block.before else (block, neighbour)
                block = self._joined(first, second)
        self._insert(block)

    def _joined(self, first: _Block, second: _Block) -> _Block:
        first.nbytes += second.nbytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _insert(self, block: _Block) -> None:
        block.free, block.freed_at = True, self._clock
        insort(self._free.setdefault((block.stream, block.small), []), (block.nbytes, block.address, block))

    def _remove(self, block: _Block) -> None:
        blocks = self._free[block.stream, block.small]
        position = bisect_left(blocks, (block.nbytes, block.address))
        assert blocks[position][2] is block
        del blocks[position]
        block.free = False

    def _release(self, block: _Block) -> None:
        """Give a free block's memory to the driver: a whole segment, or the whole pages of an expandable one."""
        if not block.expandable:
            if block.alone():
                self._remove(block)
                self.reserved_bytes -= block.nbytes
            return
        page = SMALL_BUFFER if block.small else LARGE_BUFFER
        # A segment's first address is a multiple of no page; pages are counted from it.
        first = block
        while first.before is not None:
            first = first.before
        offset = block.address - first.address
        start = _round_up(offset, page)
        stop = (offset + block.nbytes) // page * page
        if stop <= start:
            return
        self._remove(block)
        self._cut_out(block, first.address + start, stop - start)
        self.reserved_bytes -= stop - start

    def _cut_out(self, block: _Block, address: int, nbytes: int) -> None:
        """Turn the middle of a block into address space without memory, joined with such space next to it."""
        head, tail = address - block.address, block.address + block.nbytes - address - nbytes
        hole = _Block(
            stream=block.stream,
            small=block.small,
            nbytes=nbytes,
            address=address,
            mapped=False,
            expandable=True,
            before=block.before,
            after=block.after,
        )
        pieces = [hole]
        if head:
            pieces.insert(0, _Block(block.stream, block.small, head, block.address, expandable=True))
        if tail:
            pieces.append(_Block(block.stream, block.small, tail, address + nbytes, expandable=True))
        chain = [block.before, *pieces, block.after]
        for left, right in pairwise(chain):
            if left is not None:
                left.after = right
            if right is not None:
                right.before = left
        for piece in pieces:
            if piece.mapped:
                self._insert(piece)
        spaces = self._unmapped[block.stream, block.small]
        spaces.append(hole)
        for first, second in ((hole.before, hole), (hole, hole.after)):
            if first is not None and second is not None and not first.mapped and not second.mapped:
                spaces.remove(second)
                hole = self._joined(first, second)


def segment_bytes(size: int) -> int:
    """Return what is taken from the driver for a rounded request."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else _round_up(size, ROUND_LARGE)


def _could_be(block: _Block) -> int:
    growth = block.after.nbytes if block.after is not None and not block.after.mapped else 0
    return block.nbytes + growth


def _round_up(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to
