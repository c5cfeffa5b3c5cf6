"""tilecrew: fused GPU kernels for models that mix Gated DeltaNet layers with mixture-of-experts layers.

Importing has no side effect on the device and needs no GPU.
"""

from tilecrew.gated_delta_rule.api import chunk_gated_delta_rule as chunk_gated_delta_rule
from tilecrew.gated_delta_rule.api import explain_chunk_gated_delta_rule as explain_chunk_gated_delta_rule
from tilecrew.gated_delta_rule.api import fused_recurrent_gated_delta_rule as fused_recurrent_gated_delta_rule
from tilecrew.grouped_gemm.api import explain_grouped_gemm as explain_grouped_gemm
from tilecrew.grouped_gemm.api import grouped_gemm as grouped_gemm
from tilecrew.moe.api import ExpertParallelMoE as ExpertParallelMoE
from tilecrew.moe.api import moe_forward as moe_forward

__version__ = "0.1.0"
