"""The five ops of Dustin, one file each.

Every file holds the op's specification (`reference`, plain torch, fp32 inside), its registration
as `torch.ops.dustin.<name>` with a shape function for `torch.export`, and what is faster on a
CPU. Importing this package registers them.
"""

from dustin_trt.ops.dense_attention import dense_attention
from dustin_trt.ops.kv_append import kv_append
from dustin_trt.ops.select_tokens import select_tokens
from dustin_trt.ops.sparse_attention import sparse_attention
from dustin_trt.ops.srh_score import srh_score

__all__ = ["dense_attention", "kv_append", "select_tokens", "sparse_attention", "srh_score"]
