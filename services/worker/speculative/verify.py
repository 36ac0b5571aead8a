"""Which of a window's proposals are kept (spec speculation §7).

Every row's token is chosen as a round without speculation chooses it, by the same law and the same coin of (seed, position),
and a proposal is accepted iff it is that token. So whatever is proposed, the request gets the tokens that it would get without
speculation, greedy or sampled, at every width. A proposal t passes with probability P(t), and given that it does not, the
token has the law P without t: this is point-mass rejection sampling whose accept coin and residual coin are one coin.
"""

from collections.abc import Sequence

from torch import Tensor

from services.worker.speculative.sampling import Sampling, draw


def choose(logits: Tensor, rules: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """The target's token after each row: logits [B, w, V] float32 of rows at positions[b] .. positions[b] + w - 1 ->
    [B, w] int64, NOT_FINITE where logits are not finite. Windows behind the last rule belong to nobody."""
    width = logits.shape[1]
    after = [position + row + 1 for position in positions for row in range(width)]
    return draw(logits.flatten(0, 1), [rule for rule in rules for _ in range(width)], after).view(-1, width)


def accepted(windows: Tensor, chosen: Tensor) -> Tensor:
    """How many rows of each window count, its anchor among them: windows, chosen [B, w] -> [B] int64, 1 to w.

    Row i counts if each proposal up to it is what the target chose after the row before. As many tokens are emitted,
    chosen[b, :a]; the last of them is the next anchor, which no row has evaluated.
    """
    return 1 + (windows[:, 1:] == chosen[:, :-1]).long().cumprod(1).sum(1)
