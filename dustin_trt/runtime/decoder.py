"""The decoding loop: draft, score and select, verify, accept, commit."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from dustin_trt import sampling
from dustin_trt.drafting import Batch, Drafter, Proposal
from dustin_trt.engines.base import Engine, Verification
from dustin_trt.policies import Policy
from dustin_trt.runtime.sequence import Chunk, Request, Sequence
from dustin_trt.runtime.stats import RunStats

Accept = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`sampling.accept`'s signature."""


class Decoder:
    """Runs requests through slots that are refilled as rows finish (in-flight batching).

    Parameters
    ----------
    target : verifies
    drafter : proposes
    policy : says what verification may read
    gamma : Γ, draft tokens a step
    tokenizer : for text and stop strings; may be None
    eos : end-of-sequence tokens
    max_batch_size : rows at a time; None means every slot of the cache
    prefill_chunk : prompt tokens a forward pass
    record_selections : keep what each pass read in `RequestOutput.selections`
    on_prefill : called with (request, tokens done) while a prompt is cached

    Attributes
    ----------
    stats : totals of the current or last run
    accept : what a benchmark puts in the place of `sampling.accept`; None elsewhere
    """

    def __init__(
        self,
        target: Engine,
        drafter: Drafter,
        policy: Policy,
        *,
        gamma: int,
        tokenizer: Any = None,
        eos: frozenset[int] = frozenset(),
        max_batch_size: int | None = None,
        prefill_chunk: int = 512,
        record_selections: bool = False,
        on_prefill: Callable[[Request, int], None] | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.policy = policy
        self.gamma = gamma
        self.tokenizer = tokenizer
        self.eos = eos
        self.max_batch_size = max_batch_size or target.cache.num_slots
        self.prefill_chunk = prefill_chunk
        self.record_selections = record_selections
        self.on_prefill = on_prefill
        self.accept: Accept | None = None
        self.stats = RunStats()
        self._running: list[Sequence] = []

    def run(self, requests: Iterable[Request]) -> Generator[Chunk, None, None]:
        """Serve requests in order, yielding what each step commits.

        Requests are taken from the iterable only when a slot is free. Closing the iterator early
        frees the slots.
        """
        if self.target.cache.in_use:
            raise RuntimeError("this cache is running already: finish or close that run first")
        self.target.cache.in_use = True
        self.stats = RunStats()
        waiting = deque[Request]()
        source = iter(requests)
        try:
            while True:
                yield from self._admit(waiting, source)
                if not self._running:
                    return
                yield from self._step()
        finally:
            for sequence in self._running:
                self.drafter.release(sequence.slot)
            self._running = []
            self.target.cache.in_use = False

    def _step(self) -> Iterator[Chunk]:
        batch = self._batch()
        proposal = self.drafter.propose(batch, self.gamma)
        started = time.perf_counter()
        selection = self.policy.plan(self.target, batch, proposal)
        planning = {"select": time.perf_counter() - started}
        window = proposal.window(batch.last)
        verified = self.target.verify(batch.slots, window, selection)
        started = time.perf_counter()
        accepted, following = (self.accept or sampling.accept)(
            verified.logits,
            proposal.tokens,
            proposal.counts,
            proposal.probs,
            batch.uniforms[:, self.gamma :],
            batch.sampling,
        )
        failures = self._failures(batch, window, verified, accepted)
        committed = self._commit(batch, proposal, verified, accepted, following, failures)
        accepting = {"accept": time.perf_counter() - started}
        self.stats.add_step(
            len(self._running), committed, proposal.seconds, planning, verified.seconds, accepting
        )
        yield from self._chunks()

    def _batch(self) -> Batch:
        rows = self._running
        params = [row.request.params for row in rows]
        device = self.target.cache.lengths.device

        def column(values: list, dtype: torch.dtype = torch.long) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            slots=column([row.slot for row in rows]),
            last=column([row.tokens[-1] for row in rows]),
            previous=column([row.tokens[-2] for row in rows]),
            limits=column([row.remaining - 1 for row in rows]),
            history_queries=torch.stack([row.history_queries for row in rows]),
            uniforms=torch.stack([row.uniforms(2 * self.gamma + 1) for row in rows]).to(device),
            sampling=sampling.SamplingBatch(
                temperature=column([p.temperature for p in params], torch.float32),
                top_k=column([p.top_k for p in params]),
                top_p=column([p.top_p for p in params], torch.float32),
            ),
            tokens=[row.tokens for row in rows],
        )

    def _commit(
        self,
        batch: Batch,
        proposal: Proposal,
        verified: Verification,
        accepted: torch.Tensor,
        following: torch.Tensor,
        failures: dict[int, str],
    ) -> int:
        """Move the lengths and give every row its tokens; how many those are."""
        committed = 0
        history = self.target.cache.lengths[batch.slots].tolist()
        self.target.commit(batch.slots, accepted + 1)
        self.drafter.commit(batch.slots, accepted + 1)
        drafts, counts = proposal.tokens.tolist(), proposal.counts.tolist()
        read, coverage = verified.counts.tolist(), verified.coverage.tolist()
        guarded = verified.guarded.tolist()
        following_tokens = following.tolist()
        for b, (row, n) in enumerate(zip(self._running, accepted.tolist(), strict=True)):
            if b in failures:
                row.fail(failures[b])
                continue
            kept = row.commit([*drafts[b][:n], following_tokens[b]])
            row.history_queries = verified.srh_queries[b, n]
            row.stats.add_step(
                drafted=counts[b], accepted=min(n, kept), committed=kept,
                read=read[b], history=history[b], coverage=coverage[b], guarded=guarded[b],
            )  # fmt: skip
            if self.record_selections:
                chosen = None if guarded[b] else verified.indices
                row.selections.append(None if chosen is None else chosen[b, : read[b]].cpu())
            committed += kept
        return committed

    def _failures(
        self,
        batch: Batch,
        window: torch.Tensor,
        verified: Verification,
        accepted: torch.Tensor,
    ) -> dict[int, str]:
        """Rows whose logits are NaN or infinite, and where in the model that began.

        Only what was used counts, not what lies past a row's accepted drafts.
        """
        # Both ends of a row say whether all of it is finite, at a tenth of the time.
        ends = torch.stack([verified.logits.amax(2), verified.logits.amin(2)])
        finite = torch.isfinite(ends).all(0)
        used = torch.arange(window.shape[1], device=window.device) <= accepted[:, None]
        failures = {}
        for b in (used & ~finite).any(1).nonzero().flatten().tolist():
            where = self.target.non_finite_place(int(batch.slots[b]), window[b])
            failures[b] = _non_finite(where)
        return failures

    def _chunks(self) -> Iterator[Chunk]:
        """Free the slots of finished rows, then give out what the step committed."""
        rows = self._running
        self._running = [row for row in rows if row.finish_reason is None]
        for row in rows:
            if row.finish_reason is not None:
                self.drafter.release(row.slot)
        for row in rows:
            yield row.chunk()

    def _admit(self, waiting: deque[Request], source: Iterator[Request]) -> Iterator[Chunk]:
        """Prefill prompts into free slots and commit their first tokens."""
        while len(self._running) < self.max_batch_size:
            if not waiting and (request := next(source, None)) is not None:
                waiting.append(request)
            if not waiting or (slot := self._reserve(waiting[0])) is None:
                return
            sequence = Sequence(waiting.popleft(), slot, self.tokenizer, self.eos)
            self._running.append(sequence)
            self._prefill(sequence)
            if sequence.finish_reason is not None:
                self._running.remove(sequence)
                self.drafter.release(slot)
            yield sequence.chunk()

    def _reserve(self, request: Request) -> int | None:
        """A slot with room for the whole request; None when it must wait."""
        cache = self.target.cache
        taken = {row.slot for row in self._running}
        free = [slot for slot in range(cache.num_slots) if slot not in taken]
        if not free:
            return None

        def gain(slot: int) -> int:  # tokens that need no second prefill, less those that may
            reused = cache.resident_prefix(slot, request.prompt)
            return reused - (len(cache.resident[slot]) - reused)

        slot = max(free, key=gain)
        for other in sorted(free, key=gain):  # prompts kept for reuse make room for one that waits
            if not cache.can_reserve(slot, self._room(request)) and other != slot:
                cache.release(other)
        if not cache.can_reserve(slot, self._room(request)) and self._running:
            return None
        cache.reserve(slot, self._room(request))
        return slot

    def _room(self, request: Request) -> int:
        # The window of a step reaches Γ past the last token that can be committed.
        return len(request.prompt) + request.params.max_tokens + self.gamma

    def _prefill(self, sequence: Sequence) -> None:
        request, started = sequence.request, time.perf_counter()
        progress = self.on_prefill
        prefill = self.target.prefill(
            sequence.slot,
            request.prompt,
            chunk=self.prefill_chunk,
            progress=progress and (lambda done: progress(request, done)),
        )
        if not torch.isfinite(prefill.logits).all():
            self.target.cache.forget(sequence.slot)
            place = self.target.non_finite_place(sequence.slot, torch.tensor(request.prompt))
            sequence.fail(_non_finite(place))
            return
        if request.params.max_tokens > 1:
            self.drafter.admit(sequence.slot, request.prompt, self._room(request))
        sequence.history_queries = prefill.srh_queries
        sequence.stats.cached_prompt_tokens = prefill.reused
        sequence.commit([self._first_token(sequence, prefill.logits)])
        sequence.stats.prefill_seconds = time.perf_counter() - started
        self.stats.prefill_seconds += sequence.stats.prefill_seconds

    def _first_token(self, sequence: Sequence, logits: torch.Tensor) -> int:
        params = sequence.request.params
        one = sampling.SamplingBatch(
            temperature=logits.new_tensor([params.temperature]),
            top_k=torch.tensor([params.top_k], device=logits.device),
            top_p=logits.new_tensor([params.top_p]),
        )
        logits = logits[None]
        probs = sampling.draft_probabilities(logits, one)
        return int(sampling.sample(logits, probs, sequence.uniforms(1).to(logits.device), one))


def _non_finite(where: str) -> str:
    return (
        f"the model produced non-finite logits, first in {where}: check the checkpoint, or use "
        "dtype float32 or bfloat16 instead of float16"
    )
