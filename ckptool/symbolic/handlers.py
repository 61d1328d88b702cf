"""The table of opcodes: what runs for each, and which of them `weights_only=True` refuses.

A handler takes the machine and the position behind its opcode and returns the next position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptool.symbolic.machine import Machine

__all__ = ["HANDLERS", "STOP", "Handler", "constant", "opcode"]

Handler = Callable[["Machine", int], int]
STOP = ord(".")


def _unknown(machine: Machine, position: int) -> int:
    raise ValueError("there is no such opcode")


HANDLERS: list[Handler] = [_unknown] * 256


def opcode(code: bytes, *, refused: bool = False) -> Callable[[Handler], Handler]:
    """Register a handler; `refused` opcodes are those that `weights_only=True` does not take."""

    def register(handler: Handler) -> Handler:
        if not refused:
            HANDLERS[code[0]] = handler
            return handler

        def noted(machine: Machine, position: int) -> int:
            machine.opcodes[handler.__name__.upper().rstrip("_")] = None
            return handler(machine, position)

        HANDLERS[code[0]] = noted
        return handler

    return register


def constant(code: bytes, make: Callable[[], Any]) -> None:
    """Register an opcode that pushes what `make` gives."""

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(make())
        return position

    HANDLERS[code[0]] = push
