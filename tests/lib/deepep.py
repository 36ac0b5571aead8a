"""DeepEP's Buffer on a CPU: its contract over gloo. Rows and counts are there when the hook has been called, and poison before;
what the build was not compiled for is refused on the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from services.worker.parallel import low_latency, normal
from services.worker.parallel.group import Group


class EmulatedBuffer:
    """services.worker.parallel.deepep.Buffer."""

    def __init__(self, group: Group, num_experts: int, widths: tuple[int, ...], most_routes: int):
        self._group, self._num_local = group, num_experts // group.size
        self._widths, self._most_routes = widths, most_routes
        self._calls = 0
        self.low_latency_calls = 0

    def get_dispatch_layout(self, ids: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert ids.dtype == torch.int64 and num_experts == self._num_local * self._group.size
        return "per rank", None, "per expert", "in rank", None

    def dispatch(self, x: Tensor, **options: Any) -> tuple[Any, ...]:
        layout = [options[name] for name in ("num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank")]
        assert layout == ["per rank", "per expert", "in rank"]
        self._calls += 1
        ids, weights = options["topk_idx"], options["topk_weights"]
        rows, handle = normal.dispatch(self._group, self._num_local, self._calls, x, ids, weights, None)
        return rows.x, rows.ids, rows.weights, [], handle, None

    def combine(self, x: Tensor, handle: Any) -> tuple[Any, ...]:
        return normal.combine(self._group, x, handle), None, None

    def low_latency_dispatch(self, x: Tensor, ids: Tensor, rows: int, experts: int, **options: Any) -> tuple[Any, ...]:
        if x.shape[1] not in self._widths:
            raise RuntimeError("Unsupported hidden")
        if ids.shape[1] > self._most_routes:
            raise RuntimeError("num_topk <= kNumMaxTopK")
        assert options == {"use_fp8": False, "return_recv_hook": True} and ids.is_contiguous() and x.is_contiguous()
        self._calls += 1
        self.low_latency_calls += 1
        arrived, handle = low_latency.dispatch(self._group, self._num_local, rows, self._calls, x, ids, None, None)
        received = torch.full((self._num_local, self._group.size * rows, x.shape[1]), torch.nan, dtype=x.dtype)
        counts = torch.full_like(arrived.counts, -1)

        def arrive() -> None:
            received[:, : arrived.x.shape[1]] = arrived.x
            counts.copy_(arrived.counts)

        return received, counts, handle, None, arrive

    def low_latency_combine(
        self, x: Tensor, ids: Tensor, weights: Tensor, handle: Any, **options: Any
    ) -> tuple[Tensor, None, Callable[[], None]]:
        assert options == {"return_recv_hook": True} and weights.is_contiguous()
        self.low_latency_calls += 1
        out = torch.full((ids.shape[0], x.shape[2]), torch.nan, dtype=x.dtype)
        combined = low_latency.combine(self._group, x, ids, weights, handle)

        def arrive() -> None:
            out.copy_(combined)

        return out, None, arrive

    def clean_low_latency_buffer(self, rows: int, hidden: int, experts: int) -> None:
        assert hidden in self._widths
