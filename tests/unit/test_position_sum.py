"""What the GPU's checksum promises, on its reference; tests/gpu holds the kernels to that reference."""

from hypothesis import given
from hypothesis import strategies as st

from tests.lib.position_sum import position_sum

frames = st.binary(min_size=1, max_size=200)


def test_the_first_word_s_weight_is_as_defined():
    mixed = 0x9E3779B97F4A7C15
    assert position_sum(b"\x01") == (mixed ^ mixed >> 32) | 1 == 0x9E3779B9E17D05AD


@given(frames, st.data())
def test_any_change_of_one_byte_shows(frame: bytes, data: st.DataObject):
    at, flips = data.draw(st.integers(0, len(frame) - 1)), data.draw(st.integers(1, 255))
    wrong = bytes(byte ^ flips if n == at else byte for n, byte in enumerate(frame))
    assert position_sum(wrong) != position_sum(frame)


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=2, max_size=20, unique=True), st.data())
def test_words_in_another_order_show(words: list[int], data: st.DataObject):
    one, other = sorted(data.draw(st.lists(st.integers(0, len(words) - 1), min_size=2, max_size=2, unique=True)))
    swapped = [*words]
    swapped[one], swapped[other] = words[other], words[one]
    first, second = (position_sum(b"".join(word.to_bytes(8, "little") for word in it)) for it in (words, swapped))
    difference = (words[one] - words[other]) % (1 << 64)
    assert first != second or difference & -difference >= 1 << 32, "only words that agree in their low half may pass"


@given(frames, st.data())
def test_a_frame_may_be_summed_in_parts_cut_anywhere(frame: bytes, data: st.DataObject):
    cut = data.draw(st.integers(0, len(frame)))
    parts = frame[:cut] + bytes(len(frame) - cut), bytes(cut) + frame[cut:]
    assert sum(map(position_sum, parts)) % (1 << 64) == position_sum(frame)
