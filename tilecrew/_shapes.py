"""Binds shape patterns such as "B T HV K" to sizes, with one style of error for all bad input.

Every error names the argument, what it has, what was expected, and the argument that set the expectation.
"""

import torch


class Sizes:
    """Sizes that patterns have bound so far, and which argument bound each."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._sources: dict[str, tuple[str, torch.Size]] = {}

    def __getitem__(self, symbol: str) -> int:
        return self._sizes[symbol]

    def bind(self, name: str, tensor: torch.Tensor, pattern: str) -> None:
        """Requires `tensor` to have the shape `pattern`, one symbol per dimension, and binds the symbols that are new.

        Raises TypeError where the argument `name` is no tensor, and ValueError where its rank or a size disagrees.
        """
        require_tensor(name, tensor)
        symbols, shape = pattern.split(), tensor.shape
        if len(symbols) != len(shape):
            raise ValueError(
                f"{name} must have {len(symbols)} dimensions {_bracket(symbols)}, "
                f"got {len(shape)}: shape {tuple(shape)}"
            )
        for symbol, size in zip(symbols, shape, strict=True):
            if symbol not in self._sizes:
                self._sizes[symbol], self._sources[symbol] = size, (name, shape)
            elif self._sizes[symbol] != size:
                raise ValueError(self._mismatch(name, shape, symbols, symbol))

    def set(self, symbol: str, size: int, name: str, shape: torch.Size) -> None:
        """Binds `symbol` to a size that the argument `name` of shape `shape` implies."""
        self._sizes[symbol], self._sources[symbol] = size, (name, shape)

    def _mismatch(self, name: str, shape: torch.Size, symbols: list[str], symbol: str) -> str:
        source, source_shape = self._sources[symbol]
        return (
            f"{name} must have shape {_bracket(symbols)} with {symbol} = {self._sizes[symbol]} "
            f"(from {source} of shape {tuple(source_shape)}), got shape {tuple(shape)}"
        )


def require_tensor(name: str, value: object) -> None:
    """Raises TypeError unless `value` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")


def require_same_device(name: str, tensor: torch.Tensor, reference_name: str, reference: torch.Tensor) -> None:
    """Raises ValueError unless both tensors are on one device."""
    if tensor.device != reference.device:
        raise ValueError(f"{name} must be on the device of {reference_name}, {reference.device}, got {tensor.device}")


def require_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...], because: str = "") -> None:
    """Raises TypeError unless the tensor's dtype is one of `allowed`."""
    if tensor.dtype not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must be {names}{because}, got {str(tensor.dtype).removeprefix('torch.')}")


def _bracket(symbols: list[str]) -> str:
    return "[" + ", ".join(symbols) + "]"
