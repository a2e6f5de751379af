"""One option of SGLang that a server may not be started with, and the sentence that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nsa_backend.adapters.shared import WAY_BACK

OFF = (None, False)


@dataclass(frozen=True)
class Rule:
    """An option, the values of it that are served, and why the others are not."""

    attribute: str  # of ServerArgs, dotted where it is nested
    option: str
    why: str  # empty where the advice says it all
    served: tuple = OFF
    advice: str = "drop the option"
    everywhere: bool = True  # whether every release of the generation has the option
    builtin_serves: bool = True  # whether SGLang's own backend does with it what is refused here

    def value(self, server_args: Any) -> Any:
        """What the server was started with."""
        return getattr(server_args, self.attribute) if self.everywhere else nested(server_args, self.attribute)

    def serves(self, server_args: Any) -> bool:
        """Whether that is served."""
        return self.value(server_args) in self.served

    def refusal(self, server_args: Any) -> str | None:
        """The sentence, or None where the value is served."""
        if self.serves(server_args):
            return None
        value = self.value(server_args)
        shown = self.option if value is True else f"{self.option} {value}"
        reason = f"{self.why}; " if self.why else ""
        way_back = f", or {WAY_BACK}" if self.builtin_serves else ""
        return f"nsa_backend does not serve {shown}: {reason}{self.advice}{way_back}"


def nested(server_args: Any, path: str) -> Any:
    """What a dotted path leads to; None where a release has no such attribute."""
    for name in path.split("."):
        server_args = getattr(server_args, name, None)
    return server_args
