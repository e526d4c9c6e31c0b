"""How a command says that it cannot do what it was asked for."""


class CommandFailed(Exception):
    """One line for the user: cause and remedy. `is_wrong_usage`: the command line itself is at fault."""

    def __init__(self, reason: str, *, is_wrong_usage: bool = False) -> None:
        super().__init__(reason)
        self.is_wrong_usage = is_wrong_usage
