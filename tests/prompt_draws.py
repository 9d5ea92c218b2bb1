"""Makes draws of prompts whose tasks lie in given bands."""

from grpo_engine.curriculum import CurriculumConfig, Draw, PassRates, PromptDraw
from grpo_engine.data import TaskStream

EASY, MEDIUM, HARD = "easy", "medium", "hard"


def rates_of(easy=(), hard=(), solved=()) -> PassRates:
    """`solved` ones are easy too; three groups in a row were all right."""
    rates = PassRates()
    for task in easy:
        rates.update(task, [1.0] * 9 + [0.0], 1.0)
    for task in hard:
        rates.update(task, [0.0, 0.0], 1.0)
    for task in list(solved) * 3:
        rates.update(task, [1.0, 1.0], 1.0)
    return rates


def banded(tasks, shares, rates, seed=0, **config) -> PromptDraw:
    return PromptDraw(tasks, seed, CurriculumConfig(shares={0: shares}, **config), rates)


def streamed(tasks, rates=None, seed=3, **config) -> PromptDraw:
    stream = TaskStream(tasks, seed)
    return PromptDraw(tasks, seed, CurriculumConfig(**config), rates or PassRates(), stream)


def tasks_of(draw: Draw) -> list[int]:
    return [prompt.task for prompt in draw.prompts]


def run(draw: PromptDraw, steps: range, count: int) -> list[list[int]]:
    """The tasks of each step, committed."""
    drawn = []
    for step in steps:
        made = draw.draw(step, count)
        draw.commit(step, [made])
        drawn.append(tasks_of(made))
    return drawn
