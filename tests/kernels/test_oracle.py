"""The independent forward pass against the golden logits, and what it accepts as greedy output."""

import numpy as np
import pytest

from tests.lib.golden import FIXED_ROUTING, GOLDEN, TINY, golden_values, needs_golden, prompts
from tests.lib.oracle import TIE, Oracle

pytestmark = needs_golden


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(GOLDEN / TINY)


@pytest.mark.parametrize("name", [TINY, FIXED_ROUTING])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_logits_agree_with_the_golden_ones(name: str, dtype: type) -> None:
    oracle = Oracle(GOLDEN / name, dtype)
    for number, prompt in enumerate(prompts(name)):
        golden = golden_values(name)[f"logits_{number}"]
        logits = oracle.logits(prompt)
        assert logits.dtype == dtype
        assert np.linalg.norm(logits - golden) / np.linalg.norm(golden) < 1e-4


def test_a_row_does_not_depend_on_later_tokens(oracle: Oracle) -> None:
    prompt = prompts(TINY)[2]
    whole = oracle.logits(prompt)
    for length in (1, 7, 20):
        assert np.abs(oracle.logits(prompt[:length]) - whole[:length]).max() < TIE


def greedy(oracle: Oracle, prompt: list[int], count: int) -> list[int]:
    """A full recompute for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_output_is_accepted_and_each_wrong_token_is_named(oracle: Oracle) -> None:
    prompt = prompts(TINY)[1]
    output = greedy(oracle, prompt, 12)
    oracle.assert_greedy(prompt, output)
    for step in range(len(output)):
        wrong = [*output[:step], (output[step] + 1) % 512]
        with pytest.raises(AssertionError, match=rf"output token {step} is {wrong[step]}, but {output[step]}"):
            oracle.assert_greedy(prompt, wrong)


def test_an_output_shifted_by_one_token_is_refused(oracle: Oracle) -> None:
    prompt = prompts(TINY)[1]
    output = greedy(oracle, prompt, 6)
    with pytest.raises(AssertionError, match="output token 0"):
        oracle.assert_greedy(prompt, output[1:])
