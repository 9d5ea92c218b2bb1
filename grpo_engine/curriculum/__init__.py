"""What is sampled, and how, as training goes on. Plain Python and numpy, for any trainer:

    config = CurriculumConfig(shares={0: [0, 0.8, 0.2], 100: [0.2, 0.3, 0.5]})
    rates = PassRates()
    prompts = PromptDraw(len(tasks), seed, config, rates)
    for step in range(1, steps + 1):
        draw = prompts.draw(step, 8)
        for prompt in draw.prompts:
            rates.update(prompt.task, rewards_of_a_group(tasks[prompt.task]), correct_at=1.0)
        prompts.commit(step, [draw])

Everything is a function of a seed, a step and what has been committed; what changes from step to
step has `state()` and `load(state)`, of plain JSON values.
"""

from .anchors import anchor_text, choose_groups
from .bands import BANDS, PassRates, TaskRecord
from .config import AnchorsConfig, CurriculumConfig, ReplayConfig, VariantsConfig
from .draw import Draw, Drawn, PromptDraw
from .presets import PRESETS, Setting, draw_settings
from .replay import OldSample, Replay
from .schedules import hold, interpolate, interpolate_all
from .variants import Variants

__all__ = [
    "BANDS",
    "PRESETS",
    "AnchorsConfig",
    "CurriculumConfig",
    "Draw",
    "Drawn",
    "OldSample",
    "PassRates",
    "PromptDraw",
    "Replay",
    "ReplayConfig",
    "Setting",
    "TaskRecord",
    "Variants",
    "VariantsConfig",
    "anchor_text",
    "choose_groups",
    "draw_settings",
    "hold",
    "interpolate",
    "interpolate_all",
]
