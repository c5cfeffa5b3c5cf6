"""Problems of the benchmark, and the floor under their times."""

import dataclasses
from dataclasses import dataclass

import torch

from tilecrew.gated_delta_rule.arguments import ForwardArguments
from tilecrew.gated_delta_rule.recurrent_arguments import RecurrentArguments
from tilecrew.testing import random_arguments

DIM = 128  # K and V
CHUNK = 64

# Measured on the device: dense bf16 matrix product 8192^3 (FLOP/s), copy (bytes/s). Other devices have no floor here.
PEAKS = {"NVIDIA H200": (790e12, 4.27e12)}


@dataclass(frozen=True)
class ForwardCase:
    """A chunked forward of `batch` sequences of `num_tokens`, K = V = 128, with a final state."""

    batch: int
    num_tokens: int
    num_heads: int
    num_value_heads: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.num_tokens}, {self.num_heads}/{self.num_value_heads}"

    def arguments(self, dtype: torch.dtype, device: torch.device, inside: bool) -> ForwardArguments:
        """Fresh inputs: unit keys and queries, log decays and strengths; or with `inside` what a model's projections
        give, for the operator to normalise and to make them of."""
        arguments = random_arguments(
            self.batch,
            self.num_tokens,
            self.num_heads,
            self.num_value_heads,
            dtype=dtype,
            device=device,
            normalised=not inside,
            use_qk_l2norm=inside,
            use_beta_sigmoid=inside,
            output_final_state=True,
        )
        if not inside:
            return arguments
        num_value_heads = arguments.g.shape[2]
        return dataclasses.replace(
            arguments,
            g=torch.randn_like(arguments.g),
            beta=torch.randn_like(arguments.beta),
            A_log=torch.rand(num_value_heads, device=device).to(arguments.g.dtype) - 0.5,
            dt_bias=torch.rand(num_value_heads, device=device).to(arguments.g.dtype) - 3.5,
        )

    def floor_milliseconds(self, device_name: str) -> float | None:
        """The larger of the time to multiply and the time to read and write everything once, in bf16.

        Products of a chunk and value head: K K^T, Q K^T, A W and P V_d (64 x 64 x 128), K S, Q S and K^T V'
        (64 x 128 x 128).
        """
        if device_name not in PEAKS:
            return None
        flops_per_second, bytes_per_second = PEAKS[device_name]
        num_chunks = self.batch * -(-self.num_tokens // CHUNK)
        flops = 2 * num_chunks * self.num_value_heads * (4 * CHUNK * CHUNK * DIM + 3 * CHUNK * DIM * DIM)
        tokens = self.batch * self.num_tokens
        elements = tokens * DIM * 2 * (self.num_heads + self.num_value_heads)  # q, k, v, o
        gates = tokens * self.num_value_heads * 2
        states = self.batch * self.num_value_heads * DIM * DIM
        return 1e3 * max(flops / flops_per_second, (2 * elements + 4 * (gates + states)) / bytes_per_second)


@dataclass(frozen=True)
class DecodeCase:
    """One token for each of `num_sequences` sequences, the float32 state updated in place, in each of several layers.

    num_layers       as many as Qwen3-Next has, or as have 2 GiB of state: more than an L2 cache holds in any case
    state_v_first    states are [V, K] instead of [K, V]
    """

    num_sequences: int
    num_heads: int = 16
    num_value_heads: int = 32
    state_v_first: bool = False

    @property
    def name(self) -> str:
        layout = ", V first" if self.state_v_first else ""
        return f"{self.num_sequences}, {self.num_heads}/{self.num_value_heads}{layout}"

    @property
    def num_layers(self) -> int:
        return min(36, max(1, 2**31 // self.state_bytes))

    @property
    def state_bytes(self) -> int:
        """Of one layer."""
        return 4 * self.num_sequences * self.num_value_heads * DIM * DIM

    def arguments(self, dtype: torch.dtype, device: torch.device) -> RecurrentArguments:
        arguments = random_arguments(
            self.num_sequences,
            1,
            self.num_heads,
            self.num_value_heads,
            dtype=dtype,
            device=device,
            with_initial_state=True,
        )
        return RecurrentArguments(
            q=arguments.q,
            k=arguments.k,
            v=arguments.v,
            g=arguments.g,
            beta=arguments.beta,
            scale=arguments.scale,
            initial_state=arguments.initial_state,
            state_v_first=self.state_v_first,
            output_final_state=True,
            inplace_state=True,
        )

    def floor_milliseconds(self, device_name: str) -> float | None:
        """The time to read and write the float32 states once."""
        if device_name not in PEAKS:
            return None
        return 1e3 * 2 * self.state_bytes / PEAKS[device_name][1]


FORWARD = {
    "targets": [
        ForwardCase(1, 32768, 16, 64),
        ForwardCase(1, 8192, 16, 64),
        ForwardCase(4, 8192, 16, 64),
        ForwardCase(4, 8192, 16, 32),
        ForwardCase(1, 8192, 16, 32),
        ForwardCase(8, 1024, 8, 32),
        ForwardCase(1, 32768, 2, 8),
    ],
    "small": [ForwardCase(1, 1024, 4, 8), ForwardCase(2, 512, 4, 8)],
}
DECODE = {
    "targets": [
        DecodeCase(number, state_v_first=layout) for layout in (False, True) for number in (1, 8, 32, 128, 512)
    ],
    "small": [DecodeCase(1, 4, 8), DecodeCase(8, 4, 8), DecodeCase(3, 4, 8, state_v_first=True)],
}
