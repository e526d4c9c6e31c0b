"""How a command says that it cannot do what it was asked for."""

WRONG_USAGE = 2  # the exit code, as argparse has it


class CommandFailed(Exception):
    """One line for the user: cause and remedy. `is_wrong_usage`: the command line itself is at fault."""

    def __init__(self, reason: str, *, is_wrong_usage: bool = False) -> None:
        super().__init__(reason)
        self.is_wrong_usage = is_wrong_usage

    @property
    def exit_code(self) -> int:
        return WRONG_USAGE if self.is_wrong_usage else 1
