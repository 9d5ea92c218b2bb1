"""What watches a run: guards with likely causes, the KL's weight, the early stop, and the audit.

Pure Python on plain figures; nothing here needs our trainer. See `guard.Guards`.
"""

from .audit import audit
from .config import GuardsConfig, KlConfig, StopConfig
from .early_stop import EarlyStop
from .guard import Alarm, Guards
from .history import Context
from .kl import KlController

__all__ = [
    "Alarm",
    "Context",
    "EarlyStop",
    "Guards",
    "GuardsConfig",
    "KlConfig",
    "KlController",
    "StopConfig",
    "audit",
]
