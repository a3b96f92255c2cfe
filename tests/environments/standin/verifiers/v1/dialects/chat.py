"""Messages as servers take them."""

from typing import Any


def message_to_wire(message: Any) -> Any:
    """A message of a prompt."""
    return message
