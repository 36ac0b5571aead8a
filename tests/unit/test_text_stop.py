"""Promises of stop strings: nothing of one leaks, and the cut does not depend on how the text was split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.finish(), matcher.matched


def by_single_characters(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: read on until the text ends in a stop string; the longest one counts."""
    for end in range(1, len(text) + 1):
        endings = [stop for stop in stops if text[:end].endswith(stop)]
        if endings:
            longest = max(endings, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("size", range(1, 27))
def test_nothing_of_a_stop_string_appears_whatever_the_chunk_size(size: int) -> None:
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pieces = [alphabet[at : at + size] for at in range(0, 26, size)]
    assert run(["DEFGHIJ"], pieces) == ("ABC", "DEFGHIJ")


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.text("abc", max_size=4), max_size=8)
)
def test_any_split_gives_what_a_reader_of_single_characters_sees(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == by_single_characters(stops, "".join(pieces))


def test_a_beginning_that_comes_to_nothing_is_shown() -> None:
    matcher = StopStrings(["END."])
    assert matcher.push("the EN") == "the "
    assert matcher.push("OUGH") == "ENOUGH"
    assert matcher.push(" EN") == " "
    assert matcher.finish() == "EN"
    assert matcher.matched is None


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStrings([]).push("anything") == "anything"
