"""A prompt that starts from a checkpoint drafts as one that was computed whole: nothing of a drafter is left behind."""

import pytest
import torch

from services.contracts.ids import NULL_SLOT
from services.worker.wire import ChunkRow, FirstToken, ForgetRooms, PrefillStep, StepDone
from tests.lib.drafted import GREEDY, Checkpoints, SpeculativeRank, packed

CHECKPOINT, EXACT = 5, 1e-5


@pytest.fixture(scope="module", params=["DSPARK", "MTP"])
def rank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SpeculativeRank:
    made = Checkpoints(tmp_path_factory.mktemp("resume"))
    if request.param == "DSPARK":
        return SpeculativeRank(made.target, made.dspark("1,3,5", "attn_res", True))
    return SpeculativeRank(made.target, made.target, "MTP", width=4)


class Steps:
    def __init__(self, rank: SpeculativeRank):
        self.rank, self.count = rank, 0

    def __call__(
        self, prompt: list[int], start: int, end: int, table: list[int], slot: int, load: int = NULL_SLOT, save: int = NULL_SLOT
    ) -> FirstToken | None:
        """One chunk of a prompt whose blocks are `table`; the first chunk brings all of them."""
        self.count += 1
        last = end == len(prompt)
        tokens = packed(prompt[start:end])
        first = start == 0 or load != NULL_SLOT
        row = ChunkRow(
            f"r{slot}", slot, start, end, last, tokens, tuple(table) if first else (), slot, GREEDY if last else None, 0,
            0 if last else prompt[end], proposals=self.rank.width - 1 if last else 0, load_slot=load, save_slot=save,
        )  # fmt: skip
        done = self.rank.prefill.execute(PrefillStep(self.count, (row,)))
        assert isinstance(done, StepDone)
        if last:
            self.rank.prefill.execute(ForgetRooms((slot,)))
        return done.first_tokens[0] if last else None


def test_windows_and_draft_rows_behind_a_checkpoint_are_those_of_a_whole_prompt(rank: SpeculativeRank):
    tokens = torch.randint(0, 256, (500,), generator=torch.Generator().manual_seed(3)).tolist()
    before, prompt = tokens[:290], [*tokens[:258], *tokens[300:400]]  # alike as far as the token behind the last shared block
    step = Steps(rank)
    step(before, 0, 256, [1, 2, 3, 4], slot=1, save=CHECKPOINT)
    step(before, 256, 290, [], slot=1)
    resumed = step(prompt, 256, 358, [1, 2, 8, 9], slot=2, load=CHECKPOINT)
    step(prompt, 0, 128, [11, 12, 13, 14], slot=3)
    whole = step(prompt, 128, 358, [], slot=3)
    assert resumed is not None and whole is not None and resumed.window == whole.window
    for pool in (*rank.caches.draft.values(), *rank.caches.mla.values()):
        ours, theirs = (torch.cat([pool[block, :, 0] for block in table])[:358] for table in ([1, 2, 8, 9], [11, 12, 13, 14]))
        assert (ours - theirs).abs().max() < EXACT * theirs.abs().max()
