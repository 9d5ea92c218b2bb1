"""The sections of the config: read from YAML and arguments, and the key that is wrong is named."""

import json
from dataclasses import asdict, dataclass, field

import pytest

from grpo_engine.curriculum import (
    AnchorsConfig,
    CurriculumConfig,
    ReplayConfig,
    Setting,
    VariantsConfig,
)
from grpo_engine.errors import UserError
from grpo_engine.parsing import parse_run

BASE = Setting(0.7, 0.5)


@dataclass(frozen=True)
class Sections:
    """As a run holds them."""

    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    variants: VariantsConfig = field(default_factory=VariantsConfig)
    anchors: AnchorsConfig = field(default_factory=AnchorsConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)


def parsed(*args: str) -> Sections:
    run = ["--model.path=m", "--data.path=d", "--rewards=[{function: math}]"]
    config = parse_run([*run, *args])[0]
    return Sections(**{name: getattr(config, name) for name in vars(Sections())})


YAML = """
curriculum:
  temperature: {0: 1.2, 100: 1}
  group_size: {0: 16, 100: 8}
  shares: {0: [0, 0.8, 0.2], 50: [0.2, 0.3, 0.5]}
variants: {templates: ["Q: {prompt} A:"], column: others}
anchors: {share: 0.05}
replay: {mode: clone, steps: 3}
"""


def test_schedules_come_from_yaml_and_an_argument_replaces_the_whole_one(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(YAML)
    sections = parsed("--config", str(path), "--curriculum.temperature", "{0: 0.9, 7: 0.8}")
    assert sections == Sections(
        CurriculumConfig(
            temperature={0: 0.9, 7: 0.8},
            group_size={0: 16, 100: 8},
            shares={0: [0.0, 0.8, 0.2], 50: [0.2, 0.3, 0.5]},
        ),
        VariantsConfig(["Q: {prompt} A:"], "others"),
        AnchorsConfig(0.05),
        ReplayConfig("clone", steps=3),
    )
    assert parsed("--config", str(path)).curriculum.temperature == {0: 1.2, 100: 1.0}


def test_names_and_mixtures_come_from_arguments():
    mixture = "[{temperature: 1.0, share: 0.75}, {temperature: 1.4, top_p: 0.9, share: 0.25}]"
    config = parsed(
        *("--curriculum.preset", "{0: early, 40: mixed}", "--curriculum.mixture", mixture)
    ).curriculum
    assert config.preset == {0: "early", 40: "mixed"}
    assert config.settings_at(39, [BASE]) == [Setting(1.3, 0.98)]
    assert config.settings_at(40, [BASE]) == [Setting(1.0, 1.0, 0.75), Setting(1.4, 0.9, 0.25)]


def test_a_step_between_whole_ones_is_not_cut_to_one():
    with pytest.raises(UserError, match=r"curriculum\.group_size .* an integer; given 1\.5"):
        parsed("--curriculum.group_size", "{0: 16, 1.5: 8}")


def test_by_default_nothing_changes():
    config = CurriculumConfig()
    for step in (0, 1, 1000):
        assert config.settings_at(step, [BASE]) == [BASE]
        assert config.group_size_at(step, 5) == 5
        assert config.shares_at(step) is None
    assert config.solved_drawn == 1.0
    assert (AnchorsConfig().share, ReplayConfig().mode) == (0.0, "none")


def test_temperature_wins_over_the_preset_which_wins_over_sampling():
    config = CurriculumConfig(temperature={0: 1.4, 10: 1.0}, preset={0: "early", 6: "late"})
    assert config.settings_at(0, [BASE]) == [Setting(1.4, 0.98)]
    assert config.settings_at(5, [BASE]) == [Setting(pytest.approx(1.2), 0.98)]
    assert config.settings_at(10, [BASE]) == [Setting(1.0, 0.9)]
    alone = CurriculumConfig(temperature={0: 1.4})
    assert alone.settings_at(3, [BASE]) == [Setting(1.4, 0.5)]  # top_p of sampling


def test_mixed_without_a_mixture_is_the_usual_one():
    settings = CurriculumConfig(preset={0: "mixed"}).settings_at(1, [BASE])
    assert settings == [Setting(1.0, 0.95, 0.6), Setting(1.3, 0.98, 0.4)]


def test_sizes_hold_and_shares_move():
    config = CurriculumConfig(group_size={0: 16, 100: 8}, shares={0: [0, 1, 0], 10: [0, 0, 1]})
    assert [config.group_size_at(step, 5) for step in (1, 99, 100)] == [16, 16, 8]
    assert config.shares_at(4) == pytest.approx([0, 0.6, 0.4])


def test_solved_tasks_are_thinned_by_default_only_with_shares():
    shares = {0: [0.2, 0.5, 0.3]}
    assert CurriculumConfig(shares=shares).solved_drawn == 0.25
    assert CurriculumConfig(shares=shares, solved_share=1.0).solved_drawn == 1.0
    assert CurriculumConfig(solved_share=0.0).solved_drawn == 0.0


WRONG = {
    "curriculum.temperature must be finite and above 0": {"temperature": {0: 0.0}},
    "curriculum.temperature begins at 3": {"temperature": {3: 1.0}},
    "curriculum.preset must be one of early, mid, late, mixed": {"preset": {0: "hot"}},
    "curriculum.group_size must be a whole number from 2 to 64": {"group_size": {0: 65}},
    "curriculum.shares must be three shares": {"shares": {0: [0.5, 0.5, 0.5]}},
    "curriculum.easy_at must be from 0 to 1": {"easy_at": 1.5},
    "curriculum.hard_at must be from 0 to 1": {"hard_at": float("nan")},
    "curriculum.hard_at must be below curriculum.easy_at": {"hard_at": 0.8},
    "curriculum.newest_weight must be above 0": {"newest_weight": 0.0},
    "curriculum.solved_after must be at least 1": {"solved_after": 0},
    "curriculum.solved_share must be from 0 to 1": {"solved_share": -0.1},
    "curriculum.mixture is for the preset mixed": {"mixture": [Setting(1.0)]},
    "curriculum.temperature and the preset mixed": {
        "preset": {0: "early", 9: "mixed"},
        "temperature": {0: 1.0},
    },
    "curriculum.mixture: temperature must be above 0": {
        "preset": {0: "mixed"},
        "mixture": [Setting(0.0)],
    },
    "curriculum.mixture: top_p must be above 0": {
        "preset": {0: "mixed"},
        "mixture": [Setting(1.0, 0.0)],
    },
    "curriculum.mixture: the shares must be at least 0, with the sum 1": {
        "preset": {0: "mixed"},
        "mixture": [Setting(1.0, 1.0, 0.6), Setting(1.3, 1.0, 0.6)],
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_curriculum_is_named(message):
    with pytest.raises(UserError) as caught:
        CurriculumConfig(**WRONG[message])
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        (AnchorsConfig, {"share": 0.11}, "anchors.share must be from 0 to 0.1; given 0.11"),
        (AnchorsConfig, {"share": -0.01}, "anchors.share must be from 0 to 0.1; given -0.01"),
        (ReplayConfig, {"share": 0.0}, "replay.share must be finite and above 0; given 0.0"),
        (ReplayConfig, {"weight": -1.0}, "replay.weight must be finite and above 0; given -1.0"),
        (ReplayConfig, {"steps": 0}, "replay.steps must be at least 1; given 0"),
        (ReplayConfig, {"most_age": 0}, "replay.most_age must be at least 1; given 0"),
        (VariantsConfig, {"templates": ["{prompt}", "Q:"]}, "variants.templates: 'Q:' has no"),
    ],
)
def test_wrong_values_of_the_other_sections_are_named(section, values, message):
    with pytest.raises(UserError) as caught:
        section(**values)
    assert str(caught.value).startswith(message)


def test_the_bounds_themselves_are_allowed():
    assert AnchorsConfig(0.1).share == 0.1
    config = CurriculumConfig(easy_at=1.0, hard_at=0.0, newest_weight=1.0, solved_share=1.0)
    assert (config.easy_at, config.hard_at) == (1.0, 0.0)
    assert CurriculumConfig(group_size={0: 2, 1: 64}).group_size_at(1, 8) == 64


def test_a_checkpoint_holds_the_sections_as_json():
    config = CurriculumConfig(preset={0: "mixed"}, mixture=[Setting(1.0)], solved_share=0.5)
    stored = json.loads(json.dumps(asdict(config)))
    assert stored["preset"] == {"0": "mixed"}
    assert stored["mixture"] == [{"temperature": 1.0, "top_p": 1.0, "share": 1.0}]
