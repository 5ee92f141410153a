"""What a policy answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from dustin_trt.config import DustinConfig
from dustin_trt.drafting.base import Batch, Proposal
from dustin_trt.engines.base import Engine, Selection


class Policy(ABC):
    """Chooses the history tokens of a verification pass.

    Parameters
    ----------
    config : budget, sink, window and what else the policy needs of it

    Attributes
    ----------
    needs_history : whether it uses the target's retrieval-head queries
    needs_lookahead : whether it uses the draft's scores
    """

    name: ClassVar[str]
    needs_history: bool = False
    needs_lookahead: bool = False

    def __init__(self, config: DustinConfig) -> None:
        self.config = config

    @abstractmethod
    def plan(self, target: Engine, batch: Batch, proposal: Proposal) -> Selection:
        """What the pass over `[last, drafts…]` may read."""
