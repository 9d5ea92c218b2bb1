"""Old rollouts under a new reward: flips by hand, the same arguments, the same judgement."""

import json
import math
import statistics
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from conftest import make_tokenizer
from grpo_engine.errors import UserError
from grpo_engine.groups.rules import Rules
from grpo_engine.rescore import Recorded, replace_reward, rescore
from grpo_engine.rescore_figures import by_step, figures, largest_changes
from grpo_engine.rewards.load import reward_of
from grpo_engine.rewards.score import Scorer
from grpo_engine.rollout_table import schema
from grpo_engine.sample_config import GroupsConfig, RewardConfig, ScoringConfig

# By group: step, then by sample the old reward, whether it was valid, and the text, which is what
# the new reward gives.
LEDGER = [
    (1, [(1.0, True, "0"), (0.5, True, "0.5"), (0.0, True, "1"), (0.5, True, "0.5")]),
    (1, [(1.0, True, "1"), (1.0, True, "0.25"), (0.0, True, "0.25")]),
    (2, [(0.0, True, "0"), (0.0, True, "1")]),
    (2, [(1.0, True, "0.5"), (0.0, True, "0.5"), (None, False, "0.5"), (0.5, True, "none")]),
]


def write_ledger(run: Path, ledger=LEDGER, **columns) -> Path:
    """A run folder's rollouts; `columns` replace values in all rows."""
    (run / "rollouts").mkdir(parents=True)
    steps: dict[int, list[dict]] = {}
    for step, samples in ledger:
        rows = steps.setdefault(step, [])
        group = rows[-1]["group"] + 1 if rows else 0
        counted = [reward for reward, valid, _ in samples if valid]
        for number, (reward, valid, text) in enumerate(samples):
            values = {
                "step": step, "group": group, "task_row": 10 * group, "variant": 0, "round": 0,
                "signal": len(set(counted)) > 1, "discarded": False,
                "task": json.dumps({"answer": str(group)}), "prompt": "say", "sent": '"say"',
                "sample": number, "completion": f"{text}<eos>", "text": text, "reward": reward,
                "state": "scored" if valid else "invalid", "cause": None, "valid": valid,
                "in_loss": valid, "anchor": False, "finish_reason": "stop", "policy_version": 0,
                "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
                "repetition_penalty": 1.0, "max_tokens": 9, "seed": 1, "adapter": "a",
                "reward_version": "r", "sampling": "s", "environment": "", "tools": "",
                "components": [], "prompt_ids": [5, 6], "completion_ids": [7, 8, 1],
            }  # fmt: skip
            rows.append(values | columns)
    for step, rows in steps.items():
        table = pa.Table.from_pylist(rows, schema=schema())
        pq.write_table(table, run / "rollouts" / f"step-{step:06d}.parquet")
    return run


def number(completions, **_):
    return [None if c == "none" else float(c) for c in completions]


def rescored(run: Path, function, scoring=None, groups=None, steps=(None, None), **config):
    rules = Rules(scoring or ScoringConfig(), groups or GroupsConfig())
    recorded = Recorded.of(run, *steps)
    with Scorer([reward_of(function, **config)], rules.scoring) as scorer:
        parts = rescore(recorded, recorded.columns, scorer, rules, make_tokenizer())
        return [sample for part in parts for sample in part]


def test_flips_signal_and_means_counted_by_hand(tmp_path):
    found = figures(rescored(write_ledger(tmp_path), number))
    # First group: all pairs but that of the two 0.5 turn round. Second: one pair keeps its order,
    # one tie breaks, one is made. Third: a tie breaks. Last, its two valid samples: a tie is made.
    assert (found.pairs, found.flips) == (6, 5)
    assert (found.ties_broken, found.ties_made) == (2, 2)
    assert (found.groups, found.signal_before, found.signal_after) == (4, 3, 3)
    assert (found.signal_gained, found.signal_lost) == (1, 1)
    assert (found.became_valid, found.became_invalid) == (1, 1)
    old = [1, 0.5, 0, 0.5, 1, 1, 0, 0, 0, 1, 0]
    new = [0, 0.5, 1, 0.5, 1, 0.25, 0.25, 0, 1, 0.5, 0.5]
    assert found.old_mean == pytest.approx((sum(old) + 0.5) / 12)
    assert found.new_mean == pytest.approx((sum(new) + 0.5) / 12)
    assert found.correlation == pytest.approx(statistics.correlation(old, new))
    assert found.samples == 13 and found.gate_failures == {} and found.failures == 0


def test_each_step_has_its_own_figures(tmp_path):
    write_ledger(tmp_path)
    (first, one), (second, two) = by_step(rescored(tmp_path, number))
    assert (first, one.pairs, one.flips, one.signal_gained, one.signal_lost) == (1, 6, 5, 0, 0)
    assert (second, two.pairs, two.flips, two.signal_gained, two.signal_lost) == (2, 0, 0, 1, 1)
    assert {s.step for s in rescored(tmp_path, number, steps=(2, None))} == {2}
    assert {s.step for s in rescored(tmp_path, number, steps=(None, 1))} == {1}


def test_the_largest_changes_come_first(tmp_path):
    samples = rescored(write_ledger(tmp_path), number)
    found = [(s.step, s.group, s.sample) for s in largest_changes(samples, 4)]
    assert found == [(1, 0, 0), (1, 0, 2), (2, 0, 1), (1, 1, 1)]
    assert len(largest_changes(samples, 99)) == 7  # not those that stay, nor without a reward


def test_the_same_reward_changes_nothing(tmp_path):
    old = {"0": 1.0, "0.5": 0.5, "1": 0.0}
    write_ledger(tmp_path, LEDGER[:1])
    samples = rescored(tmp_path, lambda completions, **_: [old[c] for c in completions])
    found = figures(samples)
    assert (found.flips, found.pairs, found.ties_broken, found.ties_made) == (0, 5, 0, 0)
    assert found.correlation == pytest.approx(1.0) and largest_changes(samples, 9) == []
    constant = figures(rescored(tmp_path, lambda completions, **_: [1.0] * len(completions)))
    assert constant.correlation is None
    assert (constant.signal_lost, constant.signal_gained) == (1, 0)


def test_gates_bounds_and_states_are_those_of_training(tmp_path):
    def parts(completions, **_):
        return [{"value": float(c), "form": float(c != "1")} for c in completions]

    write_ledger(tmp_path, LEDGER[:1])
    gate = {"components": {"form": RewardConfig("form", weight=0.0, gate=0.5)}}
    found = rescored(tmp_path, parts, ScoringConfig(floor=-1.0), bounds=[0.0, 0.5], **gate)
    # Twice the value, at most 1; "1" fails its gate.
    assert [s.new_reward for s in found] == [0.0, 1.0, -1.0, 1.0]
    assert [s.gate_failed for s in found] == [None, None, "parts.form", None]
    assert figures(found).gate_failures == {"parts.form": 1}
    assert found[2].components == {"parts.value": 1.0, "parts.form": 0.0}

    strict = {"components": {"form": RewardConfig("form", valid_from=0.5)}}
    found = rescored(tmp_path, parts, **strict)
    assert found[2].new_state == "invalid" and found[2].new_cause == "broken format: parts.form"
    assert [s.new_valid for s in found] == [True, True, False, True]
    # Pairs of the three that stay: two flips of the first, and a tie.
    assert (figures(found).pairs, figures(found).flips) == (2, 2)


def test_a_function_that_fails_on_some(tmp_path):
    def fails(completions, **_):
        if "1" in completions:
            raise ValueError("no one")
        return [float(c) for c in completions]

    found = rescored(write_ledger(tmp_path, LEDGER[:1]), fails)
    assert [s.failed for s in found] == [False, False, True, False]
    assert found[2].new_state == "invalid" and "no one" in found[2].new_cause
    assert math.isnan(found[2].new_reward) and figures(found).failures == 1


def test_truncation_anchors_and_samples_drawn_again_count_as_they_did(tmp_path):
    write_ledger(tmp_path / "cut", LEDGER[:1], finish_reason="length", max_tokens=3)
    groups = GroupsConfig(truncated="penalty", truncated_penalty=0.25)
    found = rescored(tmp_path / "cut", number, groups=groups)
    assert [s.new_reward for s in found] == [-0.25, 0.25, 0.75, 0.25]
    again = "max_tokens 3, drawn again"
    write_ledger(tmp_path / "again", LEDGER[:1], finish_reason="length", cause=again)
    assert not any(s.new_valid for s in rescored(tmp_path / "again", number))
    write_ledger(tmp_path / "anchor", LEDGER[:1], anchor=True)
    found = rescored(tmp_path / "anchor", number)
    assert found[2].new_cause == "an anchor that scores as right" and not found[2].new_valid
    assert math.isnan(figures(found).new_mean)  # anchors are none of the policy's


def test_what_a_function_is_told(tmp_path):
    chat = json.dumps([{"role": "user", "content": "say"}])
    write_ledger(tmp_path, [LEDGER[2], LEDGER[3]], sent=chat)
    seen = {}

    def tell(prompts, completions, completion_ids, answer, finish_reasons, raw_completions,
             prompt_tail, groups, step):  # fmt: skip
        seen.update(locals())
        return [0.0] * len(completions)

    rescored(tmp_path, tell)
    tokenizer = make_tokenizer()
    assert seen["prompts"] == [[{"role": "user", "content": "say"}]] * 6
    texts = ["0", "1", "0.5", "0.5", "0.5", "none"]
    assert seen["completions"] == [[{"role": "assistant", "content": t}] for t in texts]
    assert seen["raw_completions"] == [f"{t}<eos>" for t in texts]
    assert seen["completion_ids"] == [[7, 8, 1]] * 6
    assert seen["prompt_tail"] == [tokenizer.decode([5, 6])] * 6
    assert seen["answer"] == ["0"] * 2 + ["1"] * 4 and seen["groups"] == [0, 0, 1, 1, 1, 1]
    assert seen["finish_reasons"] == ["stop"] * 6 and seen["step"] == 2


def test_steps_that_are_not_there(tmp_path):
    write_ledger(tmp_path)
    with pytest.raises(UserError, match="there are steps 1 to 2"):
        Recorded.of(tmp_path, 7, 9)
    with pytest.raises(UserError, match="there are none"):
        Recorded.of(tmp_path / "nowhere")
    (tmp_path / "rollouts" / "step-000002.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"can't read .*step-000002"):
        Recorded.of(tmp_path)


RUN = [
    RewardConfig("old.py:score", weight=2.0, gate=0.5, options={"a": 1}),
    RewardConfig("math", weight=0.1, options={"strict": True}),
]


def test_which_reward_is_replaced():
    same = replace_reward(RUN, "new.py:score")
    assert same == [
        RewardConfig("new.py:score", name="score", weight=2.0, gate=0.5, options={"a": 1}),
        RUN[1],
    ]
    named = replace_reward(RUN, "math=new.py:other")
    assert named == [RUN[0], RewardConfig("new.py:other", name="math", weight=0.1)]
    only = replace_reward(RUN[:1], "exact")
    assert only == [RewardConfig("exact", name="score", weight=2.0, gate=0.5)]
    with pytest.raises(UserError, match="the run has the rewards score, math; say which one"):
        replace_reward(RUN, "new.py:other")
    with pytest.raises(UserError, match="the run has the rewards"):
        replace_reward(RUN, "nothing=new.py:other")
