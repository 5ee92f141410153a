"""Where draft tokens come from."""

from dustin_trt.drafting.base import Batch, Drafter, Proposal
from dustin_trt.drafting.draft_model import DraftModel, LayerSkipDraft
from dustin_trt.drafting.lookup import LookupDrafter
from dustin_trt.drafting.none import NoDrafter

__all__ = [
    "Batch",
    "DraftModel",
    "Drafter",
    "LayerSkipDraft",
    "LookupDrafter",
    "NoDrafter",
    "Proposal",
]
