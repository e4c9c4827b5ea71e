"""One exception tree. Every message says what failed and where; the hint says what to do about it.

BlockscaleError
├── UsageError             an argument makes no sense
├── FormatError            a tensor cannot be stored in a format (shape, dtype)
│   └── NonFiniteError     NaN or Inf in a tensor
├── CheckpointError        a checkpoint on disk is missing, truncated or contradictory
├── RecipeError            a recipe is malformed, matches nothing, or its plan was not met
├── ModelError             transformers cannot build or run this model
├── OutputError            the output cannot be written (exists, disk full)
├── MissingDependencyError an optional package is needed
├── EngineError            a request cannot be served: memory, the device, the model's numbers, shutting down
│   ├── BusyError          as many requests wait as may
│   └── RankError          one of the devices that compute together is gone, and the model with it
└── CheckFailed            a check that the user asked for did not hold (exit code 1)
"""


class BlockscaleError(Exception):
    """Base of every error that blockscale raises on purpose. `hint` is printed below the message."""

    exit_code = 2

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(BlockscaleError):
    """An argument makes no sense."""


class FormatError(BlockscaleError):
    """A tensor cannot be stored in the format that was asked for."""


class NonFiniteError(FormatError):
    """A tensor holds NaN or Inf."""


class CheckpointError(BlockscaleError):
    """A checkpoint on disk is missing, truncated or contradicts itself."""


class RecipeError(BlockscaleError):
    """A recipe is malformed, matches nothing, or the result is not what it planned."""


class ModelError(BlockscaleError):
    """transformers cannot build or run this model."""


class OutputError(BlockscaleError):
    """The output cannot be written."""


class MissingDependencyError(BlockscaleError):
    """An optional package is needed for what was asked."""


class EngineError(BlockscaleError):
    """A request that is right in itself cannot be served."""


class BusyError(EngineError):
    """As many requests wait as may: ask again later."""


class RankError(EngineError):
    """One of the devices that compute together is gone, and the model with it."""


class CheckFailed(BlockscaleError):
    """A check that the user asked for did not hold."""

    exit_code = 1
