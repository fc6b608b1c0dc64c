"""The errors a user may see. Each is one line: the key, the value, what is allowed or how to fix it."""


class CrosstrainError(Exception):
    """Base of all; `exit_code` is the process's exit code when nothing else was started."""

    exit_code = 1


class ConfigError(CrosstrainError):
    """A bad value in the configuration: nothing is started."""

    exit_code = 2


class TrackingError(CrosstrainError):
    """The tracking store can not be used (preflight)."""

    exit_code = 3


class OutcomeError(CrosstrainError):
    """This cell can not run here. `outcome` is one of unsupported, env_missing, data_missing."""

    def __init__(self, outcome: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.outcome = outcome
        self.message = message
        self.hint = hint
