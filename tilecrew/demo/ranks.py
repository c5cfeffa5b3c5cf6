"""The demo's model with its experts spread over processes of this machine, against transformers' torch path.

Each process has the whole model but for the experts, of which it has a part, and a prompt of its own; at each
mixture-of-experts block tokens travel to their experts, through memory that the processes share. All is on the CPU, in
float32.
"""

import dataclasses
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tilecrew.demo.agreement import Check
    from tilecrew.demo.model import ModelSize

try:
    from tilecrew.parallel.launch import ProcessesError, run_processes
except ImportError:  # a torch without torch.distributed, where `check_ranks` is not called
    ProcessesError = RuntimeError  # type: ignore[misc, assignment]

NUM_PROCESSES = 4
LONGEST_PROMPT, MOST_NEW_TOKENS = 256, 4
LIMIT_SECONDS = 300.0  # for slow machines, and for busy ones


class Errors(NamedTuple):
    """One process's relative errors of the logits, and its experts in each block."""

    prefill: float
    decode: list[float]
    num_experts: int


def prompt_lengths(prompt_tokens: int) -> list[int]:
    """Tokens of each process's prompt, from the longest down: no two processes need have the same."""
    longest = min(prompt_tokens, LONGEST_PROMPT)
    return [max(1, longest * (NUM_PROCESSES - rank) // NUM_PROCESSES) for rank in range(NUM_PROCESSES)]


def check_ranks(size: "ModelSize", tokens: list[int], num_new_tokens: int) -> "list[Check]":
    """Starts the processes, with prompts from the beginning of `tokens`; the largest errors of all.

    Raises tilecrew.parallel.ProcessesError where one fails.
    """
    from tilecrew.demo.agreement import FLOAT32_TOLERANCE, Check

    prompts = [tokens[:length] for length in prompt_lengths(len(tokens))]
    num_new_tokens = min(num_new_tokens, MOST_NEW_TOKENS)
    # Not the dataclass itself, whose module imports transformers: a process would do so before it is told how.
    arguments = (dataclasses.asdict(size), prompts, num_new_tokens)
    found = run_processes(compare, NUM_PROCESSES, *arguments, timeout_seconds=60.0, limit_seconds=LIMIT_SECONDS)
    spread = f"experts on {NUM_PROCESSES} processes"
    checks = [Check(f"prefill, {spread}", _largest([errors.prefill for errors in found]), FLOAT32_TOLERANCE)]
    if num_new_tokens:
        largest = _largest([error for errors in found for error in errors.decode])
        checks.append(Check(f"decode, {num_new_tokens} steps, {spread}", largest, FLOAT32_TOLERANCE))
    return checks


def compare(world: Any, size: dict[str, int], prompts: list[list[int]], num_new_tokens: int) -> Errors:
    """What each process does: the model on transformers' path, then with its experts spread over the World. size:
    fields of a ModelSize."""
    # transformers imports flash-linear-attention where it is installed, which takes longer than all that is computed
    # here and is not used; None means that there is none.
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    import torch
    import transformers

    import tilecrew.integrations.transformers as integration
    from tilecrew.demo.agreement import relative_error, run_path
    from tilecrew.demo.model import ModelSize, build_model

    transformers.logging.set_verbosity_error()
    model = build_model(ModelSize(**size), torch.float32, torch.device("cpu"))
    prompt = torch.tensor([prompts[world.rank]])
    with integration.torch_path():
        expected = run_path(model, prompt, num_new_tokens)
    integration.spread_experts(model, world, capacity=max(map(len, prompts)))
    with integration.enabled():
        actual = run_path(model, prompt, num_new_tokens, expected.tokens)
    return Errors(
        relative_error(actual.prefill, expected.prefill),
        [relative_error(a, b) for a, b in zip(actual.decode, expected.decode, strict=True)],
        model.model.layers[0].mlp.experts.down_proj.shape[0],
    )


def _largest(errors: list[float]) -> float:
    """NaN where one is, which no tolerance accepts."""
    return max(errors) if all(error == error for error in errors) else float("nan")
