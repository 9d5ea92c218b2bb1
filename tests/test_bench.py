"""How the benchmark measures: its gate, its clock, and what it does with what can't run."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bench_fakes import CPU, ONE, FakeTime, fake_case, no_memory
from grpo_engine import UserError
from grpo_engine.benchmarks import head_suite, loss_suite, ours
from grpo_engine.benchmarks.harness import (
    Case,
    Expected,
    Provider,
    Timer,
    admit,
    percentiles,
    run_case,
)
from grpo_engine.errors import require


def real_case(suite: object, name: str, provider: str) -> tuple[Case, Callable]:
    """A small case of a suite, and the step of one of its providers."""
    case = next(c for c in suite.cases(suite.SHAPES["small"], CPU) if c.name == name)
    build = next(p for p in case.providers if p.name == provider).build
    return case, build(case.inputs())


LOSS = (loss_suite, "grpo", "ours-torch-packed")
FROZEN = (head_suite, "frozen", "ours-torch")
TRAINABLE = (head_suite, "trainable", "ours-torch")
FUSED = (head_suite, "trainable-fused", "ours-torch-loss")


@pytest.mark.parametrize(
    ("source", "output", "spoil"),
    [
        (LOSS, "loss", lambda x: x + 1e-3),
        (LOSS, "gradient", lambda x: x * 1.001),
        (LOSS, "gradient", lambda x: x.index_fill(0, torch.tensor([len(x) - 1]), 0.0)),
        (LOSS, "gradient", lambda x: x.index_fill(0, torch.tensor([0]), math.nan)),
        (FROZEN, "logp", lambda x: x + 0.1),
        (FROZEN, "logp", lambda x: x.roll(1)),
        (FROZEN, "entropy", lambda x: x * 1.05),
        (FROZEN, "hidden_gradient", lambda x: x * 1.2),
        (FROZEN, "hidden_gradient", lambda x: x.index_fill(0, torch.tensor([len(x) - 1]), 0.0)),
        (TRAINABLE, "weight_gradient", lambda x: x * 1.2),
        (TRAINABLE, "weight_gradient", lambda x: -x),
        (FUSED, "loss", lambda x: x + 0.03),
        (FUSED, "loss_weight_gradient", lambda x: x * 1.2),
    ],
)
def test_what_is_wrong_is_named_and_not_timed(source, output, spoil):
    case, right = real_case(*source)
    calls = []

    def wrong() -> dict[str, torch.Tensor]:
        calls.append(output)
        outputs = right()
        return outputs | {output: spoil(outputs[output].clone())}

    providers = (
        Provider("off", lambda inputs: wrong),
        Provider("right", lambda inputs: right),
    )
    off, good = run_case(replace(case, providers=providers), Timer(2, 0.0), no_memory)
    assert off.status == "wrong" and f"{output} is off by" in off.note
    assert off.p50_ms is None and off.rounds == 0 and len(calls) == 1
    assert good.status == "ok" and good.p50_ms > 0 and good.rounds == 2 and good.ratio == 1.0


def test_ours_is_held_to_tighter_limits_than_peers():
    case, right = real_case(*FROZEN)

    def rounded() -> dict[str, torch.Tensor]:
        outputs = right()
        return outputs | {"logp": outputs["logp"] + 0.01}

    peer = Provider("peer", lambda inputs: rounded)
    mine = Provider("ours", lambda inputs: rounded, head_suite.LIMITS)
    rows = [admit(case, p, case.inputs(), case.expected())[0] for p in (peer, mine)]
    assert [row.status for row in rows] == ["ok", "wrong"]
    assert rows[0].errors["logp"] == pytest.approx(0.01, abs=1e-5)


def test_no_outputs_is_wrong_and_a_floor_has_none_to_check():
    time = FakeTime()
    empty = lambda inputs: lambda: {}  # noqa: E731
    floor = Provider("floor", lambda inputs: time.step("f", 1.0), floor=True, share=0.0)
    silent, row = run_case(fake_case(Provider("silent", empty), floor), time.timer(), no_memory)
    assert silent.status == "wrong" and silent.p50_ms is None
    assert row.status == "floor" and row.p50_ms == pytest.approx(1.0) and row.rate is None


def test_errors_are_scaled_by_row_and_looked_up_by_row():
    truth = torch.tensor([[3.0, 4.0], [0.0, 1.0]], dtype=torch.float64)
    expected = Expected(truth, 0.1, truth.norm(dim=-1), rows=torch.tensor([2, 0]))
    output = torch.tensor([[0.3, 1.4], [9.0, 9.0], [3.0, 4.0]])
    assert expected.error(output) == pytest.approx(0.5)  # row 0 is off by (0.3, 0.4) of norm 1
    assert Expected(torch.tensor(2.0), 0.1).error(torch.tensor(1.5)) == 0.5
    assert math.isnan(Expected(truth, 0.1).error(truth * math.nan))
    with pytest.raises(RuntimeError):
        Expected(truth, 0.1).error(torch.zeros(3, 2))


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0)),
        ([10.0, 20.0], (12.0, 15.0, 18.0)),
        ([11.0, 1.0, 3.0, 2.0, 10.0, 5.0, 4.0, 9.0, 6.0, 8.0, 7.0], (3.0, 6.0, 9.0)),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0], (2.2, 4.0, 5.8)),
    ],
)
def test_percentiles_are_linear_between_order_statistics(samples, expected):
    assert percentiles(samples) == pytest.approx(expected)


def test_times_rates_and_ratios_follow_from_the_clock():
    time = FakeTime()
    # The gate and the calibration take the first two durations.
    first = time.step("a", 50, 50, 7, 1, 6, 2, 5, 3, 4)
    providers = (
        Provider("a", lambda inputs: first),
        Provider("b", lambda inputs: time.step("b", 10)),
        Provider("half", lambda inputs: time.step("half", 2), share=0.5),
    )
    rows = run_case(fake_case(*providers), time.timer(rounds=7), no_memory)
    a, b, _ = rows
    assert (a.p20_ms, a.p50_ms, a.p80_ms) == pytest.approx((2.2, 4.0, 5.8))
    assert (b.p20_ms, b.p50_ms, b.p80_ms) == pytest.approx((10.0, 10.0, 10.0))
    assert [row.ratio for row in rows] == pytest.approx([1.0, 2.5, 0.5])
    # 8 MB in 4 ms are 2 GB/s, half of the machine's 4.
    assert [row.rate for row in rows] == pytest.approx([2.0, 0.8, 2.0])
    assert [row.of_machine for row in rows] == pytest.approx([0.5, 0.2, 0.5])
    assert {row.rounds for row in rows} == {7} and a.rate_unit == "GB/s"


def test_rounds_interleave_and_each_begins_with_another():
    time = FakeTime()
    steps = {name: time.step(name, 1) for name in "abc"}
    time.timer(rounds=4).rounds_ms(steps)
    assert "".join(time.ran) == "abc" + "abc" + "bca" + "cab" + "abc"


def test_a_slice_holds_as_many_calls_as_its_time_and_is_divided_by_them():
    time = FakeTime()
    timer = replace(time.timer(rounds=2), slice_s=0.020)
    samples = timer.rounds_ms({"short": time.step("short", 3), "long": time.step("long", 11)})
    assert samples == {"short": pytest.approx([3, 3]), "long": pytest.approx([11, 11])}
    # 1, 2 and 4 calls until half a slice is reached (12 of 10 ms), then 4 a round.
    assert time.ran.count("short") == 1 + 2 + 4 + 2 * 4
    assert time.ran.count("long") == 1 + 2


def test_past_the_deadline_no_round_begins_and_the_row_says_so():
    time = FakeTime()
    provider = Provider("a", lambda inputs: time.step("a", 1000))
    (row,) = run_case(fake_case(provider), time.timer(rounds=9, deadline=4.5), no_memory)
    # Gate and calibration end at 2 s; rounds begin at 2, 3 and 4 s.
    assert row.rounds == 3 and row.note == "3 of 9 rounds: out of time"


def test_the_device_is_waited_for_at_both_ends_of_a_slice():
    time = FakeTime()
    step = time.step("step", 1)
    timer = replace(time.timer(rounds=1), sync=lambda: time.ran.append("sync"))
    timer.rounds_ms({"step": step})
    assert time.ran == ["sync", "step", "sync"] * 2


def raising(error: Exception) -> Callable:
    def build(inputs: object) -> None:
        raise error

    return build


@pytest.mark.parametrize(
    ("build", "status", "note"),
    [
        (lambda inputs: __import__("no_such_peer"), "not installed", "no package no_such_peer"),
        (
            lambda inputs: require("no_such_peer.part", "trl", "x"),
            "not installed",
            "no package no_such_peer",
        ),
        (raising(ImportError("cannot import name 'x'")), "failed", "ImportError: cannot import"),
        (raising(torch.OutOfMemoryError("8 GiB")), "cannot run here", "out of memory"),
        (raising(UserError("bad option")), "failed", "UserError: bad option"),
        (raising(KeyError("x")), "failed", "KeyError: 'x'"),
    ],
)
def test_what_cannot_run_stays_in_the_table_with_its_reason(build, status, note):
    time = FakeTime()
    providers = (Provider("peer", build), Provider("b", lambda inputs: time.step("b", 3)))
    peer, other = run_case(fake_case(*providers), time.timer(), no_memory)
    assert peer.status == status and peer.note.startswith(note) and peer.p50_ms is None
    assert other.ratio == 1.0  # of the first that was timed


def test_a_peer_that_is_not_installed_is_reported(monkeypatch):
    for name in ("trl", "trl.trainer"):
        monkeypatch.setitem(sys.modules, name, None)
    case, _ = real_case(*FROZEN)
    trl = next(p for p in case.providers if p.name == "trl")
    row, step = admit(case, trl, case.inputs(), case.expected())
    assert (row.status, row.note, step) == ("not installed", "no package trl", None)


def test_reasons_not_to_run_or_to_time_are_told_apart():
    time = FakeTime()
    step = time.step("step", 1)
    providers = [
        Provider(name, lambda inputs: step, **{name: "why"})
        for name in ("unavailable", "left_out", "untimed")
    ]
    rows = run_case(fake_case(*providers), time.timer(), no_memory)
    assert [row.status for row in rows] == ["cannot run here", "left out", "checked, not timed"]
    assert {row.note for row in rows} == {"why"} and len(time.ran) == 1  # the last one's gate


def test_each_implementation_runs_where_it_can(monkeypatch):
    monkeypatch.setattr(ours.ops, "IMPLEMENTATIONS", ("auto", "torch", "triton", "cpp"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = ours.implementations(CPU)
    assert list(found) == ["triton", "cpp", "torch"]  # the reference last
    assert found["cpp"] == found["torch"] == {} and "unavailable" in found["triton"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert list(ours.implementations(CPU)["triton"]) == ["untimed"]
    on_cuda = ours.implementations(torch.device("cuda"))
    assert on_cuda["triton"] == {} and "unavailable" in on_cuda["cpp"]


def test_quick_leaves_out_what_holds_all_logits():
    def left_out(quick: bool) -> set[str]:
        cases = head_suite.cases(head_suite.SHAPES["small"], CPU, quick)
        return {p.name for case in cases for p in case.providers if p.left_out}

    assert left_out(True) == {"eager", "ours-torch", "ours-torch-loss"} and not left_out(False)


def test_the_gate_runs_the_check_and_the_clock_the_step():
    time = FakeTime()
    drawn = time.step("step", 2)
    right, wrong = (lambda inputs, x=x: lambda: {"x": x} for x in (ONE, ONE + 1))
    providers = (
        Provider("right", lambda inputs: drawn, check=right),
        Provider("wrong", lambda inputs: drawn, check=wrong),
    )
    good, off = run_case(fake_case(*providers), time.timer(rounds=3), no_memory)
    assert (good.status, good.p50_ms, good.rounds) == ("ok", 2.0, 3)
    assert (off.status, off.p50_ms) == ("wrong", None)
    assert len(time.ran) == 1 + 3  # calibration and rounds of the one that is right


def test_figures_are_noted_and_not_checked():
    outputs = {"x": ONE, "size": torch.tensor(12.5)}
    provider = Provider("a", lambda inputs: lambda: dict(outputs), untimed="counted")
    case = fake_case(provider, figures=("size", "of_other"))
    (row,) = run_case(case, Timer(), no_memory)
    assert (row.status, row.figures, row.errors) == ("checked, not timed", {"size": 12.5}, {"x": 0})
    outputs["x"] = ONE + 1
    (row,) = run_case(case, Timer(), no_memory)
    assert (row.status, row.figures) == ("wrong", {"size": 12.5})


def test_a_case_may_bring_its_unit_its_rounds_and_its_memory():
    time = FakeTime()
    case = fake_case(
        Provider("a", lambda inputs: time.step("a", 500)),
        work=64,
        rate_unit="tokens/s",
        rate_scale=1.0,
        machine_rate=lambda: math.inf,
        most_rounds=2,
        peak_memory=lambda case, provider, step: (7.0, "of its own"),
    )
    (row,) = run_case(case, time.timer(rounds=9), no_memory)
    assert (row.rate, row.rate_unit, row.of_machine) == (128.0, "tokens/s", None)
    assert (row.rounds, row.peak_mem_mib, row.note) == (2, 7.0, "of its own")
    (row,) = run_case(replace(case, most_rounds=20), time.timer(rounds=3), no_memory)
    assert row.rounds == 3  # as many as were asked for, at most
