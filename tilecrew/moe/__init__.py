"""Mixture of experts, on one rank or with experts spread over ranks.

`tilecrew.moe_forward` and `tilecrew.ExpertParallelMoE` are the layer; here are the parts that they are made of.
"""

from tilecrew.moe.experts import SharedExperts as SharedExperts
from tilecrew.moe.experts import interleave_gate_up as interleave_gate_up
from tilecrew.moe.routing import Routing as Routing
from tilecrew.moe.routing import build_routing as build_routing
from tilecrew.moe.routing import expert_range as expert_range
