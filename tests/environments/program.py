"""An environment that speaks JSON lines: a counter that the student has to bring to the record's goal.

Besides the tool that it tells of there are ``die``, ``hang`` and ``mumble``, which do what they say; with ``deaf`` as
its argument it never answers at all.
"""

import json
import os
import sys
import time

PARAMETERS = {"type": "object", "properties": {"by": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "raise", "description": "Count.", "parameters": PARAMETERS}}]
goal = count = 0
for line in sys.stdin:
    request = json.loads(line)
    if sys.argv[1:] == ["deaf"]:
        continue
    if request["method"] == "start":
        count, goal = 0, request["record"]["goal"]
        reply = {"messages": [{"role": "user", "content": f"Count to {goal}."}], "tools": TOOLS}
    elif request["method"] == "answer":
        messages = []
        for call in request["calls"]:
            if call["name"] == "die":
                os._exit(1)
            if call["name"] == "hang":
                time.sleep(600)
            if call["name"] == "mumble":
                print("this is no JSON", flush=True)
            count += call["arguments"].get("by", 1) if call["name"] == "raise" else 0
            messages.append(str(count))
        reply = {"messages": messages}
    else:
        reply = {"reward": 1.0 if count == goal else -1.0 if count > goal else 0.0, "done": count >= goal}
    print(json.dumps(reply), flush=True)
