"""Tools, in this process instead of behind a server."""

from types import SimpleNamespace
from typing import Any

import verifiers.v1 as vf


class _Connection:
    def __init__(self, tools: Any) -> None:
        self.tools = tools

    async def run(self, operation: Any) -> Any:
        return await operation(self)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return SimpleNamespace(content=str(self.tools[name](**arguments)), is_error=False)
        except Exception as error:
            return SimpleNamespace(content=f"Error executing tool {name}: {error}", is_error=True)


async def connect_mcp(config: Any, stack: Any) -> Any:
    """Schemas, places and connections of tools."""
    schemas, places, connections = [], {}, {}
    for server, spec in config["mcpServers"].items():
        tools = vf.TOOLS[spec["url"]]
        connections[server] = _Connection(tools)
        for name, function in tools.items():
            about = {"name": name, "description": function.__doc__, "parameters": {"type": "object", "properties": {}}}
            schemas.append({"type": "function", "function": about})
            places[name] = server, name
    return schemas, places, connections


def mcp_content_to_chat_content(content: Any) -> Any:
    """What a tool said."""
    return content
