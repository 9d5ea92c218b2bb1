"""grpo eval: what a run's weights earn on held-out tasks. The run folder is not changed."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..paths import path_of
from .common import add_trust, check_out, check_trust, not_negative, positive, quiet

if TYPE_CHECKING:
    from ..answers import Answers, Summary
    from ..config import RunConfig
    from ..model import Policy
    from ..rollout import SamplingParams
    from ..taskset import TaskSet


def run(args: list[str]) -> int:
    """Prints the figures; with --out also writes the answers."""
    given = _parser().parse_args(args)
    if given.base and given.step is not None:
        raise UserError("--base is the model before training: leave out --step")
    check_out(given.out, given.run)
    quiet()
    from ..answers import answer_tasks, summarize
    from ..export import run_config
    from ..rewards.load import check_answers, load_rewards
    from ..rewards.score import Scorer
    from ..sampler import GroupSampler
    from ..taskset import TaskSet

    config = run_config(given.run, trust_remote_code=given.trust_remote_code)
    check_trust(given, config.rewards)
    path = given.data or config.data.eval_path
    if path is None:
        raise UserError(f"{given.run} has no held-out data (data.eval_path): give --data PATH")
    limit = given.limit or (None if given.data else config.data.eval_limit)
    params = _params(config, given)
    with Scorer(load_rewards(config.rewards, config.data.answer_column), config.scoring) as scorer:
        policy, step = _policy(config, given)
        source = TaskSet(path, config.data, policy, heldout=True)
        check_answers(scorer.rewards, source.tasks)
        sampler = GroupSampler(policy.model, policy.tokenizer)
        answers = answer_tasks(
            source, scorer, sampler, params, limit=limit, samples=given.samples, step=step
        )
    weights = "the model before training" if given.base else f"step {step}"
    print(
        f"{given.run}, {weights}, {path}: {len(answers.tasks)} tasks, {given.samples} answers each "
        f"at temperature {params.temperature:g}"
    )
    right = config.groups.correct_at, given.cut_counts or config.groups.cut_counts
    for line in _lines(answers, summarize(answers, *right), *right):
        print(line)
    if given.out is not None:
        rows = _rows(answers, source, answers.right(*right))
        given.out.write_text("".join(json.dumps(row, default=str) + "\n" for row in rows))
        print(f"answers: {given.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo eval",
        description="Reward, pass rate and pass@k of a run's weights on held-out tasks.",
    )
    parser.add_argument("run", type=path_of, help="a run folder; it is not changed")
    parser.add_argument("--data", help="other tasks, in a form of data.path (default: eval_path)")
    parser.add_argument("--step", type=int, help="of this checkpoint (default: the final weights)")
    parser.add_argument("--base", action="store_true", help="the model before training")
    parser.add_argument(
        "--limit", type=positive, help="the first so many tasks (default: eval_limit, or all)"
    )
    parser.add_argument("--samples", type=positive, default=1, help="answers a task (default: 1)")
    parser.add_argument(
        "--temperature",
        type=not_negative,
        help="default: 0, greedy, for one answer a task; for more that of the run's sampling (of a "
        "mixture the first)",
    )
    parser.add_argument(
        "--cut-counts",
        action="store_true",
        help="an answer that was cut before its end may be right; it is not, unless the run has "
        "groups.truncated keep",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    add_trust(parser, rewards=True)
    parser.add_argument("--out", type=path_of, help="a JSONL file for the answers; overwritten")
    return parser


def _params(config: "RunConfig", given: argparse.Namespace) -> "SamplingParams":
    setting = config.sampling.settings()[0]
    temperature = given.temperature
    if temperature is None:
        temperature = 0.0 if given.samples == 1 else setting.temperature
    if temperature == 0 and given.samples > 1:
        raise UserError(
            f"--samples {given.samples} at temperature 0 would be {given.samples} times the same "
            "answer: give a --temperature above 0"
        )
    return replace(config.sampling.params(setting, given.seed), temperature=temperature)


def _policy(config: "RunConfig", given: argparse.Namespace) -> "tuple[Policy, int]":
    """The policy, and the step of its weights."""
    from ..checkpoint import list_checkpoints
    from ..export import open_run
    from ..model import load_policy

    if given.base:
        return load_policy(config.model, config.lora, needs_reference=False, resume=None), 0
    _, policy = open_run(given.run, given.step, trust_remote_code=given.trust_remote_code)
    if given.step is not None:
        return policy, given.step
    saved = list_checkpoints(given.run / "checkpoints")
    return policy, int(saved[-1].name.removeprefix("step-")) if saved else config.train.steps


def _lines(
    answers: "Answers", found: "Summary", correct_at: float, cut_counts: bool
) -> Iterator[str]:
    from ..parts import NO_DECIDER

    yield f"reward      {found.reward:.4f}{_error(found.reward_error)}"
    if answers.scores.decider is None:
        yield f"pass rate   unknown: {NO_DECIDER}"
    else:
        cut = "" if cut_counts else ", and not cut"
        right = f"(right: {answers.scores.decider} >= {correct_at:g}{cut})"
        yield f"pass rate   {found.pass_rate:.4f}{_error(found.pass_error)}  {right}"
    if found.reward_error is not None:
        yield f"+-          standard error over {found.scored_tasks} tasks"
    if answers.samples > 1:
        rates = "  ".join(f"@{k} {rate:.4f}" for k, rate in found.pass_at.items())
        yield f"pass        {rates or 'no answer could be judged'}"
    for name, mean in found.components.items():
        given = sum(x is not None for x in answers.scores.components[name])
        over = "" if given == found.answers else f"  (of {given} answers)"
        yield f"component   {name} {mean:.4f}{over}"
    yield f"truncated   {found.truncated} of {found.answers} answers"
    if found.unscored:
        failures = (*answers.scores.failures, *answers.scores.env_failures)
        cause = next((c for c in failures if c is not None), "no reward applies")
        yield f"no reward   {found.unscored} of {found.answers} answers are left out: {cause}"


def _error(error: float | None) -> str:
    return "" if error is None else f" +- {error:.4f}"


def _rows(
    answers: "Answers", source: "TaskSet", right: list[bool | None]
) -> Iterator[dict[str, Any]]:
    scores = answers.scores
    for i, (rollout, reward) in enumerate(zip(answers.rollouts, answers.rewards, strict=True)):
        task = answers.tasks[i // answers.samples]
        yield {
            "task_row": source.tasks[task].row,
            "sample": i % answers.samples,
            "prompt": source.prompt(task),
            "text": answers.texts[i],
            "reward": reward,
            "right": right[i],
            "components": {name: column[i] for name, column in scores.components.items()},
            "failure": scores.failures[i] or scores.env_failures[i],
            "finish_reason": rollout.finish_reason,
            "completion_ids": rollout.completion_ids,
            "columns": source.tasks[task].columns,
        }
