"""Chat templates that write the date: a run has one date, on whatever day it is gone on with."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
import yaml

from conftest import make_model, make_tokenizer
from grpo_engine import saving
from grpo_engine.cli import main
from grpo_engine.config import DataConfig
from grpo_engine.errors import UserError
from grpo_engine.prompts import encode_prompt
from grpo_engine.sampler import GroupSampler
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, final_weights, rollouts_of, tiny_config

USER = [{"role": "user", "content": "x"}]
ASKS = "{{ strftime_now('%Y-%m-%d') }} {{ messages[-1].content }}"
# As written in the templates of Llama 3.2, Granite 3, SmolLM3, gpt-oss and by hand.
TEMPLATES = {
    '{%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- else %}'
    '{%- set date_string = "26 Jul 2024" %}{%- endif %}{{ date_string }}': "03 Feb 2001",
    "{{ strftime_now('%B %d, %Y') }}": "February 03, 2001",
    '{%- set today = strftime_now("%d %B %Y") -%}{{- today ~ "." -}}': "03 February 2001.",
    '{{ "Current date: " + strftime_now("%Y-%m-%d") + "\n" }}': "Current date: 2001-02-03\n",
    "{{ strftime_now( '%H:%M:%S' ) }} {{ strftime_now(\"%S\") }}": "04:05:06 06",
    "{{ messages[0].content }}": "x",
}


class Clock(datetime):
    """Stands for `datetime`; `today` is what it shows."""

    today = datetime(2026, 12, 31, 23, 59, 58)

    @classmethod
    def now(cls, tz=None):
        return cls.today


@pytest.fixture
def days(tmp_path, monkeypatch):
    """A config of a run whose template writes the date, and the clock that it reads."""
    monkeypatch.setattr(saving, "datetime", Clock)
    monkeypatch.setattr(Clock, "today", Clock.today)
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = ASKS
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "digits.py").write_text(
        "def digits(completions, **columns):\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [sum(map(str.isdigit, t)) / max(1, len(t)) for t in texts]\n"
    )
    config = tiny_config(
        tmp_path / "model",
        tmp_path,
        data={"path": str(tmp_path / "data.jsonl"), "as_chat": True},
        train={"steps": 4},
    )
    return config, Clock


@pytest.mark.parametrize(("template", "text"), TEMPLATES.items())
def test_the_date_that_is_given_is_the_one_that_is_written(template, text):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    written = encode_prompt(tokenizer, USER, "2001-02-03T04:05:06")
    assert written == tokenizer(text)["input_ids"]
    assert tokenizer.chat_template == template  # it is saved with the weights


@pytest.mark.parametrize(
    "template",
    [
        "{% set f = '%Y' %}{{ strftime_now(f) }}",
        "{% set clock = strftime_now %}{{ clock('%Y') }}",
        "{{ strftime_now('%Y' ~ '-%m') }}",
    ],
)
def test_a_clock_that_can_not_be_held_is_an_error(template):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(UserError, match="asks strftime_now"):
        encode_prompt(tokenizer, USER, "2001-02-03")


@pytest.mark.parametrize("now", ["yesterday", "31.12.2026", "2026-02-30", "12:30"])
def test_a_date_that_is_none_is_an_error(now):
    with pytest.raises(UserError, match=r"data\.now must be a date"):
        DataConfig("tasks.jsonl", now=now)


def test_a_run_that_goes_on_next_year_keeps_its_date_and_its_bits(days, tmp_path):
    config, clock = days
    whole = replace(config, train=replace(config.train, out=str(tmp_path / "whole")))
    Trainer(whole).run()
    trainer = StoppingTrainer(config)
    trainer.stop_after = 2
    with pytest.raises(BaseException, match="signal 15"):
        trainer.run()
    clock.today = datetime(2027, 1, 1)
    Trainer(config, resume=True).run()
    for step in (1, 4):
        sent = {row["prompt"][:11] for row in rollouts_of(config, step)}
        assert sent == {"2026-12-31 "}
    expected, resumed = final_weights(whole), final_weights(config)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_a_run_that_was_killed_before_a_checkpoint_keeps_its_date(days, tmp_path):
    config, clock = days
    Trainer(config).parts.scorer.close()
    (tmp_path / "run" / "metrics.jsonl").touch()
    clock.today = datetime(2027, 1, 1)
    again = Trainer(config, resume=True)
    again.parts.scorer.close()
    assert again.config.data.now == "2026-12-31T23:59:58"


def test_a_date_of_the_config_holds_and_another_on_resume_is_refused(days):
    config, _ = days
    named = replace(config, data=replace(config.data, now="2001-02-03"))
    Trainer(named).run()
    assert {row["prompt"][:11] for row in rollouts_of(config, 1)} == {"2001-02-03 "}
    other = replace(config, data=replace(config.data, now="2001-02-04"))
    with pytest.raises(UserError, match=r"another data\.now .*2001-02-03"):
        Trainer(other, resume=True)


def test_answers_of_a_run_are_asked_for_with_its_date(days, tmp_path, monkeypatch):
    config, clock = days
    Trainer(config).run()
    clock.today = datetime(2027, 1, 1)
    asked = []
    monkeypatch.setattr(GroupSampler, "generate", lambda _, ids, *rest: asked.extend(ids) or [[]])
    assert main(["sample", str(tmp_path / "run"), "x", "--chat"]) == 0
    assert asked == [make_tokenizer()("2026-12-31 x")["input_ids"]]
    header = yaml.safe_load(Path(tmp_path / "run" / "config.yaml").read_text())
    assert header["data"]["now"] == "2026-12-31T23:59:58"


def test_a_template_that_changed_is_shown_with_the_difference(days, tmp_path):
    config, _ = days
    Trainer(config).run()
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = ASKS.replace("} {", "}: {")
    tokenizer.save_pretrained(tmp_path / "model")
    Trainer(config, resume=True).parts.scorer.close()  # the run has its own
    tokenizer.save_pretrained(tmp_path / "run/checkpoints/step-000004/model")
    with pytest.raises(UserError, match=r"had '2026-12-31 say.*now has '2026-12-31: say.*template"):
        Trainer(config, resume=True)
