"""Components, steps and callables of the user: what is refused, and what costs one sample."""

import functools
import math

import pytest

from grpo_engine.errors import UserError
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.process import StepReward
from grpo_engine.rewards.score import Scorer, Scores
from grpo_engine.sample_config import ComponentConfig, ScoringConfig

ARGUMENTS = {
    "prompts": ["p0", "p1", "p2"],
    "completions": ["a", "bb", "ccc"],
    "completion_ids": [[1], [2, 2], [3, 3, 3]],
    "step": 12,
}


def score(function, **config) -> Scores:
    reward = reward_of(function, name="r", **config)
    return Scorer([reward], ScoringConfig(max_failed=1.0)).score(ARGUMENTS, {})


def totals(scores: Scores) -> list[float | None]:
    return scores.rewards([1, 2, 3], floor=0.0)


def gives(*values):
    """A reward function that returns `values` whatever it gets."""
    return lambda **_: list(values)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_steps_that_are_not_finite_make_their_own_sample_invalid(bad):
    good = [StepReward(0, 1, 1.0)]
    scores = score(gives(good, [StepReward(0, 1, bad)], good))
    assert scores.failures == [None, f"the reward r returned {bad}", None]
    assert scores.steps == {"r": [good, None, good]}
    assert totals(scores) == [1.0, None, 1.0]


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (StepReward(0, 1, None), r"returned None for the step \[0, 1\)"),
        (StepReward(0, 1, "x"), "returned 'x' for a completion; expected a number"),
        (StepReward("0", 1, 1.0), "a step from '0' to 1: give the numbers of tokens"),
        (StepReward(0, None, 1.0), "a step from 0 to None: give the numbers of tokens"),
    ],
)
def test_steps_that_are_no_numbers_are_an_error_that_names_the_function(step, said):
    with pytest.raises(UserError, match=f"the reward r .*{said}"):
        score(gives(None, [step], None))


def test_steps_outside_their_completion_are_an_error():
    with pytest.raises(UserError, match=r"reward r, sample 1: the step \[0, 3\)"):
        score(gives(None, [StepReward(0, 3, 1.0)], None))


def test_keys_for_a_component_that_never_comes_are_an_error():
    parts = {"format": ComponentConfig(gate=1.0)}
    for values in ([{"fromat": 1.0}, None, {"fromat": 0.0}], [1.0, 1.0, 0.0]):
        with pytest.raises(UserError, match="components of r has keys for format"):
            score(gives(*values), components=parts)
    found = score(gives({"format": 0.0, "a": 5.0}, {"a": 1.0}, None), components=parts)
    assert totals(found) == [0.0, 1.0, None]


def test_a_component_may_be_away_later():
    answers = [[{"format": 1.0}] * 3, [{"a": 1.0}] * 3]
    parts = {"format": ComponentConfig(gate=1.0)}
    scorer = Scorer([reward_of(lambda **_: answers.pop(0), name="r", components=parts)])
    scorer.score(ARGUMENTS, {})
    assert totals(scorer.score(ARGUMENTS, {})) == [1.0, 1.0, 1.0]


def test_callable_with_bound_options_has_a_version_of_its_own():
    def power(completions, exponent, **_):
        return [len(c) ** exponent for c in completions]

    bound = [functools.partial(power, exponent=e) for e in (1, 2, 2)]
    assert len({reward_of(f, name="p").version for f in bound}) == 2
    assert totals(score(bound[1])) == [1.0, 4.0, 9.0]


@pytest.mark.parametrize("keys", [{"options": {"a": 1}}, {"isolate": True}])
def test_reward_of_refuses_what_it_would_ignore(keys):
    with pytest.raises(UserError, match=f"leave out {next(iter(keys))}"):
        reward_of(gives(1.0), name="r", **keys)
