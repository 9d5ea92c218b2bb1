"""Reward functions in processes that can be killed: one sample's hang costs its own time-out.

`with WorkerPool([FunctionSpec("my.py:f")]) as pool: pool.call([Job(0, "f", arguments, ...)])`;
works without a trainer of ours. Files are imported once, in a process without torch that the
workers are forked from: what can't be forked (threads, CUDA) belongs into the function, not at the
top of its file. What a function keeps in globals lives in one worker, until that is replaced.
"""

import inspect
import itertools
import math
import os
import pickle
import selectors
import time
from collections.abc import Sequence

from ..errors import UserError
from .frames import BEGUN, RAISED, WRONG
from .jobs import Job, Outcome, Request, Task
from .load_function import FunctionSpec
from .processes import Answer, Worker, Zygote, ZygoteLost

__all__ = ["FunctionSpec", "Job", "Outcome", "WorkerPool"]

# A worker that has not begun by then is replaced, and its request tried again.
BEGIN_S = 60.0
BEGIN_TRIES = 3
# Samples are handed out in as many at a time as take about so long: few messages, and few samples
# that wait behind one that hangs.
CHUNK_S = (0.005, 0.02)
# Of a function that has hung or lost its process: two that hang in one chunk wait for one another.
WARY_CHUNK = 4
# So many samples that time out, with none that answers: what the function asks is down. Of one that
# hangs on half of its samples, by chance, one call in 256 looks like that.
DOWN_AFTER = 8


class WorkerPool:
    """Workers that run functions, each sample's failure kept to itself.

    A function is called once for all samples. If that call takes longer than its time-out, raises
    or loses its process, it is called sample by sample, each with the whole time-out; samples that
    then fail are failures, the others have values. One that hung or lost its process is called
    sample by sample from then on, so that it costs only time-outs of single samples. One of which
    nothing but time-outs is heard is given up for the call, and tried with a single sample in the
    next.

    workers: how many run side by side. calls_per_worker: after so many calls a worker gives way to
    a new one, and what functions leaked ends with it; None: never. Not to be used from several
    threads at once. Raises UserError if a function can't be loaded.
    """

    def __init__(
        self,
        specs: Sequence[FunctionSpec],
        workers: int = 2,
        calls_per_worker: int | None = None,
    ) -> None:
        if workers < 1:
            raise UserError(f"reward workers: at least 1 is needed; given {workers}")
        self._calls_per_worker = math.inf if calls_per_worker is None else calls_per_worker
        self.restarts = 0
        """workers that were replaced"""
        self._specs, self._limit, self._folder = list(specs), workers, os.getcwd()
        self._one_by_one = {i for i, spec in enumerate(specs) if spec.per_sample}
        self._chunk = [1] * len(self._specs)
        self._wary: set[int] = set()
        self._down: set[int] = set()
        self._numbers = itertools.count(1)
        self._workers: list[Worker] = []
        self._requests: dict[Worker, Request] = {}
        self._selector = selectors.DefaultSelector()
        self._zygote = Zygote(self._specs, self._folder)
        self._renewed = self._closed = False

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def signatures(self) -> list[inspect.Signature]:
        """Of the functions, in their order."""
        return self._zygote.signatures

    def close(self) -> None:
        """Ends all of its processes, and theirs."""
        if not self._closed:
            self._closed = True
            for worker in self._workers:
                self._end(worker)
            self._zygote.close()
            self._selector.close()

    def call(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Runs all jobs side by side; their outcomes, in order.

        Raises UserError, naming the function, if it returns no list of as many values as samples,
        needs an argument that is not there, or if values can't be sent.
        """
        if self._closed:
            raise ValueError("this pool of reward workers is closed")
        for worker in list(self._requests):  # a call before was interrupted
            self._replace(worker)
        self._renewed = False
        if self._zygote.lost:
            self._renew_zygote()
        tasks = [self._task(job) for job in jobs]
        while True:
            while len(self._requests) < self._limit and (ready := self._ready(tasks)):
                # A call of all samples can't be shared out later, so it comes first.
                self._ask(self._idle_worker(), max(ready, key=lambda task: task.whole))
            if not self._requests:
                return [task.outcome for task in tasks]
            self._wait()

    def _task(self, job: Job) -> Task:
        one_by_one = job.split and job.spec in self._one_by_one
        task = Task.of(job, self._specs[job.spec], self._zygote.signatures[job.spec], one_by_one)
        task.probing = one_by_one and job.spec in self._down
        return task

    def _ready(self, tasks: Sequence[Task]) -> list[Task]:
        asked = {id(request.task) for request in self._requests.values()}
        return [t for t in tasks if t.ready and not (t.probing and id(t) in asked)]

    def _idle_worker(self) -> Worker:
        for worker in self._workers:
            if worker in self._requests:
                continue
            if worker.calls < self._calls_per_worker:
                return worker
            self._end(worker)
            break
        try:
            worker = self._zygote.fork()
        except ZygoteLost as error:
            if self._renewed:
                raise UserError(
                    f"the process that starts reward workers {error} again; what it said is above"
                ) from error
            self._renewed = True
            self._renew_zygote()
            return self._idle_worker()
        self._selector.register(worker, selectors.EVENT_READ)
        self._workers.append(worker)
        return worker

    def _renew_zygote(self) -> None:
        for worker in self._workers:
            if worker not in self._requests:
                self._replace(worker)
        self._zygote.close()
        self._zygote = Zygote(self._specs, self._folder)

    def _ask(self, worker: Worker, task: Task) -> None:
        one_by_one = not task.whole
        samples: Sequence[int] = range(task.job.count)
        if one_by_one:
            fair = math.ceil(len(task.waiting) / self._limit)
            size = min(self._chunk[task.job.spec], fair)
            if task.job.spec in self._wary:
                size = 1 if task.probing else min(size, WARY_CHUNK)
            samples = [task.waiting.popleft() for _ in range(size)]
        task.whole = False
        deadline = time.monotonic() + BEGIN_S
        request = Request(next(self._numbers), task, samples, one_by_one, deadline, BEGIN_S)
        data = request.packed()
        self._requests[worker] = request
        worker.calls += len(samples) if one_by_one else 1
        worker.queue(data)
        self._send(worker)

    def _send(self, worker: Worker) -> None:
        worker.send()
        write = selectors.EVENT_WRITE if worker.sending else 0
        self._selector.modify(worker, selectors.EVENT_READ | write)

    def _wait(self) -> None:
        """Until a worker says something or is late."""
        soonest = min(request.deadline for request in self._requests.values())
        heard = set()
        for key, events in self._selector.select(max(0.0, soonest - time.monotonic())):
            worker = key.fileobj
            heard.add(worker)
            if events & selectors.EVENT_WRITE:
                self._send(worker)
            if events & selectors.EVENT_READ:
                answers, stands = worker.receive()
                for answer in answers:
                    self._take(worker, answer)
                if not stands:
                    self._lose(worker, None)
        # Only of those that had nothing to say: this process may be the late one.
        now = time.monotonic()
        for worker, request in list(self._requests.items()):
            if request.deadline <= now and worker not in heard:
                self._lose(worker, f"timed out after {request.limit_s:g} s")

    def _take(self, worker: Worker, answer: Answer) -> None:
        """Notes an answer."""
        request = self._requests.get(worker)
        if request is None:
            return
        task, now = request.task, time.monotonic()
        if isinstance(answer, pickle.UnpicklingError):
            raise UserError(f"the reward {task.job.name} returned what can't be read: {answer}")
        number, kind, content = answer
        if number != request.number:
            return
        if kind == WRONG:
            raise UserError(content)
        request.limit_s = task.job.timeout_s
        request.deadline = now + request.limit_s
        if kind == BEGUN:
            request.started = now
            return
        sample = request.samples[request.answered]
        request.answered += 1 if request.one_by_one else len(request.samples)
        if request.done:
            del self._requests[worker]
        if request.done and request.one_by_one:
            self._adapt_chunk(task.job.spec, len(request.samples), now - request.started)
        if request.one_by_one:
            task.answered += 1
            task.probing = False
            self._down.discard(task.job.spec)
        if kind == RAISED:
            task.fail(request, sample, content)
            self._give_up_if_hopeless(task)
        elif request.one_by_one:
            (task.outcome.values[sample],) = content
        else:
            task.outcome.values = content

    def _give_up_if_hopeless(self, task: Task) -> None:
        most = task.job.most_failures
        if task.timed_out >= (1 if task.probing else DOWN_AFTER) and not task.answered:
            self._down.add(task.job.spec)
            task.give_up()
        elif most is not None and task.failed > most:
            task.give_up()

    def _adapt_chunk(self, spec: int, size: int, took_s: float) -> None:
        """The number of samples that are handed out at a time."""
        if took_s < CHUNK_S[0]:
            self._chunk[spec] = max(self._chunk[spec], 2 * size)
        elif took_s > CHUNK_S[1]:
            self._chunk[spec] = max(1, size // 2)

    def _lose(self, worker: Worker, cause: str | None) -> None:
        """A worker is late, or (cause None) has died."""
        request = self._requests.get(worker)
        status = self._replace(worker)
        if request is None:
            return
        task, unanswered = request.task, list(request.samples[request.answered :])
        if request.started is None and task.unbegun < BEGIN_TRIES - 1:
            task.unbegun += 1  # it was dead or stuck before: no fault of these samples
            task.whole = not request.one_by_one
        else:
            task.fail(request, unanswered.pop(0), cause or _death(status))
            self._wary.add(task.job.spec)
            if task.job.split:
                self._one_by_one.add(task.job.spec)
            task.timed_out += request.one_by_one and cause is not None
        if request.one_by_one:
            task.waiting.extendleft(reversed(unanswered))
            self._give_up_if_hopeless(task)

    def _replace(self, worker: Worker) -> int | None:
        self.restarts += 1
        return self._end(worker)

    def _end(self, worker: Worker) -> int | None:
        self._requests.pop(worker, None)
        self._workers = [w for w in self._workers if w is not worker]
        self._selector.unregister(worker)
        return worker.end()


def _death(status: int | None) -> str:
    if status is None:
        return "lost its process"
    code = os.waitstatus_to_exitcode(status)
    return f"lost its process ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
