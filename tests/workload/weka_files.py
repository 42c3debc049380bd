"""Small conversations in Weka's format."""

import json

BLOCK = 64


def asked(t, ids, *, out=10, took=1.0, model="big", extra=5, **keys):
    """A request at `t` whose prompt has these full blocks and `extra` further tokens."""
    tokens = BLOCK * len(ids) + extra
    request = {"t": t, "type": "n", "model": model, "in": tokens, "out": out, "hash_ids": ids}
    return {**request, **({} if took is None else {"api_time": took}), **keys}


def subagent(t, *requests):
    return {"t": t, "type": "subagent", "agent_id": "a", "requests": list(requests)}


def conversation(*requests, **keys):
    return {
        "id": "c",
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "requests": list(requests),
        **keys,
    }


def written(path, *conversations):
    path.write_text("\n".join(map(json.dumps, conversations)))
    return path


def fanned_out():
    """A conversation with two subagents: the parent goes on while the second still runs, and waits
    for the first before its third request."""
    return conversation(
        asked(0.0, [1, 2], took=2.0),
        subagent(3.0, asked(0.0, [1, 9], model="small"), asked(1.5, [1, 9, 10], model="small")),
        subagent(3.5, asked(0.0, [1, 8], took=9.0, model="small")),
        asked(6.0, [1, 2, 3], took=1.0),
        asked(15.0, [1, 2, 3, 4], took=1.0),
    )
