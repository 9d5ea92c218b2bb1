"""The table of a step's samples, from a batch made by hand."""

import json

import pytest

from grpo_engine.groups.batch import Origin
from grpo_engine.groups.make import make_batch
from grpo_engine.rewards.process import StepReward
from grpo_engine.rollout_table import AUDITED, Asked, audit_rows, rollout_table, schema
from samples import batch_of, rules, samples_of


def rows_of(batch) -> list[dict]:
    groups, samples = len(batch.origins), len(batch.rollouts)
    asked = [
        Asked(f"prompt {g}", f"sent {g}", {"answer": g, "day": [g, None]}) for g in range(groups)
    ]
    table = rollout_table(4, batch, asked, [f"<{i}>" for i in range(samples)])
    assert table.schema.equals(schema())
    return table.to_pylist()


def test_a_row_a_sample_with_what_its_group_shares():
    origins = [Origin(3, 30, 1, "easy", 0), Origin(5, 50, 0, None, 2)]
    rows = rows_of(
        batch_of(
            [[1, None, 0], [0, 0]],
            origins=origins,
            components={"f": [1.0, None, 0.0, 0.0, 0.0], "b": [None, None, 7.0, None, None]},
        )
    )
    assert [row["group"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["task_row"] for row in rows] == [30, 30, 30, 50, 50]
    assert [(row["variant"], row["band"], row["round"]) for row in rows[2:4]] == [
        (1, "easy", 0),
        (0, None, 2),
    ]
    assert [row["prompt"] for row in rows] == ["prompt 0"] * 3 + ["prompt 1"] * 2
    assert [row["completion"] for row in rows] == [f"<{i}>" for i in range(5)]
    assert [json.loads(row["task"])["answer"] for row in rows] == [0, 0, 0, 1, 1]
    assert [row["signal"] for row in rows] == [True] * 3 + [False] * 2
    assert [row["signal_cause"] for row in rows] == [None] * 3 + ["all_wrong"] * 2
    # None is null, never NaN or 0.
    assert [row["reward"] for row in rows] == [1.0, None, 7.0, 0.0, 0.0]
    assert dict(rows[2]["components"]) == {"f": 0.0, "b": 7.0}
    assert (rows[1]["state"], rows[1]["valid"], rows[1]["advantage"]) == ("invalid", False, 0.0)
    assert rows[0]["advantage"] == pytest.approx(-1.0, abs=1e-3)
    assert {row["step"] for row in rows} == {4} and {row["policy_version"] for row in rows} == {3}
    assert (rows[0]["temperature"], rows[0]["seed"]) == (0.7, 5)


def test_ids_and_both_log_probs_are_those_of_the_rollout():
    batch = batch_of([[1, 0]])
    for row, rollout in zip(rows_of(batch), batch.rollouts, strict=True):
        assert row["prompt_ids"] == rollout.prompt_ids
        assert row["completion_ids"] == rollout.completion_ids
        assert row["logp_sampler"] == rollout.logp_sampler.tolist()
        assert row["logp_processed"] == rollout.logp_processed.tolist()


def test_advantages_of_tokens_are_recorded_where_steps_are_rewarded():
    steps = [[StepReward(0, 1, 1.0), StepReward(1, 2, 3.0)], [StepReward(0, 3, 5.0)]]
    made = samples_of(
        [[0, 0], [1, 0]],
        components={"f": [0.0, 0.0, 1.0, 0.0], "s": [2.0, 5.0, None, None]},
        steps={"s": [*steps, None, None]},
    )
    rows = rows_of(make_batch(made, rules()))
    # Steps 1, 3, 5: mean 3, deviation sqrt(8/3).
    one = 2 / ((8 / 3) ** 0.5 + 1e-4)
    assert rows[0]["token_advantages"] == pytest.approx([-one, 0.0])
    assert rows[1]["token_advantages"] == pytest.approx([one] * 3)
    assert rows[2]["token_advantages"] is rows[3]["token_advantages"] is None


def test_anchors_are_not_for_the_audit():
    batch = batch_of([[1, 0, 0]], anchors=[False, False, True])
    asked = [Asked("p", "p", {})]
    table = rollout_table(4, batch, asked, ["a", "b", "c"]).select(AUDITED)
    found = audit_rows(table)
    assert [(row["reward"], row["length"]) for row in found] == [(1.0, 2), (0.0, 3)]
    assert found[0]["components"] == {"f": 1.0} and found[0]["completion"] == "t"
