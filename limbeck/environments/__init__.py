"""Environments: what answers the tool calls of a student that is trained on its own episodes.

A subclass of :class:`Environment` is an environment of one's own; those of the package are one file each. All of them
run in processes of their own (``worker.py``), so that whatever a tool does ends a process at most.
"""

from limbeck.environments.base import Call, Environment, Message

__all__ = ["Call", "Environment", "Message"]
