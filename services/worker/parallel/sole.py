"""The expert dispatcher of one rank that has all experts: nothing travels, in either mode."""

from collections.abc import Callable

import torch

from services.worker.model.batch import LocalExperts, Mode


class SoleExperts:
    """services.worker.model.batch.ExpertDispatcher of a group of one, for GPUs: it asks nothing of the host, so a round can be
    captured. On a CPU a group of one takes GlooExperts, with the layouts of a larger one."""

    def forward(
        self,
        mode: Mode,
        z: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: LocalExperts,
        overlap: Callable[[], None] | None = None,
    ) -> torch.Tensor:
        """As ExpertDispatcher.forward."""
        if overlap is not None:
            overlap()
        return experts.routed(z, ids, weights)
