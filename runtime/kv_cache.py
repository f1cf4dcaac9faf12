"""Who owns which block of the paged KV cache, and which slot of recurrent state. Plain ints, no memory."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from llmc.runtime.prefix_cache import Content, same_content


class BlockTable:
    """The blocks of one sequence, in order of position; as a list, and as a row for `Batch.block_tables`."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self._row = np.zeros(16, np.int32)

    def extend(self, blocks: Iterable[int]) -> None:
        """Append blocks."""
        start = len(self.blocks)
        self.blocks.extend(blocks)
        if len(self.blocks) > len(self._row):
            self._row = np.concatenate([self._row, np.zeros(len(self.blocks), np.int32)])
        self._row[start : len(self.blocks)] = self.blocks[start:]

    def cut(self, count: int) -> list[int]:
        """Take away all blocks but the first ``count``; returns them."""
        taken, self.blocks = self.blocks[count:], self.blocks[:count]
        return taken

    @property
    def row(self) -> NDArray[np.int32]:
        """[len(blocks)] block ids."""
        return self._row[: len(self.blocks)]


class KvCache:
    """Blocks of ``block_size`` positions, each free, used (by one sequence or more) or cached (by none, content kept).

    A full block may carry the name of its content. It can be found by that while it is used, and after its last user
    has released it, when it is cached, until its memory is needed. Always free + used + cached == total.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.on_free: Callable[[list[int]], None] | None = None
        """Told of blocks whose content is given up; tests poison them."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._num_used = 0
        self._cached: OrderedDict[int, None] = OrderedDict()  # the first one was released longest ago
        self._content_of: dict[int, Content] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks without content."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that sequences use."""
        return self._num_used

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence uses, but whose content can be found."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many positions take."""
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Blocks with one user each; at most ``num_available``. Cached content goes last, the oldest first."""
        assert count <= self.num_available, f"{count} blocks asked for, {self.num_available} available"
        evicted = []
        while len(self._free) < count:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._content_of.pop(block).key]
            self._free.append(block)
            evicted.append(block)
        if self.on_free is not None and evicted:
            self.on_free(evicted)
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._users[block] = 1
        self._num_used += count
        return blocks

    def can_share(self, blocks: Sequence[int], count: int) -> bool:
        """Whether ``count`` blocks, of which these are found ones, can be had: cached ones are not handed out twice."""
        cached = sum(self._users[block] == 0 for block in blocks)
        return count - len(blocks) <= self.num_available - cached

    def share(self, blocks: Iterable[int]) -> None:
        """One more user of blocks that are used or cached."""
        for block in blocks:
            if self._users[block] == 0:
                del self._cached[block]
                self._num_used += 1
            self._users[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One user less. Blocks without a user become cached if they have a key, else free."""
        free = len(self._free)
        for block in reversed(blocks):  # so that the end of a sequence is forgotten before its beginning
            assert self._users[block] > 0, f"block {block} is released once too often"
            self._users[block] -= 1
            if self._users[block] == 0:
                self._num_used -= 1
                if block in self._content_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        if self.on_free is not None:
            self.on_free(self._free[free:])

    def name(self, block: int, content: Content) -> Content:
        """Say what a full, computed block holds; returns the name by which that is found from now on.

        A block keeps its first name. If another block has that name, or one with the same key, this one stays unnamed.
        """
        other = self._block_of.get(content.key)
        if other is not None:
            known = self._content_of[other]
            return known if same_content(known, content) else content
        if block not in self._content_of:
            self._content_of[block], self._block_of[content.key] = content, block
        return content

    def find(self, content: Content) -> tuple[int, Content] | None:
        """The block with that content, compared and not only by its key, and its name; or None."""
        block = self._block_of.get(content.key)
        if block is None or not same_content(known := self._content_of[block], content):
            return None
        return block, known

    def forget(self, blocks: Iterable[int]) -> None:
        """What these blocks hold is not to be found any more; users keep them."""
        freed = []
        for block in blocks:
            if block in self._content_of:
                del self._block_of[self._content_of.pop(block).key]
                if block in self._cached:
                    del self._cached[block]
                    self._free.append(block)
                    freed.append(block)
        if self.on_free is not None and freed:
            self.on_free(freed)

    def clear(self) -> None:
        """Forget all content."""
        self.forget(list(self._content_of))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount everything, given the blocks of every sequence that has any.

        Raises:
            RuntimeError: the sums do not add up; a bug in llmc.
        """
        users: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a sequence has a block twice: {table}")
            users.update(table)
        if any(self._users[b] != users[b] for b in range(self.num_blocks)):
            wrong = [b for b in range(self.num_blocks) if self._users[b] != users[b]]
            raise RuntimeError(f"users of blocks {wrong}: counted {[users[b] for b in wrong]}, kept others")
        used = len(users)
        if self.num_free + used + self.num_cached != self.num_blocks or used != self._num_used:
            raise RuntimeError(
                f"{self.num_free} free + {used} used + {self.num_cached} cached blocks != {self.num_blocks} in all "
                f"(used was kept as {self._num_used})"
            )
        if len(set(self._free) | set(self._cached) | set(users)) != self.num_blocks:
            raise RuntimeError("a block is free, cached and used at once")
        if {c.key: b for b, c in self._content_of.items()} != self._block_of or set(self._cached) - set(
            self._content_of
        ):
            raise RuntimeError("names of blocks and blocks of names differ, or a cached block has no name")


class StatePool:
    """Slots for the state of recurrent ops, one for each running sequence.

    A new owner's state starts at zero: the executor clears the slot of a sequence that has nothing computed.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return len(self._free)

    def acquire(self) -> int:
        """A slot; there has to be a free one."""
        assert self._free, "no free state slot"
        return self._free.pop()

    def release(self, slot: int) -> None:
        """Give a slot back."""
        assert 0 <= slot < self.num_slots, f"state slot {slot} does not exist"
        assert slot not in self._free, f"state slot {slot} is released twice"
        self._free.append(slot)
