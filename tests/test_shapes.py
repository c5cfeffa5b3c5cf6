import pytest
import torch

from tilecrew._shapes import Sizes, require_dtype, require_same_device


def test_binds_each_symbol_once():
    sizes = Sizes()
    sizes.bind("q", torch.empty(2, 3, 4, 5), "B T H K")
    sizes.bind("v", torch.empty(2, 3, 8, 6), "B T HV V")
    assert [sizes[symbol] for symbol in ("B", "T", "H", "K", "HV", "V")] == [2, 3, 4, 5, 8, 6]


def test_set_binds_what_an_argument_implies():
    sizes = Sizes()
    sizes.set("N", 3, "cu_seqlens", torch.Size((4,)))
    with pytest.raises(
        ValueError, match=r"state must have shape \[N, V\] with N = 3 \(from cu_seqlens of shape \(4,\)\)"
    ):
        sizes.bind("state", torch.empty(2, 7), "N V")


def test_a_mismatch_names_both_arguments_and_shapes():
    sizes = Sizes()
    sizes.bind("q", torch.empty(2, 3), "B T")
    message = r"g must have shape \[B, T\] with T = 3 \(from q of shape \(2, 3\)\), got shape \(2, 4\)"
    with pytest.raises(ValueError, match=message):
        sizes.bind("g", torch.empty(2, 4), "B T")


def test_a_wrong_rank_shows_the_pattern():
    with pytest.raises(ValueError, match=r"q must have 3 dimensions \[B, T, K\], got 2: shape \(2, 3\)"):
        Sizes().bind("q", torch.empty(2, 3), "B T K")


def test_what_is_no_tensor():
    with pytest.raises(TypeError, match=r"q must be a torch.Tensor, got list"):
        Sizes().bind("q", [1.0], "B")  # type: ignore[arg-type]


def test_dtype_and_device():
    require_dtype("g", torch.empty(1), (torch.float32,))
    with pytest.raises(TypeError, match=r"g must be float32 or float64 here, got int32"):
        require_dtype("g", torch.empty(1, dtype=torch.int32), (torch.float32, torch.float64), because=" here")
    require_same_device("g", torch.empty(1), "q", torch.empty(1))
    with pytest.raises(ValueError, match=r"g must be on the device of q, cpu, got meta"):
        require_same_device("g", torch.empty(1, device="meta"), "q", torch.empty(1))
