"""Hostile input by the thousand: valid files and answers, spoilt at random, given to everything that reads them.

    python -m tests.fuzz --minutes 10               all targets in turn, from a random case on
    python -m tests.fuzz arrow cache --cases 500    two of them, the same cases every time
    python -m tests.fuzz report --case 1234         one case again, in this process, with its traceback

A case is drawn from its target and number alone. It is good if it ends with a result or with a ``LimbeckError`` of one
line; anything else (another exception, a signal, a process without end, memory without measure, numbers that changed
unnoticed) is a fault, which is printed with the command that repeats it.
"""
