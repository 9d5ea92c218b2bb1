"""Completions that are no answers, scored by the rewards of a run: none may earn what one does.

Pure text in `probe_texts`; `probe` scores them with any Scorer and tokenizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..groups.batch import Origin
from ..groups.fingerprints import Fingerprint
from ..groups.make import Samples, judge_samples
from ..groups.rules import Rules
from ..rewards.builtin.golds import first_gold
from ..rewards.score import Scorer
from ..rollout import Rollout, SamplingParams
from ..taskset import TaskSet, score_answers
from .checks import OK, WARNING, Check
from .code_probes import code_texts

PASTED = 50  # times
CANDIDATES = 50  # numbers from 1 on
EMPTY_FORMS = {
    "empty box": "\\boxed{}",
    "empty tag": "<answer></answer>",
    "empty phrase": "The answer is",
}
# How rewards want an answer to be given: the best-paid form is what a right answer earns.
RIGHT_FORMS = {
    "answer": "{}",
    "boxed answer": "\\boxed{{{}}}",
    "tagged answer": "<answer>{}</answer>",
    "answer in words": "The answer is {}",
}
EXCERPT = 60  # characters


@dataclass(frozen=True)
class Probe:
    """What one completion earns that is no answer to its task."""

    name: str
    row: int
    text: str
    reward: float | None
    """None: it is invalid, or no reward applies"""
    right: float | None
    """what the right answer earns; None: there is none, or it earns nothing"""
    right_at: float
    """what a probe must not reach: `right`, or groups.correct_at in its place"""

    @property
    def pays(self) -> bool:
        """Whether it earns as much as an answer."""
        return self.reward is not None and self.reward >= self.right_at


def probe_texts(prompt: str, answer: str | None, others: Sequence[str]) -> dict[str, str]:
    """Adversarial completions by name. answer: the right one; others: those of other tasks."""
    numbers = " ".join(map(str, range(1, CANDIDATES + 1)))
    texts = {"empty": "", "prompt repeated": prompt, **EMPTY_FORMS, "many candidates": numbers}
    if answer is None:
        return texts
    texts["answer pasted"] = " ".join([answer] * PASTED)
    wrong = [other for other in others if other.strip() != answer.strip()]
    if wrong:
        texts["another task's answer"] = wrong[0]
        texts["all answers"] = " ".join([*wrong, answer, wrong[0]])
    return texts


def probe(
    scorer: Scorer,
    source: TaskSet,
    tasks: Sequence[int],
    answer_column: str,
    rules: Rules,
    max_tokens: int,
) -> list[Probe]:
    """Scores the probes of some tasks, each cut to `max_tokens`, as the policy's would be; right
    answers are whole.

    Raises UserError as the scorer does.
    """
    answers = {t: source.tasks[t].columns.get(answer_column) for t in tasks}
    gold = {t: text for t, a in answers.items() if (text := first_gold(a)) is not None}
    texts: list[dict[str, str]] = []
    for task in tasks:
        others = [a for t, a in gold.items() if t != task]
        right = {n: form.format(gold[task]) for n, form in RIGHT_FORMS.items() if task in gold}
        probes = probe_texts(_words(source.prompt(task)), gold.get(task), others)
        texts.append(probes | code_texts(source.tasks[task].columns) | right)
    rewards = _score(scorer, source, tasks, texts, rules, max_tokens)
    found = []
    for task, named, paid in zip(tasks, texts, rewards, strict=True):
        earned = [paid[name] for name in RIGHT_FORMS if paid.get(name) is not None]
        best = max(earned, default=None)
        right = best if best is not None and best > rules.groups.low_at else None
        least = rules.groups.correct_at if right is None else right
        found += [
            Probe(name, source.tasks[task].row, text, paid[name], right, least)
            for name, text in named.items()
            if name not in RIGHT_FORMS
        ]
    return found


def check_probes(probes: Sequence[Probe]) -> Iterator[Check]:
    """A line for each kind of probe; one that pays is a warning: some tasks are open to it."""
    unknown = sorted({p.row for p in probes if p.right is None})
    if unknown:
        yield Check(
            "probe right answer",
            WARNING,
            f"of {len(unknown)} tasks (row {unknown[0]} for one) no answer is known that earns "
            f"anything in a usual form; probes are held to groups.correct_at {_least(probes):g}",
        )
    for name in dict.fromkeys(p.name for p in probes):
        kind = [p for p in probes if p.name == name]
        paid = [p for p in kind if p.pays]
        if not paid:
            most = max((p.reward for p in kind if p.reward is not None), default=None)
            earned = "nothing" if most is None else f"at most {most:.4g}"
            yield Check(f"probe {name}", OK, f"earns {earned} in {len(kind)} tasks")
            continue
        p = paid[0]
        known = "" if p.right is None else ", as much as the right answer"
        text = p.text if len(p.text) <= EXCERPT else f"{p.text[:EXCERPT]}..."
        yield Check(
            f"probe {name}",
            WARNING,
            f"earns {p.reward:.4g} in {len(paid)} of {len(kind)} tasks{known}: row {p.row}, "
            f"{text!r}",
        )


def _least(probes: Sequence[Probe]) -> float:
    return next(p.right_at for p in probes if p.right is None)


def _words(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"])


def _score(
    scorer: Scorer,
    source: TaskSet,
    tasks: Sequence[int],
    texts: Sequence[Mapping[str, str]],
    rules: Rules,
    max_tokens: int,
) -> list[dict[str, float | None]]:
    """The reward of each text; None where it is not valid. They go the way of samples."""
    prompts = [source.prompt(task) for task in tasks]
    groups = [
        [
            _rollout(source, task, text, None if name in RIGHT_FORMS else max_tokens)
            for name, text in named.items()
        ]
        for task, named in zip(tasks, texts, strict=True)
    ]
    decoded, scores = score_answers(scorer, source, tasks, prompts, groups, 0)
    origins = [Origin(task, source.tasks[task].row) for task in tasks]
    size = sum(map(len, groups))
    same = Fingerprint("", "", 0, "", scorer.version, "", max_tokens)
    verdicts = judge_samples(
        Samples(origins, groups, decoded, scores, [same] * size, [False] * size, [False] * size),
        rules,
    )
    pairs = zip(verdicts.rewards.tolist(), verdicts.judged.valid.tolist(), strict=True)
    rewards = iter([reward if valid else None for reward, valid in pairs])
    return [{name: next(rewards) for name in named} for named in texts]


def _rollout(source: TaskSet, task: int, text: str, max_tokens: int | None) -> Rollout:
    """A text as if it had been sampled, with an EOS where there is room for one."""
    tokenizer = source.policy.tokenizer
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    cut = max_tokens is not None and len(ids) > max_tokens
    ids = ids[:max_tokens]
    none = torch.full((len(ids),), float("nan"))
    params = SamplingParams(max_tokens=max_tokens or max(1, len(ids)))
    finish = "length" if cut else "stop"
    return Rollout(source.ids(task), ids, none, none, finish, 0, 0, params, 0)
