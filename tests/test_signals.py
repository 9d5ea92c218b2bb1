"""Stopping signals: raised at once, never in the middle of a change, never lost."""

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from grpo_engine.errors import Interrupted
from grpo_engine.signals import StopSignals


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_outside_of_a_shield_is_raised_at_once(signum):
    reached = False
    with StopSignals(), pytest.raises(Interrupted) as caught:
        try:
            signal.raise_signal(signum)
            reached = True
        except Exception:  # a reward function that swallows everything
            reached = True
    assert caught.value.signum == signum and not reached


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_inside_of_shields_is_raised_after_the_outermost(signum):
    done = []
    with StopSignals() as signals, pytest.raises(Interrupted) as caught:
        with signals.shield():
            with signals.shield():
                os.kill(os.getpid(), signum)
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert (done, caught.value.signum) == (["inner", "outer"], signum)


def test_a_second_signal_waits_for_what_the_first_one_asked_for():
    # Someone who presses Ctrl-C twice must not lose the checkpoint.
    saved = False
    with StopSignals() as signals, pytest.raises(Interrupted) as caught:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            with signals.shield():
                signal.raise_signal(signal.SIGINT)
                saved = True
    assert saved and caught.value.signum == signal.SIGINT


def test_a_signal_that_was_swallowed_can_be_sent_again():
    with StopSignals():
        with contextlib.suppress(Interrupted):  # a reward function with a bare except
            signal.raise_signal(signal.SIGINT)
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGINT)


def test_error_inside_of_a_shield_is_not_hidden_by_a_signal():
    with StopSignals() as signals:
        with pytest.raises(OSError, match="disk full"), signals.shield():
            signal.raise_signal(signal.SIGTERM)
            raise OSError("disk full")
        # The signal is kept for the next chance to stop.
        with pytest.raises(Interrupted), signals.shield():
            pass


def test_ignored_signals_stay_ignored():
    """As SIGHUP under nohup, and SIGINT of a job that a script put into the background."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_once_a_stop_is_under_way_further_signals_do_nothing():
    with StopSignals() as signals:
        with signals.shield():
            signal.raise_signal(signal.SIGTERM)
            signals.ignore()
        signal.raise_signal(signal.SIGINT)


def test_handlers_of_before_are_restored():
    def mine(*_: object) -> None:
        pass

    outer = signal.signal(signal.SIGTERM, mine)
    try:
        before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
        with pytest.raises(Interrupted), StopSignals():
            assert signal.getsignal(signal.SIGTERM) is not mine
            signal.raise_signal(signal.SIGINT)
        assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    finally:
        signal.signal(signal.SIGTERM, outer)


def test_other_threads_leave_the_handlers_alone():
    def work() -> object:
        with StopSignals() as signals, signals.shield():
            return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(work).result() == before
    assert signal.getsignal(signal.SIGTERM) == before
