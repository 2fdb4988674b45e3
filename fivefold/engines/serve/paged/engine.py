"""Requests in, pieces of answers out: scheduler, runner and sampler, one step at a time."""

from __future__ import annotations

# W rows that sample, D hidden, V vocabulary
import time
from collections.abc import Mapping
from itertools import count

from torch import Tensor

from fivefold.core.errors import one_line
from fivefold.engines.serve.completion import FinishReason
from fivefold.engines.serve.paged.answers import Answer, Group, Output
from fivefold.engines.serve.paged.prompt_report import PromptReport
from fivefold.engines.serve.paged.served import Served, ServedDecoder
from fivefold.engines.serve.paged.settings import EngineSettings
from fivefold.engines.serve.paged.state import EngineState
from fivefold.engines.serve.prepare import Preparation, Prompt
from fivefold.engines.serve.request import Request
from fivefold.engines.serve.row_sampler import RowSampler, SampledRows
from fivefold.engines.serve.sampling_params import SamplingParams
from fivefold.engines.serve.scheduling import admission
from fivefold.engines.serve.scheduling.blocks import BlockManager
from fivefold.engines.serve.scheduling.plan import StepPlan
from fivefold.engines.serve.scheduling.prefix import PrefixIndex
from fivefold.engines.serve.scheduling.scheduler import Scheduler
from fivefold.engines.serve.scheduling.sequence import Sequence
from fivefold.engines.serve.structured.grammars import Grammars
from fivefold.model.decoder import Decoder
from fivefold.text.tokenizer import Tokenizer


class Engine:
    """Serves one model. Not for several threads: one calls `step` again and again.

    `model`: a decoder, or what ranks hold of one. `tokenizer` may be None when prompts are token
    ids and no text is wanted. Raises MemoryBudgetError when the model leaves no room for a cache.
    """

    def __init__(
        self,
        model: Decoder | Served,
        tokenizer: Tokenizer | None,
        settings: EngineSettings | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings = settings or EngineSettings()
        context = settings.context(model.config)
        served = ServedDecoder(model, settings) if isinstance(model, Decoder) else model
        self.served, self.decoder, self.runner = served, served.decoder, served.runner
        self.why_modules = served.why_modules
        """Why steps walk the decoder's modules; None: they are one native call each."""
        self.preparation = Preparation(served.config, tokenizer, context)
        blocks, size = served.blocks, settings.block_size
        self.blocks = BlockManager(blocks, size)
        self.prefix = PrefixIndex(self.blocks)
        self.scheduler = Scheduler(
            self.blocks,
            self.prefix,
            max_sequences=settings.max_sequences,
            token_budget=max(settings.token_budget, settings.max_sequences),
            queue_limit=settings.queue_limit,
        )
        ends = self.preparation.end_tokens
        words = served.config.vocab_size
        grammars = Grammars(tokenizer, words, ends)
        self.sampler = RowSampler(words, ends, served.device, grammars)
        self.paused = False
        self.version = 0
        """Counts the changes of weights."""
        self.weights = served.weights
        self.last_error: Exception | None = None
        """Why answers ended with "error"."""
        self._ids = count()
        self._groups: dict[int, Group] = {}
        self._answers: dict[int, Answer] = {}  # by sequence

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return bool(self._groups)

    def add_request(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, tenant: str = ""
    ) -> int:
        """Queue a request: its id.

        Requests of lower `priority` run first; those of different tenants share no cached prefix.
        Raises PromptError for what the model or the cache cannot take, QueueFullError when too
        many wait.
        """
        request = self._request(prompt, params)
        sequence = self._sequence(request, tenant.encode(), priority)
        sequence.match_prefix &= params.prompt_logprobs is None
        self.scheduler.add(sequence)
        group = Group(sequence.id, params, time.perf_counter())
        answer = self._enter(group, request, sequence)
        if params.prompt_logprobs is not None:
            answer.report = PromptReport(request.prompt, params.prompt_logprobs)
            request.prompt_logprobs = answer.report.found
        self._groups[group.id] = group
        return group.id

    def check_request(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's token ids. Raises PromptError as `add_request` would."""
        request = self._request(prompt, params)
        admission.check(self._sequence(request, b"", 0), self.blocks)
        return request.prompt

    def step(self) -> list[Output]:
        """Compute one step: the new piece of every answer that got a token.

        An error in here ends the answers that were being computed, with the reason "error", and
        is kept as `last_error`.
        """
        if self.paused or self.weights.sleeping or not self.scheduler.has_work:
            return []
        plan = self.scheduler.schedule()
        try:
            answers, sampled = self._compute(plan)
        except BaseException as error:
            self.scheduler.fail(plan)
            ids = {chunk.sequence.id for chunk in plan.chunks}
            found = self._answers.values()
            failed = [a for a in found if a.sequence.id in ids or a.is_unscheduled]
            why = f"{type(error).__name__}: {one_line(error)}"
            outputs = [self._end(answer, "error", why) for answer in failed]
            if not isinstance(error, Exception):
                raise
            self.last_error = error
            return outputs
        return self._take(plan, answers, sampled)

    def abort(self, id: int) -> list[Output]:
        """End a request: its blocks are free at once. The last pieces of its answers."""
        group = self._groups.get(id)
        answers = [] if group is None else list(group.answers)
        return [self._end(answer, "abort", None) for answer in answers]

    def abort_all(self) -> list[Output]:
        """End all requests."""
        return [output for id in list(self._groups) for output in self.abort(id)]

    def pause(self) -> None:
        """Compute nothing until `resume`; requests may come and go."""
        self.paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self.paused = False

    def update_weights(self, state: Mapping[str, Tensor], *, partial: bool = False) -> None:
        """Copy new weights into the decoder's own; `partial`: not all of them.

        Nothing that the old ones computed is used again: cached prefixes are forgotten, and
        running requests compute their tokens so far anew. Raises EngineError, before anything
        changes, for names or shapes that are not the decoder's.
        """
        self.weights.update(state, partial)
        self.forget_cache()

    def forget_cache(self) -> None:
        """Compute everything anew: the weights were changed from outside."""
        self.weights.repack()
        self.version += 1
        self.scheduler.restart(b"weights %d" % self.version)

    def sleep(self, level: int = 1) -> None:
        """Give memory back until `wake_up`: 1 that of keys and values, 2 that of weights as well.

        Requests stay, and go on with their tokens so far. Raises EngineError for other levels, or
        when it sleeps already.
        """
        self.weights.sleep(level)
        self.forget_cache()

    def wake_up(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Take the memory again. After level 2 all weights must be given, after 1 they may be.

        Raises EngineError, and sleeps on, without them or for names or shapes that differ.
        """
        self.weights.wake_up(state)
        self.forget_cache()

    def close(self) -> None:
        """End what runs beside this process; nothing can be computed after that."""
        self.served.close()

    def state(self) -> EngineState:
        """Counts for metrics."""
        scheduler, blocks, prefix = self.scheduler, self.blocks, self.prefix
        return EngineState(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            blocks=blocks.num_blocks,
            blocks_owned=blocks.owned_count,
            blocks_cached=blocks.cached_count,
            tokens_asked=prefix.tokens_asked,
            tokens_hit=prefix.tokens_hit,
            preemptions=scheduler.preemptions,
            steps=scheduler.steps,
        )

    def check_idle(self) -> None:
        """Raise AssertionError unless all blocks are free or cached and no request is held."""
        if self.has_work:
            raise AssertionError(f"{len(self._groups)} requests have not ended")
        self.scheduler.invariants()
        if self.scheduler.has_work or self._answers or len(self.sampler):
            raise AssertionError("a sequence outlives its request")
        if self.blocks.owned_count:
            raise AssertionError(f"{self.blocks.owned_count} blocks are owned by nobody")

    def _compute(self, plan: StepPlan) -> tuple[list[Answer], SampledRows]:
        """Run the plan and sample: the answers that get a token, forks included, and the tokens."""
        for chunk in plan.chunks:
            if chunk.start < chunk.sequence.prompt_length:
                self._answers[chunk.sequence.id].begin()
        logits = self._logits(plan)
        chunks = [chunk for chunk in plan.chunks if chunk.samples]
        answers: list[Answer] = []
        rows: list[int] = []
        for row, chunk in enumerate(chunks):
            answer = self._answers[chunk.sequence.id]
            family = [answer, *self._forks(answer)] if answer.must_fork else [answer]
            answers += family
            rows += [row] * len(family)
        if len(rows) > len(chunks):
            logits = logits[rows]
        if not answers:
            return [], SampledRows([], [], {})
        return answers, self.sampler.sample(logits, [a.sequence.id for a in answers])

    def _logits(self, plan: StepPlan) -> Tensor:
        """[W,V] of the chunks that sample; reports on prompts are filled on the way."""
        reports: dict[int, PromptReport] = {}
        for chunk in plan.chunks:
            report = self._answers[chunk.sequence.id].report
            if report is not None and not report.is_done:
                reports[chunk.sequence.id] = report
        hidden = self.runner.hidden(plan, reports)
        if not reports:
            return self.runner.logits(hidden)
        ends, place = [], 0
        for chunk in plan.chunks:
            report = reports.get(chunk.sequence.id)
            if report is None:
                place += chunk.samples
            else:
                rows = hidden[place : place + chunk.count]
                report.take(chunk.start, self.runner.logits_in_pieces(rows))
                place += chunk.count
            if chunk.samples:
                ends.append(place - 1)
        return self.runner.logits(hidden[ends])

    def _forks(self, first: Answer) -> list[Answer]:
        """The other answers of a request whose prompt has just been read."""
        group, made = first.group, []
        group.cached_tokens = first.sequence.hit
        for _ in range(1, group.params.candidates):
            request = self.preparation.request(first.request.prompt, group.params)
            request.prompt_logprobs = first.request.prompt_logprobs
            request.queue_seconds = first.request.queue_seconds
            sequence = self._sequence(request, first.sequence.salt, first.sequence.priority)
            made.append(self._enter(group, request, sequence))
        return made

    def _take(self, plan: StepPlan, answers: list[Answer], sampled: SampledRows) -> list[Output]:
        """Bring the scheduler up to date and hand out what is new."""
        tokens = zip(answers, sampled.tokens, strict=True)
        known = {a.sequence.id: [token] for a, token in tokens if not a.is_unscheduled}
        self.scheduler.update(plan, known)
        outputs = []
        for place, answer in enumerate(answers):
            if place in sampled.broken:
                outputs.append(self._end(answer, "error", str(sampled.broken[place])))
                continue
            if not answer.request.token_ids and answer.index == 0:
                answer.group.cached_tokens = answer.sequence.hit
            token = sampled.tokens[place]
            outputs.append(answer.accept(token, sampled.logprobs[place]))
            ended = answer.request.finish_reason is not None
            if answer.is_unscheduled:
                answer.sequence.tokens.append(token)
                if not ended:
                    self.scheduler.fork(answer.group.id, answer.sequence)
        for answer in answers:
            reason = answer.request.finish_reason
            if reason is not None and answer.sequence.id in self._answers:
                self._leave(answer, reason)
        return outputs

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        if params.structured_outputs is not None:
            self.sampler.grammars.matcher(params.structured_outputs)  # compiled, or refused, here
        return self.preparation.request(prompt, params)

    def _sequence(self, request: Request, salt: bytes, priority: int) -> Sequence:
        return Sequence(
            id=next(self._ids),
            tokens=list(request.prompt),
            prompt_length=len(request.prompt),
            max_tokens=request.limit,
            salt=salt,
            priority=priority,
            match_prefix=self.settings.prefix_cache,
        )

    def _enter(self, group: Group, request: Request, sequence: Sequence) -> Answer:
        answer = Answer(group, len(group.answers), request, sequence)
        self.sampler.add(sequence.id, group.params, request.prompt, answer.index)
        group.answers.append(answer)
        self._answers[sequence.id] = answer
        return answer

    def _end(self, answer: Answer, reason: FinishReason, why: str | None) -> Output:
        """An answer that ends without a token."""
        output = answer.end(reason, why)
        self._leave(answer, reason)
        return output

    def _leave(self, answer: Answer, reason: FinishReason) -> None:
        """Forget an answer that has ended; its blocks are free after this."""
        self.scheduler.finish(answer.sequence.id, reason)
        self.sampler.remove(answer.sequence.id)
        del self._answers[answer.sequence.id]
        answer.group.answers.remove(answer)
        if not answer.group.answers:
            del self._groups[answer.group.id]
