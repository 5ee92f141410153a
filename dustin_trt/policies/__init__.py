"""Which history tokens a verification pass may read."""

from dustin_trt.policies.base import Policy
from dustin_trt.policies.dense import DensePolicy
from dustin_trt.policies.dustin import DustinPolicy
from dustin_trt.policies.oracle import OraclePolicy
from dustin_trt.policies.streaming import StreamingPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (DensePolicy, DustinPolicy, StreamingPolicy, OraclePolicy)
}

__all__ = [
    "POLICIES",
    "DensePolicy",
    "DustinPolicy",
    "OraclePolicy",
    "Policy",
    "StreamingPolicy",
]
