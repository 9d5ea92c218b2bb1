"""What a person sees while it runs: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from math import isnan
from typing import Any

from .errors import require
from .output import Output

PLAIN_LINES = 20


class Display:
    """Reward, spread, KL, speed and the time left."""

    def __init__(self, first_step: int, steps: int) -> None:
        console = require("rich.console", "train", "the progress display")
        progress = require("rich.progress", "train", "the progress display")
        self.console = console.Console(file=Output(sys.stdout), highlight=False)
        self.first_step, self.steps = first_step, steps
        self.started = time.monotonic()
        self._live = None
        self._last = ""  # what the last step showed
        # Not by rich's is_terminal: FORCE_COLOR makes one of a log file.
        if self.console.file.isatty() and not self.console.is_dumb_terminal:
            self._live = progress.Progress(
                progress.TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
                progress.BarColumn(bar_width=20),
                progress.TextColumn("{task.description}"),
                progress.TimeRemainingColumn(),
                console=self.console,
            )
            self._bar = self._live.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, markup=False, soft_wrap=True)

    def sampling(self, drawn: int, most: int) -> None:
        """Shows how many tokens are drawn, of the most that can be; on a terminal alone."""
        if self._live is not None:
            self._live.update(self._bar, description=f"{self._last}  {drawn:,}/{most:,} tokens")

    def step(self, metrics: dict[str, Any]) -> None:
        """Shows the metrics of a step."""
        step = metrics["step"]
        valid, samples = metrics["valid"], metrics["samples"]
        text = (
            f"reward {_figure(metrics['reward'], 3)}"
            + (f" of {valid}/{samples}" if valid < samples else "")
            + f"  right {_figure(metrics['right'], 3)}  std {_figure(metrics['reward_std'], 3)}  "
            f"kl {_figure(metrics['kl'], 4)}  {metrics['tokens_per_s_sample']:,.0f} tok/s"
        )
        if self._live is not None:
            self._last = text
            self._live.update(self._bar, completed=step, description=text)
        elif step % max(1, self.steps // PLAIN_LINES) == 0 or step == self.steps:
            self.say(f"step {step}/{self.steps}  {text}  {self._time_left(step)} left")

    def _time_left(self, step: int) -> str:
        done = max(1, step - self.first_step)
        seconds = (time.monotonic() - self.started) / done * (self.steps - step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"{minutes}:{seconds:02d}"


def _figure(value: float, digits: int) -> str:
    return "-" if isnan(value) else f"{value:.{digits}f}"
