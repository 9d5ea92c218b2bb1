"""A step's groups: what is drawn, drawn again, put beside, and what of it is recorded."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from grpo_engine.errors import Interrupted
from grpo_engine.sample_config import RewardConfig
from grpo_engine.trainer import Trainer
from runs import StoppingTrainer, final_weights, metrics_of, rollouts_of, tiny_config


def reward_file(tmp_path: Path, body: str) -> list[RewardConfig]:
    path = tmp_path / "mine.py"
    path.write_text(f"def f(completions, **columns):\n    {body}\n")
    return [RewardConfig(f"{path}:f")]


def groups_of(rows: list[dict]) -> dict[int, list[dict]]:
    groups: dict[int, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def test_groups_without_signal_are_drawn_again_until_the_step_is_full(model_folder, tmp_path):
    # The rows' own: those with an odd number teach nothing.
    rewards = reward_file(
        tmp_path,
        "return [(len(c) + i) % 4 if len(p) % 2 else 0.25 for i, (c, p) in "
        "enumerate(zip(completions, columns['prompts']))]",
    )
    config = tiny_config(
        model_folder,
        tmp_path,
        rewards=rewards,
        groups={"no_signal": "resample", "truncated": "keep"},
        train={"steps": 3, "prompts_per_step": 3},
    )
    trainer = Trainer(config)
    trainer.run()
    drawn = []
    for step, line in enumerate(metrics_of(config), start=1):
        groups = groups_of(rollouts_of(config, step))
        kept = [g for g in groups.values() if not g[0]["discarded"]]
        assert sum(g[0]["signal"] for g in kept) == len(kept) <= 3
        assert line["groups_extra"] == sum(g[0]["round"] > 0 for g in groups.values()) > 0
        assert line["groups_drawn"] == len(groups) <= 12
        assert line["tokens_sampled"] == sum(
            len(row["completion_ids"]) for g in groups.values() for row in g
        )
        assert line["no_signal"] == pytest.approx(1 - len(kept) / len(groups))
        for g in groups.values():
            assert len({row["task_row"] for row in g}) == 1 and len(g) == 4
            assert g[0]["discarded"] == (g[0]["signal_cause"] is not None)
            assert all(row["in_loss"] != row["discarded"] for row in g)
        rows = [g[0]["task_row"] for g in groups.values()]
        assert len(set(rows)) == len(rows)  # no task twice in a step
        drawn.append(len(groups))
    # Tasks that came up a second time in a step were passed over.
    assert trainer.collector.prompts.position >= sum(drawn)


def test_extra_draws_are_bounded(model_folder, tmp_path):
    config = tiny_config(
        model_folder,
        tmp_path,
        rewards=reward_file(tmp_path, "return [0.5] * len(completions)"),
        groups={"no_signal": "resample", "most_extra": 0.5},
        train={"steps": 1, "prompts_per_step": 4},
    )
    Trainer(config).run()
    (line,) = metrics_of(config)
    assert (line["groups_drawn"], line["groups_extra"], line["no_signal"]) == (6, 2, 1.0)
    assert not any(row["discarded"] for row in rollouts_of(config, 1))  # nothing stands in for them


def test_truncated_samples_are_drawn_again_and_kept_for_the_record(model_folder, tmp_path):
    config = tiny_config(
        model_folder,
        tmp_path,
        groups={"truncated": "resample", "truncated_rounds": 2},
        sampling={"group_size": 4, "max_tokens": 12},
        train={"steps": 1},
    )
    Trainer(config).run()
    groups = groups_of(rollouts_of(config, 1))
    again = 0
    for group in groups.values():
        old = [row for row in group if "drawn again" in (row["cause"] or "")]
        again += len(old)
        assert len(group) == 4 + len(old)
        assert all(row["finish_reason"] == "length" and not row["valid"] for row in old)
        counted = [row for row in group if row not in old]
        assert len(counted) == 4 and all(row["valid"] for row in counted)
        assert [row["sample"] for row in group] == list(range(len(group)))
        assert len({row["seed"] for row in group}) == (3 if len(old) > 4 else 2 if old else 1)
    assert again > 0
    # A cut sample is drawn anew: nobody writes its end for it.
    rows = [row for group in groups.values() for row in group]
    assert max(len(row["completion_ids"]) for row in rows) == 12


def test_a_sample_drawn_again_keeps_the_setting_of_its_predecessor(model_folder, tmp_path):
    config = tiny_config(
        model_folder,
        tmp_path,
        groups={"truncated": "resample", "truncated_rounds": 1},
        curriculum={"preset": {0: "mixed"}},
        sampling={"group_size": 5, "max_tokens": 8},
        train={"steps": 1},
    )
    Trainer(config).run()
    groups = groups_of(rollouts_of(config, 1))
    assert sum(len(rows) > 5 for rows in groups.values()) > 1
    for rows in groups.values():
        kept = [row for row in rows if "drawn again" not in (row["cause"] or "")]
        # 60 % of the group at 1.0 and 40 % at 1.3, whichever were cut.
        assert sorted(row["temperature"] for row in kept) == [1.0, 1.0, 1.0, 1.3, 1.3]


def test_presets_schedules_and_variants_are_used_and_recorded(model_folder, tmp_path):
    config = tiny_config(
        model_folder,
        tmp_path,
        curriculum={
            "preset": {0: "mixed", 3: "late"},
            "group_size": {0: 5, 2: 3},
        },
        variants={"templates": ["{prompt}", "so {prompt}?"]},
        train={"steps": 3},
    )
    Trainer(config).run()
    steps = [rollouts_of(config, step) for step in (1, 2, 3)]
    for rows, size in zip(steps, (5, 3, 3), strict=True):
        groups = groups_of(rows)
        assert [len(g) for g in groups.values()] == [size] * 4
        for g in groups.values():
            assert len({(row["prompt"], row["variant"]) for row in g}) == 1
            plain = "say " + "abc"[g[0]["task_row"] % 3] * (1 + g[0]["task_row"])
            assert g[0]["prompt"] == (f"so {plain}?" if g[0]["variant"] else plain)
    shares = Counter(row["temperature"] for row in steps[0])
    assert shares == {1.0: 12, 1.3: 8}  # 60 % and 40 % of 5, in each of 4 groups
    assert {(row["temperature"], row["top_p"]) for row in steps[2]} == {(0.85, 0.9)}
    assert len({row["variant"] for rows in steps for row in rows}) == 2
    assert len({row["sampling"] for row in steps[0]}) == 1
    assert steps[0][0]["sampling"] != steps[2][0]["sampling"]


def test_anchors_are_marked_bounded_and_no_group_has_two(model_folder, tmp_path):
    rows = "".join(f'{{"prompt": "say {c}", "answer": "7", "wrong": "x{c}"}}\n' for c in "abcde")
    (tmp_path / "data.jsonl").write_text(rows)
    config = tiny_config(
        model_folder, tmp_path, anchors={"share": 0.1, "column": "wrong"}, train={"steps": 2}
    )
    Trainer(config).run()
    for step, line in enumerate(metrics_of(config), start=1):
        rows = rollouts_of(config, step)
        anchors = [row for row in rows if row["anchor"]]
        assert line["anchors"] == len(anchors) == 1  # of 16 samples at most a tenth
        (anchor,) = anchors
        assert anchor["text"] == f"x{anchor['prompt'][-1]}" and anchor["completion_ids"][-1] == 1
        assert anchor["valid"] and not anchor["in_loss"]
        drawn = [row["reward"] for row in rows if row["valid"] and not row["anchor"]]
        assert line["reward"] == pytest.approx(sum(drawn) / len(drawn))
        tokens = [len(row["completion_ids"]) for row in rows if not row["anchor"]]
        assert line["tokens_sampled"] == sum(tokens)


def test_an_anchor_is_an_answer_of_another_task_as_the_rewards_read_it(model_folder, tmp_path):
    answers = ["[1, 2]", '["two", "zwei"]', '"First 1 + 2.\\n#### 3"']
    rows = "".join(f'{{"prompt": "say {i}", "answer": {a}}}\n' for i, a in enumerate(answers))
    (tmp_path / "data.jsonl").write_text(rows)
    groups = {"anchors": {"share": 0.1}, "train": {"steps": 6, "prompts_per_step": 3}}
    config = tiny_config(model_folder, tmp_path, **groups)
    Trainer(config).run()
    rows = [row for step in range(1, 7) for row in rollouts_of(config, step) if row["anchor"]]
    own = dict(zip("012", ["1", "two", "3"], strict=True))
    assert rows and all(row["text"] in set(own.values()) - {own[row["prompt"][-1]]} for row in rows)


def test_reward_version_changes_with_the_code_and_the_adapter_with_the_weights(
    model_folder, tmp_path
):
    versions = []
    for factor in ("1", "1.0"):
        rewards = reward_file(tmp_path, f"return [{factor} * len(c) for c in completions]")
        train = {"steps": 2, "out": str(tmp_path / factor)}
        config = tiny_config(model_folder, tmp_path, rewards=rewards, train=train)
        Trainer(config).run()
        first, second = rollouts_of(config, 1), rollouts_of(config, 2)
        assert len({row["reward_version"] for row in first + second}) == 1
        assert len({row["adapter"] for row in first}) == 1
        assert first[0]["adapter"] != second[0]["adapter"]
        versions.append(first[0]["reward_version"])
    assert versions[0] != versions[1]


EVERY_PRACTICE = {
    "curriculum": {"shares": {0: [0.2, 0.5, 0.3]}, "temperature": {0: 1.1, 6: 0.9}},
    "variants": {"templates": ["{prompt}", "so {prompt}?"]},
    "scoring": {"clip_percentiles": [5.0, 95.0], "clip_window": 40},
    "groups": {"truncated": "keep", "no_signal": "resample", "correct_at": 0.5},
    "replay": {"mode": "kl", "share": 0.5},
    "kl": {"mode": "adaptive", "target": 1e-4},
    "sampling": {"group_size": 3, "max_tokens": 6},
}


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_run_with_every_practice_resumes_bit_for_bit(model_folder, tmp_path, stop):
    weights, lines = [], []
    for name in ("whole", "halves"):
        train = {"steps": 6, "num_iterations": 2, "out": str(tmp_path / name)}
        config = tiny_config(model_folder, tmp_path, train=train, **EVERY_PRACTICE)
        if name == "halves":
            trainer = StoppingTrainer(config)
            trainer.stop_after = stop
            with pytest.raises(Interrupted):
                trainer.run()
            Trainer(config, resume=True).run()
        else:
            Trainer(config).run()
        weights.append(final_weights(config))
        timed = {"time_ms", "tokens_per_s_sample", "tokens_per_s_train"}
        lines.append([{k: v for k, v in x.items() if k not in timed} for x in metrics_of(config)])
    assert lines[0] == lines[1]
    assert len({line["beta"] for line in lines[0]}) > 2
    assert lines[0][-1]["replay_samples"] > 0
    for name in weights[0]:
        assert torch.equal(weights[0][name], weights[1][name])
