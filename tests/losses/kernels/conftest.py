"""The kernels run in Triton's interpreter here, on the CPU. The variable is read when a kernel is defined, so it is set
before any test module imports one."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
