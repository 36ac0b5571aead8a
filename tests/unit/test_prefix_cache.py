"""Entries and checkpoints of one pool: nothing is lost, doubly owned, or gone while somebody holds it."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.contracts.ids import BlockId, BlockKey, SlotId
from services.scheduler.block_keys import BlockKeys
from services.scheduler.blocks import BlockAllocator
from services.scheduler.prefix import Entry, PrefixCache, unshared
from services.scheduler.slots import SlotAllocator


def cache_of(blocks: int = 9, slots: int = 4) -> PrefixCache:
    return PrefixCache(BlockAllocator(blocks), SlotAllocator(slots))


def keys(text: str) -> tuple[BlockKey, ...]:
    """One key a letter, chained as the real ones are."""
    return tuple(BlockKey(text[: n + 1].encode()) for n in range(len(text)))


def cached(cache: PrefixCache, text: str) -> list[Entry]:
    """As a request leaves them: blocks taken, written, and let go of."""
    entries = held(cache, text)
    cache.let_go(entries)
    return entries


def held(cache: PrefixCache, text: str) -> list[Entry]:
    found = cache.find(keys(text))
    cache.hold(found)
    blocks = cache.take_blocks(len(text) - len(found))
    assert blocks is not None
    for key, block in zip(keys(text)[len(found) :], blocks, strict=True):
        found.append(cache.add(found[-1] if found else None, key, block))
    return found


# ---- keys
def prompt(*tokens: int) -> bytes:
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def test_a_key_names_its_tokens_and_all_before_them():
    of = BlockKeys("model").of_prompt
    a, b = of(prompt(*range(300))), of(prompt(*range(200), 7, *range(201, 300)))
    assert len(a) == 2 and a[0] == b[0] and a[1] != b[1]
    moved = of(prompt(*range(128, 256), *range(128, 256), 1))
    assert a[1] not in moved, "the same tokens after others are other rows"


def test_the_last_token_of_a_prompt_is_in_no_key():
    assert [len(BlockKeys("model").of_prompt(prompt(*range(n)))) for n in (1, 128, 129, 256, 257)] == [0, 0, 1, 1, 2]


def test_another_salt_gives_other_keys():
    tokens = prompt(*range(129))
    all_keys = {BlockKeys(*salt).of_prompt(tokens) for salt in [("m",), ("n",), ("m", ""), ("m", "d"), ("md",)]}
    assert len(all_keys) == 5


def test_rows_that_read_the_token_behind_them_have_it_in_their_key():
    one, other = prompt(*range(128), 1, 2), prompt(*range(128), 3, 2)
    assert BlockKeys("m").of_prompt(one) == BlockKeys("m").of_prompt(other)
    assert BlockKeys("m", tokens_ahead=1).of_prompt(one) != BlockKeys("m", tokens_ahead=1).of_prompt(other)


def test_keys_go_on_where_a_prompt_s_end():
    names, tokens = BlockKeys("m", tokens_ahead=1), prompt(*range(600))
    whole = names.of_prompt(tokens)
    assert names.after(whole[1], tokens[2 * 512 :], 2) == whole[2:4]


# ---- entries
def test_what_is_let_go_is_found_again_and_counts_as_free():
    cache = cache_of()
    cached(cache, "abc")
    assert [entry.key for entry in cache.find(keys("abx"))] == [b"a", b"ab"]
    assert (cache.blocks_in_use, cache.blocks_available, cache.cached_blocks) == (0, 8, 3)


def test_the_oldest_end_makes_way_first_and_what_is_held_stays():
    cache = cache_of(blocks=9)
    cached(cache, "abc")
    cached(cache, "xy")
    hand = held(cache, "ab")
    assert cache.take_blocks(4) is not None  # 3 were free: the end of "abc" goes
    assert len(cache.find(keys("abc"))) == 2 and len(cache.find(keys("xy"))) == 2
    assert cache.take_blocks(2) is not None
    assert not cache.find(keys("xy")) and cache.find(keys("ab")) == hand
    assert cache.take_blocks(1) is None
    cache.check()


def test_a_second_writer_of_the_same_tokens_keeps_its_own_block_while_the_first_is_read():
    cache = cache_of()
    first = held(cache, "a")
    (mine,) = cache.take_blocks(1) or []
    entry = cache.add(None, keys("a")[0], mine)
    assert entry is first[0] and entry.block != mine and unshared([mine], [entry]) == [mine]
    cache.let_go(first)
    assert cache.blocks_in_use == 2
    cache.check()


def test_a_second_writer_takes_the_place_of_what_nobody_reads():
    cache = cache_of()
    (old,) = cached(cache, "a")
    before = old.block
    (mine,) = cache.take_blocks(1) or []
    entry = cache.add(None, keys("a")[0], mine)
    assert entry.block == mine != before and unshared([mine], [entry]) == []
    assert cache.blocks_available == 7
    cache.check()


def test_a_checkpoint_goes_with_its_block_and_the_least_used_makes_way():
    cache = cache_of(blocks=4, slots=3)
    for text in "xy":
        slot = cache.take_slot()
        assert slot is not None
        cache.add_checkpoint(cached(cache, text)[0], slot)
    assert cache.take_slot(evict=False) is None and cache.slots_available == 2
    cache.let_go(held(cache, "x"))  # used just now
    assert cache.take_slot() is not None and cache.has_checkpoint(keys("x")[0]) and not cache.has_checkpoint(keys("y")[0])
    cache.take_blocks(3)
    assert (cache.cached_checkpoints, cache.slots_in_use, cache.checkpoints_evicted) == (0, 1, 2)
    cache.check()


class Lives(RuleBasedStateMachine):
    """Requests that find, write, share and leave, in any order, in a pool that is too small for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = cache_of(blocks=12, slots=5)
        self.requests: list[tuple[str, list[BlockId], list[Entry], SlotId]] = []

    @rule(text=st.text("ab", max_size=6), own=st.integers(0, 2))
    def comes(self, text: str, own: int) -> None:
        found = self.cache.find(keys(text))
        idle = sum(not entry.holders for entry in found)
        need = len(text) + own - len(found)
        if not self.cache.slots_available or self.cache.blocks_available - idle < need:
            return
        self.cache.hold(found)
        blocks, slot = self.cache.take_blocks(need), self.cache.take_slot()
        assert blocks is not None and slot is not None, "what is available can be had"
        self.requests.append((text, [entry.block for entry in found] + blocks, found, slot))

    @rule(which=st.integers(0, 9), checkpoint=st.booleans())
    def writes(self, which: int, checkpoint: bool) -> None:
        if not self.requests:
            return
        text, blocks, entries, _ = self.requests[which % len(self.requests)]
        if len(entries) < len(text):
            place = len(entries)
            entries.append(self.cache.add(entries[-1] if entries else None, keys(text)[place], blocks[place]))
            if checkpoint and (slot := self.cache.take_slot()) is not None:
                self.cache.add_checkpoint(entries[-1], slot)

    @rule(which=st.integers(0, 9))
    def leaves(self, which: int) -> None:
        if self.requests:
            _, blocks, entries, slot = self.requests.pop(which % len(self.requests))
            self.cache._blocks.free(unshared(blocks, entries))
            self.cache.let_go(entries)
            self.cache._slots.free(slot)

    @invariant()
    def nothing_is_shared_or_lost(self) -> None:
        self.cache.check()
        own = [block for _, blocks, entries, _ in self.requests for block in unshared(blocks, entries)]
        read = {entry for _, _, entries, _ in self.requests for entry in entries}
        assert len(set(own)) == len(own) and not set(own) & {entry.block for entry in read}
        assert self.cache.blocks_in_use == len(own) + len(read)
        assert self.cache.slots_in_use == len(self.requests)
        for text, _, entries, _ in self.requests:
            assert self.cache.find(keys(text))[: len(entries)] == entries, "an entry left while it was held"


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
