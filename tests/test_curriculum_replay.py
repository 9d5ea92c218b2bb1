"""Old samples: which are kept, which may serve again, and that the others can't."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from grpo_engine.curriculum import OldSample, Replay, ReplayConfig


def old(task: int, reward: float, version: int = 0, rewarded: str = "r1", token: int = 5):
    return OldSample(task, [1, 2], [token], 0.9, reward, reward >= 1.0, version, rewarded)


def replay(mode: str, **changes) -> Replay:
    return Replay(ReplayConfig(mode, **changes))


def chosen(buffer: Replay, count=99, version=1, rewarded="r1", seed=0, step=1):
    return buffer.choose(count, version, rewarded, seed=seed, step=step)


def test_mode_none_keeps_nothing():
    buffer = Replay(ReplayConfig())
    buffer.add([old(0, 1.0)])
    assert len(buffer) == 0 and chosen(buffer) == []


def test_clone_keeps_right_samples_and_serves_the_best_of_each_task():
    buffer = replay("clone")
    buffer.add([old(0, 1.0), old(0, 2.0, token=6), old(1, 0.99), old(2, 1.5), old(3, 1.0)])
    assert len(buffer) == 4
    assert chosen(buffer) == [old(0, 2.0, token=6), old(2, 1.5), old(3, 1.0)]
    assert chosen(buffer, count=2) == [old(0, 2.0, token=6), old(2, 1.5)]


def test_equal_rewards_take_turns():
    buffer = replay("clone")
    buffer.add([old(task, 1.0) for task in range(10)])
    served = Counter(s.task for step in range(500) for s in chosen(buffer, 2, step=step))
    # 100 each, standard deviation 9.
    assert len(served) == 10 and all(60 < count < 140 for count in served.values())
    both = [old(0, 1.0, token=5), old(0, 1.0, token=6)]
    buffer = replay("clone")
    buffer.add(both)
    assert {chosen(buffer, 1, step=step)[0].completion_ids[0] for step in range(20)} == {5, 6}


def test_kl_serves_any_reward_and_none_twice():
    buffer = replay("kl")
    samples = [old(task, reward) for task in range(4) for reward in (0.0, 1.0)]
    buffer.add(samples)
    everything = chosen(buffer, rewarded="r2")  # a KL reads no reward
    assert sorted(everything, key=samples.index) == samples
    served = Counter(samples.index(s) for step in range(400) for s in chosen(buffer, 2, step=step))
    assert len(served) == 8 and all(65 < count < 135 for count in served.values())


def test_only_the_last_generations_are_kept():
    buffer = replay("kl", steps=2)
    for task in range(4):
        buffer.add([old(task, 0.0)])
    assert sorted(s.task for s in chosen(buffer)) == [2, 3]
    buffer.add([])  # a generation without a sample is one too
    assert [s.task for s in chosen(buffer)] == [3]


def test_old_ones_do_not_serve_and_say_their_age():
    buffer = replay("kl", most_age=3)
    buffer.add([old(v, 0.0, version=v) for v in range(6)])
    assert {s.task: s.age(5) for s in chosen(buffer, version=5)} == {2: 3, 3: 2, 4: 1, 5: 0}


def test_clone_leaves_out_rewards_of_another_version_until_scored_again():
    buffer = replay("clone")
    samples = [old(0, 1.0), old(1, 1.0), old(2, 1.0), old(3, 1.0, rewarded="r2")]
    buffer.add(samples)
    assert chosen(buffer, rewarded="r2") == [samples[3]]
    assert buffer.stale(1, "r2") == samples[:3]
    buffer.rescored(samples[0], 3.0, True, "r2")
    buffer.rescored(samples[1], 2.5, False, "r2")  # right then, wrong now, whatever it earns
    buffer.rescored(samples[2], None, False, "r2")
    assert chosen(buffer, rewarded="r2") == [old(0, 3.0, rewarded="r2"), samples[3]]
    assert len(buffer) == 2 and buffer.stale(1, "r2") == []


def test_a_kl_reads_no_reward_so_nothing_is_scored_again_for_it():
    buffer = replay("kl")
    buffer.add([old(0, 0.0), old(1, 1.0)])
    assert len(chosen(buffer, rewarded="r2")) == 2 and buffer.stale(1, "r2") == []


def test_too_old_ones_are_not_worth_scoring_again():
    buffer = replay("clone", most_age=3)
    buffer.add([old(0, 1.0, version=0), old(1, 1.0, version=4)])
    assert [s.task for s in buffer.stale(5, "r2")] == [1]


def test_what_is_not_in_the_buffer_cannot_be_scored_again():
    buffer = replay("clone", steps=1)
    gone = old(0, 1.0)
    buffer.add([gone])
    buffer.add([old(0, 1.0)])
    with pytest.raises(ValueError, match="not in the buffer any more"):
        buffer.rescored(gone, 1.0, True, "r2")


def test_choosing_changes_nothing_and_depends_on_seed_and_step():
    buffer = replay("kl")
    buffer.add([old(task, 0.0) for task in range(50)])
    before = buffer.state()
    drawn = {
        (s, k): tuple(o.task for o in chosen(buffer, 8, seed=s, step=k))
        for s in (0, 1)
        for k in (1, 2)
    }
    assert len(set(drawn.values())) == 4
    assert tuple(o.task for o in chosen(buffer, 8, seed=1, step=2)) == drawn[1, 2]
    assert buffer.state() == before


@pytest.mark.parametrize("mode", ["kl", "clone"])
def test_resumed_in_the_middle_it_goes_on_as_if_unbroken(mode):
    def live(buffer: Replay, steps: range) -> list:
        served = []
        for step in steps:
            served.append(chosen(buffer, 3, version=step, step=step))
            tasks = [(step * 7 + i) % 11 for i in range(4)]
            buffer.add([old(t, [0.0, 1.0, 2.0][(t + step) % 3], step, token=step) for t in tasks])
        return served

    whole, first, resumed = (replay(mode, steps=3, most_age=2) for _ in range(3))
    unbroken = live(whole, range(12))
    begun = live(first, range(5))
    resumed.add([replace(old(0, 9.0), policy_version=99)])  # what was there is forgotten
    resumed.load(json.loads(json.dumps(first.state())))
    assert begun + live(resumed, range(5, 12)) == unbroken
    assert resumed.state() == whole.state() and any(unbroken)
