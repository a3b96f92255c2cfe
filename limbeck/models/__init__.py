"""Models: the policy that trains, teachers and where their signals come from, the teacher cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from limbeck.models.cache import CachedDocument, CacheReader, CacheSpec, CacheWriter, document_key, estimate_bytes
    from limbeck.models.cache_build import spec_for, write_cache
    from limbeck.models.loading import load_model, model_identity
    from limbeck.models.policy import Policy
    from limbeck.models.policy_config import PolicyConfig
    from limbeck.models.server import ServerTeacher
    from limbeck.models.server_config import ServerConfig
    from limbeck.models.teachers import CachedTeacher, LiveTeacher, TeacherSource

_HOME = {
    "CacheReader": "cache",
    "CacheSpec": "cache",
    "CacheWriter": "cache",
    "CachedDocument": "cache",
    "CachedTeacher": "teachers",
    "LiveTeacher": "teachers",
    "Policy": "policy",
    "PolicyConfig": "policy_config",
    "ServerConfig": "server_config",
    "ServerTeacher": "server",
    "TeacherSource": "teachers",
    "document_key": "cache",
    "estimate_bytes": "cache",
    "load_model": "loading",
    "model_identity": "loading",
    "spec_for": "cache_build",
    "write_cache": "cache_build",
}

__all__ = [
    "CacheReader",
    "CacheSpec",
    "CacheWriter",
    "CachedDocument",
    "CachedTeacher",
    "LiveTeacher",
    "Policy",
    "PolicyConfig",
    "ServerConfig",
    "ServerTeacher",
    "TeacherSource",
    "document_key",
    "estimate_bytes",
    "load_model",
    "model_identity",
    "spec_for",
    "write_cache",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
