"""Bad input raises before anything is computed, and says what was expected."""

import pytest
import torch

import tilecrew
from tests.moe.problems import Problem
from tilecrew.moe import SharedExperts, interleave_gate_up


def call(**changes):
    problem = Problem(5, 2, 4, 16, 8)
    arguments = {
        "x": problem.x,
        "topk_ids": problem.topk_ids,
        "topk_weights": problem.topk_weights,
        "w_gate_up": problem.w_gate_up,
        "w_down": problem.down,
        **changes,
    }
    return tilecrew.moe_forward(**arguments)


F, I64 = torch.zeros, torch.int64


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"x": F(5, 12), "w_gate_up": F(4, 12, 16), "w_down": F(4, 8, 12)},
            ValueError,
            "x must have H .* of 8, got 12",
        ),
        ({"x": F(5, 2, 16)}, ValueError, r"x must have 2 dimensions \[T, H\]"),
        ({"x": F(5, 16, dtype=torch.int32)}, TypeError, "x must be bfloat16 or float16 or float32 or float64"),
        ({"x": None}, TypeError, "x must be a torch.Tensor, got NoneType"),
        ({"topk_ids": F(5, 2)}, TypeError, "topk_ids must be int32 or int64, got float32"),
        ({"topk_ids": torch.full((5, 2), 4)}, ValueError, "topk_ids must be -1 .* 0 to 3 .*, got 4"),
        ({"topk_ids": torch.full((5, 2), -2)}, ValueError, "got -2"),
        ({"topk_ids": F(4, 2, dtype=I64)}, ValueError, r"topk_ids must have shape \[T, K\] with T = 5 \(from x"),
        ({"topk_ids": F(5, 0, dtype=I64), "topk_weights": F(5, 0)}, ValueError, "at least one route"),
        ({"topk_ids": F(5, 5, dtype=I64), "topk_weights": F(5, 5)}, ValueError, "K at most E = 4 experts, got K = 5"),
        ({"topk_weights": F(5, 3)}, ValueError, r"topk_weights must have shape \[T, K\] with K = 2"),
        ({"topk_weights": F(5, 2, dtype=I64)}, TypeError, "topk_weights must be .*float32.*, got int64"),
        ({"topk_weights": F(5, 2, device="meta")}, ValueError, "topk_weights must be on the device of x"),
        ({"w_gate_up": F(4, 16, 16).half()}, TypeError, r"w_gate_up must be float32 \(the dtype of x\), got float16"),
        ({"w_down": F(4, 8, 16).double()}, TypeError, r"w_down must be float32 \(the dtype of x\)"),
        ({"w_gate_up": F(4, 24, 16)}, ValueError, r"w_gate_up must have shape \[L, H, N\] with H = 16"),
        ({"w_gate_up": F(4, 16, 17)}, ValueError, r"w_gate_up must have 2 \* I columns"),
        ({"w_gate_up": F(4, 16, 8), "w_down": F(4, 4, 16)}, ValueError, "w_down must have I a positive multiple of 8"),
        ({"w_gate_up": F(0, 16, 16), "w_down": F(0, 8, 16)}, ValueError, "at least one expert"),
        ({"w_down": F(3, 8, 16)}, ValueError, r"w_down must have shape \[L, I, H\] with L = 4 \(from w_gate_up"),
        ({"w_down": F(4, 16, 16)}, ValueError, r"with I = 8 \(from w_gate_up"),
        ({"w_down": F(4, 16, 32)[:, ::2, ::2]}, ValueError, "w_down: one of its last two dimensions"),
        ({"w_down": F(4 * 8 * 16 + 1)[1:].view(4, 8, 16)}, ValueError, "w_down must start at an address"),
        ({"gate_up_layout": "mixed"}, ValueError, "gate_up_layout must be 'interleaved' or 'halves', got 'mixed'"),
        ({"capacity": 4}, ValueError, "x of rank 0 has 5 tokens, more than its capacity of 4"),
        ({"capacity": 0}, ValueError, "capacity must be at least one token, got 0"),
        ({"capacity": 8.0}, TypeError, "capacity must be None or an int, got float"),
        (
            {"shared": (F(16, 16), F(8, 16))},
            TypeError,
            "shared must be None, SharedExperts or a torch.Tensor, got tuple",
        ),
        ({"shared": F(5, 8)}, ValueError, r"shared must have shape \[T, H\] with H = 16"),
        ({"shared": F(5, 16).half()}, TypeError, "shared must be float32"),
        ({"shared": SharedExperts(F(24, 16), F(8, 16))}, ValueError, "shared.w_gate_up must have shape .* H = 16"),
        ({"shared": SharedExperts(F(16, 8), F(4, 16))}, ValueError, "S a positive multiple of 8"),
        ({"shared": SharedExperts(F(16, 16), F(16, 16))}, ValueError, "shared.w_down must have shape .* S = 8"),
        ({"shared": SharedExperts(F(16, 16), F(8, 16), F(16, 1))}, ValueError, "shared.output_gate must have 1 dim"),
        ({"shared": SharedExperts(F(16, 16), F(8, 16), F(16).half())}, TypeError, "shared.output_gate must be float32"),
        (
            {"world": "two"},
            TypeError,
            "world must be None, a torch.distributed.ProcessGroup or a ",
        ),
    ],
)
def test_moe_forward(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16, 8), "num_experts must be an int, at least 1, got 0"),
        ((4, 12, 8), "hidden_size must be a multiple of 8, at least 8, got 12"),
        ((4, 16, 4), "intermediate_size must be a multiple of 8"),
    ],
)
def test_module(arguments, message):
    with pytest.raises(ValueError, match=message):
        tilecrew.ExpertParallelMoE(*arguments)


def test_shared_experts_of_the_module():
    with pytest.raises(ValueError, match="shared_output_gate needs shared experts"):
        tilecrew.ExpertParallelMoE(4, 16, 8, shared_output_gate=True)
    layer = tilecrew.ExpertParallelMoE(4, 16, 8)
    with pytest.raises(ValueError, match="no shared experts"):
        layer.load_shared_experts(F(16, 8), F(16, 8), F(8, 16))
    layer = tilecrew.ExpertParallelMoE(4, 16, 8, shared_intermediate_size=8)
    with pytest.raises(ValueError, match="output_gate must be None"):
        layer.load_shared_experts(F(16, 8), F(16, 8), F(8, 16), F(16))
    with pytest.raises(ValueError, match=r"down must have shape \(8, 16\), got \(16, 8\)"):
        layer.load_shared_experts(F(16, 8), F(16, 8), F(16, 8))
    with pytest.raises(ValueError, match=r"up must have shape \(4, 16, 8\), got \(3, 16, 8\)"):
        layer.load_experts(F(4, 16, 8), F(3, 16, 8), F(4, 8, 16))


def test_interleaving():
    with pytest.raises(ValueError, match="up must have the shape of gate"):
        interleave_gate_up(F(2, 16, 8), F(2, 16, 16))
    with pytest.raises(ValueError, match="gate must have I a multiple of 8, got 4"):
        interleave_gate_up(F(2, 16, 4), F(2, 16, 4))
