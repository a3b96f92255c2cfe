"""``python -m limbeck`` is the ``limbeck`` command, which is how torchrun starts it."""

from limbeck.cli import main

main()
