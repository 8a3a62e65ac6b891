"""What the capture needs of vLLM's model runner: whose rows a step holds, and a block around it.

Private parts used: `_update_states`, `execute_model`, `input_batch.req_ids`, `requests[...]`
(`num_computed_tokens`, `sampling_params.extra_args`). Right after `_update_states` the batch order
is final for the step, and `num_computed_tokens` is the position of a request's first row: tried
with chunked prefill, decode and forced preemption.
"""

from __future__ import annotations

from typing import Any

from capture.adapters.nnsight_block import start_step, step_error
from capture.rank import RankCapture
from capture.rows import Span

EXTRA_ARG = "attnstore"


class StepCaptureRunner:
    """Mixin over nnsight's model runner: one block per step, scoped to the whole slab."""

    rank_capture: RankCapture | None = None
    _step_block: Any = None

    def _update_states(self, scheduler_output: Any) -> Any:
        deferred = super()._update_states(scheduler_output)  # type: ignore[misc]
        capture, self._step_block = self.rank_capture, None
        if capture is not None and capture.begin_step(self._spans(scheduler_output)):
            self._step_block = start_step(self.nnsight_model, capture.reads, capture)  # type: ignore[attr-defined]
        return deferred

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        output = super().execute_model(scheduler_output, intermediate_tensors)  # type: ignore[misc]
        block, self._step_block = self._step_block, None
        if block is not None and self.rank_capture is not None:
            self.rank_capture.end_step(step_error(block))
        return output

    def _spans(self, scheduler_output: Any) -> list[Span]:
        scheduled = scheduler_output.num_scheduled_tokens
        spans: list[Span] = []
        for request_id in self.input_batch.req_ids:  # type: ignore[attr-defined]
            num_rows = scheduled.get(request_id)
            if not num_rows:
                continue
            state = self.requests[request_id]  # type: ignore[attr-defined]
            params = state.sampling_params
            owner = (params.extra_args or {}).get(EXTRA_ARG) if params is not None else None
            unit, prompt = owner if owner is not None else (None, 0)
            spans.append(Span(unit, prompt, int(state.num_computed_tokens), int(num_rows)))
        return spans
