"""Ray is an optional part; without it its tests are not collected."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("ray") else ["test_ray.py"]
